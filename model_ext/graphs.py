"""Decode steps on slots: SGLang's decode graph runner over ownership layouts.

Every owner has a fixed number of slots per captured layout (slots.py); its rows fill the first,
SGLang's padding the others. An empty slot is inert: its KV goes to SGLang's reserved place 0,
its attention reads that place alone, and its logits are cut off. Dense layers do not mix rows,
but for one maximum: an FP8 scale that activations of a whole batch share, as in stock graphs. A
captured step is the whole step of every rank, its exchange included. All ranks capture the same
layouts in the same order, and choose one by the same rows of all owners.
"""

import contextlib
import copy
import functools
import logging
from collections.abc import Sequence
from typing import Any

import torch
from sglang.srt.layers.attention.base_attn_backend import SharedReadEnds
from sglang.srt.model_executor.runner import DecodeCudaGraphRunner
from sglang.srt.model_executor.runner_backend.base_cuda_graph_backend import BaseCudaGraphBackend

from sglang_tknp import compat
from sglang_tknp.config import TknpConfig
from sglang_tknp.layout import OwnershipLayout
from sglang_tknp.model_ext.buffers import FixedStorage, StepBuffers
from sglang_tknp.model_ext.stage import current_stage
from sglang_tknp.scheduler_ext import guard
from sglang_tknp.slots import SlotTable
from sglang_tknp.transport import Traffic

logger = logging.getLogger(__name__)


class SlotRunner(DecodeCudaGraphRunner):
    """Captures one step per layout of the slot table, and replays the one that holds the rows."""

    def __init__(self, model_runner: Any) -> None:
        stage = current_stage()
        self.step, self.node = stage.step, stage.node
        self.num_nodes = stage.topology.num_nodes
        self.table: SlotTable  # set with capture_bs
        self.layout: OwnershipLayout | None = None  # of the step at hand
        self.storage = FixedStorage(stage.device)
        self.step_buffers: dict[OwnershipLayout, StepBuffers] = {}
        self.traffic: dict[OwnershipLayout, dict[str, Traffic]] = {}
        super().__init__(model_runner)
        self.step.slots = self.table
        self._log_layouts()

    @classmethod
    def decode_graph_gather_requirements(cls, model_runner: Any) -> tuple[bool, bool]:
        """Neither gather of attention DP: rows reach the dense layers by the exchange."""
        return False, False

    @property
    def capture_bs(self) -> list[int]:
        """Sizes that all ranks capture; SGLang's list depends on a node's own capacity."""
        return list(self.table.sizes)

    @capture_bs.setter
    def capture_bs(self, sizes: list[int]) -> None:
        group = compat.parallel().tp_group
        lists: list[Any] = [None] * group.world_size
        torch.distributed.all_gather_object(lists, sizes, group=group.cpu_group)
        common = agreed_sizes(lists)
        self.table = SlotTable(common, self.num_nodes, TknpConfig.from_env().uneven_layouts)

    def can_run_graph(self, forward_batch: Any) -> bool:
        """Whether a captured layout holds this step; the same answer on every rank."""
        self.layout = self.table.choose(forward_batch.global_num_tokens_cpu)
        if self.layout is None and compat.is_decode_step(forward_batch):
            self.step.num_fallbacks += 1
        return self.layout is not None and self._is_supported(forward_batch)

    def _is_supported(self, forward_batch: Any) -> bool:
        return bool(super().can_run_graph(forward_batch))

    def execute(self, forward_batch: Any, pp_proxy_tensors: Any = None) -> Any:
        """Replay; the step's counters and reports go on as after an eager step."""
        self.step.begin()
        output = super().execute(forward_batch, pp_proxy_tensors)
        assert self.layout is not None
        if not isinstance(self.backend, EagerReplay):
            self.step.exchange.add_traffic(self.traffic[self.layout])
        self.step.replays[self.layout] += 1
        self.step.finish()
        return output

    def _pad_to_bucket(self, raw_size: int, buckets: Sequence[int]) -> int:
        """This owner's slots, in place of SGLang's next captured size."""
        assert self.layout is not None and raw_size <= self.layout.rows[self.node]
        return self.layout.rows[self.node]

    def _capture_one_stream(self, stream_idx: int | None = None) -> None:
        super()._capture_one_stream(stream_idx)
        for layout in reversed(self.table.uneven):
            self._capture_layout(layout)
        self.step.exchange.reset_stats()

    def capture_one_shape(self, size: int, forward: Any, *args: Any, **kwargs: Any) -> None:
        """An even layout, in SGLang's loop over sizes."""
        layout = self.table.even[self.table.sizes.index(size)]
        self._capture_layout(layout, *args, **kwargs)

    def _capture_layout(self, layout: OwnershipLayout, *args: Any, **kwargs: Any) -> None:
        buffers = StepBuffers(layout, self.node, self.storage.take)
        self.step_buffers[layout] = buffers

        def forward(input_ids: torch.Tensor, positions: torch.Tensor, batch: Any) -> Any:
            if layout in self.traffic:
                return self.step.run(buffers, input_ids, positions, batch)
            exchange = self.step.exchange
            before = copy.deepcopy(exchange.stats)
            output = self.step.run(buffers, input_ids, positions, batch)
            self.traffic[layout] = exchange.traffic_since(before)
            return output

        super().capture_one_shape(layout.rows[self.node], forward, *args, **kwargs)

    def _log_layouts(self) -> None:
        logger.info(
            "TKNP decode slots: %d even layouts, slots per owner %s; %d uneven ones %s; "
            "buffers %.1f MiB, shared by all",
            len(self.table.even),
            list(self.table.sizes),
            len(self.table.uneven),
            [layout.rows for layout in self.table.uneven],
            self.storage.num_bytes / 2**20,
        )


