"""One forward step over the nodes: the walk over the blocks.

    every rank:  token ids and positions of all owners -> every rank of the peer group
    for block in blocks:
        root:    [receive handoff] -> SGLang's stage forward on all rows
                     per layer: QKV -> scatter -> attend own rows -> gather -> o_proj, MLP
                 -> handoff to the next root
        others:  per layer: receive rows -> attend own rows -> return outputs
    head's node: final norm, logits of the wanted rows -> owners sample their own requests

Timeline of one layer (root | owner), both sides posting receives before they are needed:

    QKV of all rows             | (receive of this layer's rows was posted a layer ago)
    post receives of outputs    |
    send owners their rows  --> | rows arrive; post the next layer's receive
    attend own rows             | attend own rows
    outputs arrive in place <-- | send outputs
    o_proj, MLP                 | (waits for the next layer's rows)
"""

import copy
import types
from collections.abc import Callable
from typing import Any

import torch

from sglang_tknp import compat
from sglang_tknp.config import TknpConfig
from sglang_tknp.exchange import Exchange
from sglang_tknp.layout import OwnershipLayout
from sglang_tknp.model_ext.attention import RootAttention, attend_for_root
from sglang_tknp.model_ext.logits import Logits
from sglang_tknp.model_ext.stage import Stage


class Step:
    """This rank's part of every forward step; stands in for the model's forward."""

    def __init__(self, stage: Stage, exchange: Exchange) -> None:
        self.stage = stage
        self.exchange = exchange
        self.node = stage.node
        self.device = stage.device
        self.logits = Logits(stage, exchange)  # takes the model's logits processor
        self.stage_forward: Callable[..., Any] = stage.model.forward
        self.num_steps = 0
        self.after_step: list[Callable[[], None]] = []
        # Of the step that runs now; set by `forward`.
        self.layout: OwnershipLayout
        self.batch: Any = None  # SGLang's batch of this node's own requests

    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor, forward_batch: Any) -> Any:
        """Run one step; every rank of the pool reaches it with the same layout.

        Args:
            input_ids, positions: [n] of this node's rows.
            forward_batch: SGLang's batch of this node; its global_num_tokens_cpu is the layout.

        Returns:
            SGLang's LogitsProcessorOutput for this node's own requests.
        """
        self.layout = OwnershipLayout(rows=tuple(forward_batch.global_num_tokens_cpu))
        self.batch = forward_batch
        num_rows = self.layout.rows[self.node]
        ids, all_positions = self._share_inputs(input_ids[:num_rows], positions[:num_rows])
        with self.stage.scope():
            hidden = self._walk(ids, all_positions)
            output = self.logits.run(input_ids[:num_rows], hidden, self.layout, forward_batch)
        self.exchange.finish_step()
        self.num_steps += 1
        for call in self.after_step:
            call()
        return output

    def _share_inputs(
        self, ids: torch.Tensor, positions: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Every rank's [n] ids and positions -> all ranks' [R]: first root embeds, roots rotate."""
        counts = self.layout.rows
        doubled = torch.stack((ids.long(), positions.long()), dim=1)  # [n, 2]
        shared = self.exchange.share(doubled.reshape(-1), [2 * n for n in counts])
        both = shared.view(-1, 2)
        return both[:, 0].contiguous(), both[:, 1].contiguous()

    def _walk(self, ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor | None:
        """Visit the blocks in order; the last node returns the hidden states [R, D] to the head."""
        hidden = None
        placement = self.stage.placement
        for root in range(placement.num_nodes):
            if root == self.node:
                hidden = self._run_block(ids, positions)
            else:
                layers = [self.stage.attention[i] for i in placement.block(root)]
                attend_for_root(self, root, layers)
        return hidden

    def _run_block(self, ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor | None:
        """This node is the active root: its block's dense layers for the full batch."""
        kwargs = {}
        if self.node > 0:
            hidden, residual = (
                self.new_rows(self.layout.num_rows, self.stage.hidden_size) for _ in "hr"
            )
            self.exchange.receive_handoff((hidden, residual), self.node - 1)
            kwargs["pp_proxy_tensors"] = compat.handoff_tensors(hidden, residual)
        out = self.stage_forward(ids, positions, self._root_batch(ids, positions), **kwargs)
        if self.stage.is_head_node:
            return out  # the hidden states, from the logits processor's stand-in
        handoff = tuple(out.tensors[name].contiguous() for name in ("hidden_states", "residual"))
        self.exchange.send_handoff(handoff, self.node + 1)
        return None

    def _root_batch(self, ids: torch.Tensor, positions: torch.Tensor) -> Any:
        """The batch that the dense layers see: all owners' rows, and no owner's KV places.

        Attention never uses it: RootAttention takes the owner's batch.
        """
        batch = copy.copy(self.batch)
        batch.input_ids, batch.positions = ids, positions
        batch.forward_mode = compat.dense_forward_mode(self.batch)
        batch.out_cache_loc = None  # a model that writes KV by itself must fail, not corrupt
        return batch

    def new_rows(self, num_rows: int, width: int) -> torch.Tensor:
        return torch.empty((num_rows, width), dtype=self.stage.dtype, device=self.device)


def install_step(stage: Stage) -> None:
    """Put the step in place of the model's forward; reached by all ranks (the links warm up)."""
    exchange = Exchange(
        stage.peers.device_group,
        stage.node,
        stage.topology.num_nodes,
        timeout=TknpConfig.from_env().exchange_timeout,
        node_group=stage.node_group.device_group,
        cpu_group=stage.peers.cpu_group,
        tp_rank=stage.topology.tp_rank,
        tp_size=stage.topology.tp_size,
    )
    exchange.warm_up()
    step = Step(stage, exchange)
    for layer in stage.placement.block(stage.node):
        module = stage.attention[layer]
        module.forward = RootAttention(module, lambda: step)

    def forward(
        self: Any,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        forward_batch: Any,
        pp_proxy_tensors: Any = None,
        **kwargs: Any,
    ) -> Any:
        if kwargs:
            raise NotImplementedError(f"TKNP's step does not carry {sorted(kwargs)}")
        return step.forward(input_ids, positions, forward_batch)

    stage.model.forward = types.MethodType(torch.no_grad()(forward), stage.model)
    stage.step = step


def around_prepare_eager_forward_batch(
    original: Callable[..., None], self: Any, forward_batch: Any
) -> None:
    """Target: ModelRunner._prepare_eager_forward_batch: leave the batch as it is.

    The original pads every owner's rows to equal numbers for the all-gather of attention DP.
    """
