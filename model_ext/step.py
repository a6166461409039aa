"""One forward step over the nodes: the walk over the blocks.

    every rank:  token ids and positions of its rows -> first root
    for block in blocks:
        root:    [receive handoff] -> SGLang's stage forward on all rows
                     per layer: QKV -> scatter -> attend own rows -> gather -> o_proj, MLP
                 -> handoff, with all rows' positions, to the next root
        others:  per layer: receive rows -> attend own rows -> return outputs
    head's node: final norm, logits of the wanted rows -> owners sample their own requests

Timeline of one layer (root | owner). Nobody waits for anything but the arrows:

    QKV of all rows             | (receive of these rows: posted a layer ago, or on entering the
                                |  block, while the root takes over its rows)
    post receives of outputs    |
    send owners their rows  --> | rows arrive
    attend own rows             | attend own rows
    outputs arrive in place <-- | send outputs; post the next layer's receive
    o_proj, MLP                 | (waits for the next layer's rows)

On CUDA all messages go onto one side stream in this order (transport_stream.py), sends and
receives of the root beside its own attention. A decode step reads nothing on the host, so a
graph captures it whole (graphs.py); what Python adds after a step, `finish`, is outside of it.
"""

import copy
import types
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch

from sglang_tknp import compat
from sglang_tknp.config import TknpConfig
from sglang_tknp.exchange import Exchange
from sglang_tknp.layout import OwnershipLayout
from sglang_tknp.model_ext.attention import RootAttention, attend_for_root
from sglang_tknp.model_ext.buffers import StepBuffers
from sglang_tknp.model_ext.logits import Logits
from sglang_tknp.model_ext.stage import Stage
from sglang_tknp.scheduler_ext import guard
from sglang_tknp.slots import SlotTable
from sglang_tknp.transport import GlooTransport, Transport

FIRST_ROOT = 0