def agreed_sizes(lists: Sequence[Sequence[int]]) -> list[int]:
    """One list of slots per owner for all ranks, from each rank's own.

    A rank's list ends with what its node may run at once, and its output buffer with it. So the
    pool's ends with the least of these; steps with more rows on some owner run eagerly.
    """
    largest = min(max(sizes) for sizes in lists)
    return sorted({size for sizes in lists for size in sizes if size < largest} | {largest})


class EagerReplay(BaseCudaGraphBackend):
    """A graph backend without graphs: replaying a step is running it again on its fixed tensors."""

    def __init__(self) -> None:
        self.steps: dict[Any, Any] = {}

    def capture_session(self, stream: Any) -> Any:
        return contextlib.nullcontext()

    def capture_one(
        self,
        shape_key: Any,
        forward_fn: Any,
        capture_inputs: Any = None,
        post_warmup_hook: Any = None,
    ) -> None:
        forward_fn()
        self.steps[shape_key] = forward_fn

    def can_run(self, forward_batch: Any, shape_key: Any) -> bool:
        return shape_key in self.steps

    def replay_session(self) -> Any:
        return contextlib.nullcontext()

    def replay(self, shape_key: Any, static_forward_batch: Any, **kwargs: Any) -> Any:
        return self.steps[shape_key]()

    def cleanup(self) -> None:
        self.steps.clear()


class EagerSlotRunner(SlotRunner):
    """--tknp-force-slots: all that graphs do to a step, except that Python runs it each time."""

    def _is_supported(self, forward_batch: Any) -> bool:
        return compat.is_decode_step(forward_batch)

    def _capture(self) -> None:
        self.backend = EagerReplay()
        self.buffers.seq_lens.fill_(self.seq_len_fill_value)
        self.buffers.seq_lens_cpu.fill_(self.seq_len_fill_value)
        self.buffers.reset_index_buffers()
        self._profiler = None
        self._capture_one_stream()

    def _run_in_graph_metadata_prep(self, attn_backend: Any, forward_batch: Any) -> None:
        attn_backend.init_forward_metadata_in_graph(forward_batch)

    def _resolve_shared_read_ends(self, attn_backend: Any, forward_mode: Any) -> SharedReadEnds:
        return SharedReadEnds.UNKNOWN


def around_capture_cuda_graphs(original: Any, *, model_runner: Any, **kwargs: Any) -> Any:
    """Target: cuda_graph_setup.capture_cuda_graphs, on every rank."""
    model_runner._decode_cuda_graph_runner_cls = lambda: SlotRunner
    with guard.start_limit("the capture of decode steps"):
        captured = original(model_runner=model_runner, **kwargs)
        if not slots_forced():
            return captured
        compat.prepare_slots_without_graphs(model_runner)
        return compat.with_decode_runner(captured, EagerSlotRunner(model_runner))


def around_is_cpu_graph(original: Any, mode: Any) -> bool:
    """Target: ForwardMode.is_cpu_graph: a node without requests fills its slots with nothing."""
    return bool(original(mode)) or (mode.is_idle() and slots_forced())


@functools.cache
def slots_forced() -> bool:
    return TknpConfig.from_env().force_slots
