"""Logits: owners keep SGLang's logits processor and sampler, and ask the head's node for rows.

An owner runs SGLang's LogitsProcessor on row numbers in place of hidden states. The one place
that would multiply them by the head, `_compute_lm_head`, fetches [rows, V/T] from the matching
TP rank of the head's node instead; SGLang then gathers the vocabulary inside the owner's node.

A pure decode step wants one row of logits for every row of the step, so all ranks know what
moves. In any other step an owner may ask any number of times (input logprobs come in chunks):
then nodes ask in rounds, and the rounds end when a round is empty on every node.
"""

from typing import Any

import torch

from sglang_tknp import compat
from sglang_tknp.exchange import Exchange
from sglang_tknp.layout import OwnershipLayout
from sglang_tknp.model_ext.buffers import StepBuffers
from sglang_tknp.model_ext.stage import Stage


class CaptureHidden(torch.nn.Module):
    """Stands in for the model's logits processor on the head's node: returns the hidden states."""

    def __init__(self) -> None:
        super().__init__()
        self.head: Any = None

    def forward(
        self, input_ids: Any, hidden_states: torch.Tensor, lm_head: Any, *_: Any, **__: Any
    ) -> torch.Tensor:
        # Not as a submodule: the head belongs to the model.
        object.__setattr__(self, "head", lm_head)
        return hidden_states


class Logits:
    """This rank's side of the logits transfer, on the head's node and off it."""

    def __init__(self, stage: Stage, exchange: Exchange) -> None:
        self.stage = stage
        self.exchange = exchange
        self.node = stage.node
        self.head_node = stage.topology.num_nodes - 1
        self.processor = stage.model.logits_processor
        self.compute_head = self.processor._compute_lm_head
        self.processor._compute_lm_head = self._fetch
        stage.model.logits_processor = CaptureHidden()
        self.width, self.dtype = self._agree_on_shape()
        # Of the step that runs now; set by `run`.
        self.layout: OwnershipLayout
        self.hidden: torch.Tensor | None = None
        self.decoded: torch.Tensor | None = None  # this node's logits of a decode step

    def run(
        self,
        input_ids: torch.Tensor,
        hidden: torch.Tensor | None,
        buffers: StepBuffers,
        forward_batch: Any,
    ) -> Any:
        """SGLang's logits processor for this node's rows; reached by all ranks of the pool.

        Args:
            input_ids: [n]; hidden: [R, D] on the head's node, None elsewhere.
        """
        self.hidden, self.layout = hidden, buffers.layout
        decode = compat.is_decode_step(forward_batch)
        if decode:
            self.decoded = self._decode_logits(buffers)
            rows = input_ids.unsqueeze(1)  # any numbers: all rows are wanted, and are there
        else:
            num_rows = self.layout.rows[self.node]
            rows = torch.arange(num_rows, device=input_ids.device).unsqueeze(1)
        output = self.processor(input_ids, rows, self.stage.model.lm_head, forward_batch)
        if not decode:
            while self._round(rows[:0]) is not None:
                pass
        self.hidden = self.decoded = None
        return output

    def _decode_logits(self, buffers: StepBuffers) -> torch.Tensor:
        """One product with the head for the whole step, sent back by owner: [n, V/T]."""
        if self.node == self.head_node:
            logits = self._head_product(self.hidden)
            self.exchange.send_slices(logits, self.layout.rows)
            return logits[self.layout.slice_of(self.node)]
        return self._receive(buffers.of_node("logits", self.width, self.dtype))

    def _fetch(self, rows: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        """In place of LogitsProcessor._compute_lm_head: row numbers [m, 1] -> [m, V/T]."""
        if self.decoded is not None:
            assert rows.shape[0] == self.decoded.shape[0], "a decode step wants all of its rows"
            return self.decoded
        if rows.shape[0] == 0:
            return self._empty(rows)
        logits = self._round(rows)
        assert logits is not None
        return logits

    def _round(self, rows: torch.Tensor) -> torch.Tensor | None:
        """Fetch [m, V/T] in one round, reached by all nodes; None once no node wants a row."""
        counts = self.exchange.share_counts(rows.shape[0])
        if not any(counts):
            return None
        mine = rows.flatten() + self.layout.offsets[self.node]
        if self.node != self.head_node:
            self.exchange.collect(mine, counts, self.head_node)
            return self._receive(self._empty(rows))
        wanted = mine.new_empty(sum(counts))
        self.exchange.collect(mine, counts, self.head_node, wanted)
        assert self.hidden is not None
        logits = self._head_product(self.hidden[wanted])
        self.exchange.send_slices(logits, counts)
        return logits.split(counts)[self.node]

    def _empty(self, rows: torch.Tensor) -> torch.Tensor:
        return torch.empty((rows.shape[0], self.width), dtype=self.dtype, device=rows.device)

    def _receive(self, buffer: torch.Tensor) -> torch.Tensor:
        self.exchange.receive_slice(buffer, self.head_node)
        return buffer

    def _head_product(self, hidden: torch.Tensor | None) -> torch.Tensor:
        assert hidden is not None
        return self.compute_head(hidden, self.stage.model.lm_head).contiguous()

    def _agree_on_shape(self) -> tuple[int, torch.dtype]:
        """The head's node tells width and type of its logits; reached by all ranks at start."""
        shape: list[Any] = [None]
        if self.node == self.head_node:
            stage = self.stage
            probe = torch.zeros((1, stage.hidden_size), dtype=stage.dtype, device=stage.device)
            with torch.no_grad(), self.stage.scope():
                logits = self._head_product(probe)
            shape = [(logits.shape[1], logits.dtype)]
        peers = self.stage.peers
        torch.distributed.broadcast_object_list(
            shape, src=peers.ranks[self.head_node], group=peers.cpu_group
        )
        width, dtype = shape[0]
        return width, dtype