class Step:
    """This rank's part of every forward step; stands in for the model's forward."""

    def __init__(self, stage: Stage, exchange: Exchange) -> None:
        self.stage = stage
        self.exchange = exchange
        self.node = stage.node
        self.device = stage.device
        nodes = range(stage.placement.num_nodes)
        self.blocks = [[stage.attention[i] for i in stage.placement.block(n)] for n in nodes]
        self.logits = Logits(stage, exchange)  # takes the model's logits processor
        self.stage_forward: Callable[..., Any] = stage.model.forward
        self.num_steps = 0
        self.slots: SlotTable | None = None  # the captured layouts, once they are
        self.replays: Counter[OwnershipLayout] = Counter()  # steps on each of them
        self.num_fallbacks = 0  # decode steps that none of them could hold
        self.before_step: list[Callable[[], None]] = []
        self.after_step: list[Callable[[], None]] = []
        # Of the step that runs now; set by `run`.
        self.layout: OwnershipLayout
        self.buffers: StepBuffers
        self.batch: Any = None  # SGLang's batch of this node's own requests

    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor, forward_batch: Any) -> Any:
        """Run one step on exact rows; every rank of the pool reaches it with the same layout.

        Args:
            input_ids, positions: [n] of this node's rows.
            forward_batch: SGLang's batch of this node; its global_num_tokens_cpu is the layout.

        Returns:
            SGLang's LogitsProcessorOutput for this node's own requests.
        """
        layout = OwnershipLayout.of(tuple(forward_batch.global_num_tokens_cpu))
        self.begin()
        buffers = StepBuffers(layout, self.node, self._fresh)
        n = layout.rows[self.node]
        output = self.run(buffers, input_ids[:n], positions[:n], forward_batch)
        self.finish()
        return output

    @torch.no_grad()
    def run(
        self,
        buffers: StepBuffers,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        forward_batch: Any,
    ) -> Any:
        """The step itself, on the rows or the slots of `buffers.layout`."""
        self.layout, self.buffers, self.batch = buffers.layout, buffers, forward_batch
        ids, all_positions = self._collect_inputs(input_ids, positions)
        with self.stage.scope():
            hidden = self._walk(ids, all_positions)
            output = self.logits.run(input_ids, hidden, buffers, forward_batch)
        self.exchange.finish_step()
        return output

    def begin(self) -> None:
        """Before every step, captured or not."""
        for call in self.before_step:
            call()

    def finish(self) -> None:
        """After every step, captured or not."""
        self.num_steps += 1
        for call in self.after_step:
            call()

    def _fresh(self, name: str, num_rows: int, width: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty((num_rows, width), dtype=dtype, device=self.device)

    def _collect_inputs(
        self, ids: torch.Tensor, positions: torch.Tensor
    ) -> tuple[torch.Tensor | None, torch.Tensor]:
        """Every rank's [n] -> the first root's ids and positions [R]; later roots get positions
        with the handoff, and no ids: a stage that asks for them fails instead of reading others.
        """
        local = torch.stack((ids.long(), positions.long()), dim=1)  # [n, 2]
        if self.node != FIRST_ROOT:
            self.exchange.collect(local, self.layout.rows, FIRST_ROOT)
            return None, self.buffers.of_step("positions", 1, torch.int64).view(-1)
        both = self.buffers.of_step("inputs", 2, torch.int64)
        self.exchange.collect(local, self.layout.rows, FIRST_ROOT, both)
        return both[:, 0].contiguous(), both[:, 1].contiguous()

    def _walk(self, ids: torch.Tensor | None, positions: torch.Tensor) -> torch.Tensor | None:
        """Visit the blocks in order; the last node returns the hidden states [R, D] to the head."""
        hidden = None
        for root, layers in enumerate(self.blocks):
            if root == self.node:
                hidden = self._run_block(ids, positions)
            else:
                attend_for_root(self, root, layers)
        return hidden

    def _run_block(self, ids: torch.Tensor | None, positions: torch.Tensor) -> torch.Tensor | None:
        """This node is the active root: its block's dense layers for the full batch."""
        kwargs = {}
        if self.node != FIRST_ROOT:
            width, dtype = self.stage.hidden_size, self.stage.dtype
            hidden = self.buffers.of_step("hidden", width, dtype)
            residual = self.buffers.of_step("residual", width, dtype)
            self.exchange.receive_handoff((hidden, residual), positions, self.node - 1)
            kwargs["pp_proxy_tensors"] = compat.handoff_tensors(hidden, residual)
        out = self.stage_forward(ids, positions, self._root_batch(ids, positions), **kwargs)
        if self.stage.is_head_node:
            return out  # the hidden states, from the logits processor's stand-in
        handoff = tuple(out.tensors[name].contiguous() for name in ("hidden_states", "residual"))
        self.exchange.send_handoff(handoff, positions, self.node + 1)
        return None

    def _root_batch(self, ids: torch.Tensor | None, positions: torch.Tensor) -> Any:
        """The batch that the dense layers see: all owners' rows, and no owner's KV places.

        Attention never uses it: RootAttention takes the owner's batch.
        """
        batch = copy.copy(self.batch)
        batch.input_ids, batch.positions = ids, positions
        batch.forward_mode = compat.dense_forward_mode(self.batch)
        batch.out_cache_loc = None  # a model that writes KV by itself must fail, not corrupt
        return batch


def make_transport(stage: Stage, timeout: float) -> Transport:
    """gloo on a CPU; a side stream and PyNccl on CUDA. All ranks reach it (groups are made)."""
    if stage.device.type == "cpu":
        node_group = stage.node_group.device_group
        return GlooTransport(stage.peers.device_group, timeout=timeout, node_group=node_group)
    from sglang_tknp.transport_stream import CudaStreams, NcclChannel, StreamTransport

    # A group of its own: SGLang's one all-reduces on another stream, and has no PyNccl.
    node_group = compat.make_group(stage.topology.all_node_groups(), "tknp_node")
    channel = NcclChannel(*(compat.nccl_communicator(g) for g in (stage.peers, node_group)))
    return StreamTransport(stage.device, CudaStreams(), channel)


def install_step(stage: Stage) -> None:
    """Put the step in place of the model's forward; reached by all ranks (the links warm up)."""
    timeout = TknpConfig.from_env().exchange_timeout
    exchange = Exchange(
        make_transport(stage, timeout),
        stage.node,
        stage.peers.ranks,
        timeout=timeout,
        tp_rank=stage.topology.tp_rank,
        tp_size=stage.topology.tp_size,
        cpu_group=stage.peers.cpu_group,
    )
    with guard.start_limit("the first messages between nodes"):
        exchange.warm_up()
        if stage.device.type != "cpu":
            torch.get_device_module(stage.device).synchronize()
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

    stage.model.forward = types.MethodType(forward, stage.model)
    stage.step = step


def around_prepare_eager_forward_batch(
    original: Callable[..., None], self: Any, forward_batch: Any
) -> None:
    """Target: ModelRunner._prepare_eager_forward_batch: leave the batch as it is.

    The original pads every owner's rows to equal numbers for the all-gather of attention DP.
    """
