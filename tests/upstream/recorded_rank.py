"""Steps of one recorded rank: model_ext's own Step, RootAttention, attend_for_root and Logits.

What a step computes is by hand and next to nothing: its stage, model, attention and logits
processor stand in for SGLang's. No process group exists: a recorder (recorder.py) is the wire.
"""

import contextlib
from collections.abc import Callable, Iterable, Sequence
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from sglang.srt.layers.radix_attention import RadixAttention

from sglang_tknp import compat
from sglang_tknp.exchange import Exchange
from sglang_tknp.layout import OwnershipLayout
from sglang_tknp.model_ext.attention import RootAttention
from sglang_tknp.model_ext.buffers import StepBuffers
from sglang_tknp.model_ext.logits import Logits
from sglang_tknp.model_ext.step import Step
from sglang_tknp.placement import Placement
from sglang_tknp.transport import Traffic
from sglang_tknp.transport_stream import StreamTransport
from tests.upstream.recorder import Op, Place, Recorder

BLOCKS = (2, 1, 2, 1)  # layers per node
HIDDEN, VOCABULARY = 5, 6
Q, K, V = QKV = (4, 2, 2)  # of one TP rank; its outputs are as wide as Q
FLOAT, INT, CPU = torch.float32, torch.int64, torch.device("cpu")
Rows = tuple[int, ...]
# Of the sizes QKV: two query heads and one KV head.
LAYER: Any = SimpleNamespace(
    layer_id=0, tp_q_head_num=2, tp_k_head_num=1, tp_v_head_num=1, qk_head_dim=2, v_head_dim=2
)


class Processor:
    """Stands in for SGLang's logits processor: asks for all rows, or for a round's at a time."""

    def __init__(self, rank: "RecordedRank") -> None:
        self.rank = rank

    def _compute_lm_head(self, hidden: torch.Tensor, lm_head: Any) -> torch.Tensor:
        return self.rank.head(hidden)

    def __call__(self, ids: Any, rows: torch.Tensor, lm_head: Any, batch: Any) -> torch.Tensor:
        if not batch.is_extend_in_batch:
            return self._compute_lm_head(rows, lm_head)
        counts = [counts[self.rank.node] for counts in self.rank.rounds]
        return torch.cat([self._compute_lm_head(rows[:n], lm_head) for n in counts])


class RecordedRank:
    """Decode steps and prompt steps of one rank, on tensors that keep their addresses.

    Made and run inside `no_process_groups`.
    """

    def __init__(
        self,
        place: Place,
        num_nodes: int,
        tp_size: int = 1,
        *,
        recorder: Callable[..., Recorder] = Recorder,
        transport: Callable[..., StreamTransport] = StreamTransport,
        exchange: Callable[..., Exchange] = Exchange,
    ) -> None:
        self.node, self.num_nodes, self.tp_size = place[0], num_nodes, tp_size
        self.rec = recorder(place, tp_size)
        self.exchange = exchange(
            transport(CPU, self.rec, self.rec),
            self.node,
            range(num_nodes),
            timeout=1,
            tp_rank=place[1],
            tp_size=tp_size,
        )
        self.fixed: dict[Any, torch.Tensor] = {}
        self.rounds: list[Rows] = []
        self.real = Step(self._stage(), self.exchange)
        self.attention = RootAttention(LAYER, lambda: self.real)

    def _stage(self) -> Any:
        blocks = BLOCKS[: self.num_nodes]
        self.model = SimpleNamespace(
            forward=self.model_forward, logits_processor=Processor(self), lm_head=None
        )
        return SimpleNamespace(
            node=self.node,
            device=CPU,
            dtype=FLOAT,
            hidden_size=HIDDEN,
            model=self.model,
            placement=Placement(blocks=blocks, node_bytes=(1,) * self.num_nodes),
            attention=[LAYER] * sum(blocks),
            topology=SimpleNamespace(num_nodes=self.num_nodes),
            is_head_node=self.is_head_node,
            scope=contextlib.nullcontext,
        )

    @property
    def is_head_node(self) -> bool:
        return self.node == self.num_nodes - 1

    def step(self, rows: Rows, rounds: Iterable[Rows] = ()) -> None:
        """`rounds`: rows of logits per node in a prompt step; a decode step wants all at once."""
        self.rounds = list(rounds)
        self._answer_counts()
        with self.rec:
            buffers = StepBuffers(OwnershipLayout(rows=rows), self.node, self.take)
            ids = torch.ones(rows[self.node], dtype=INT)
            batch = SimpleNamespace(is_extend_in_batch=bool(self.rounds), attend=self.attend)
            logits = self.real.run(buffers, ids, ids, batch)
            with self.rec.named("sample"):
                logits.add_(1)
            del logits

    def _answer_counts(self) -> None:
        """In place of the all-gather of counts over CPU tensors, which no stream sees."""
        shared = iter([*self.rounds, (0,) * self.num_nodes])

        def share_counts(value: int) -> list[int]:
            counts = next(shared)
            assert counts[self.node] == value
            others = self.num_nodes - 1
            self.exchange.add_traffic({"metadata": Traffic(others, others * INT.itemsize)})
            return list(counts)

        self.exchange.share_counts = share_counts  # type: ignore[method-assign]

    def take(self, name: str, num_rows: int, width: int, dtype: torch.dtype) -> torch.Tensor:
        """A part of storage that all steps share, as steps on slots do."""
        most = self.fixed.setdefault((name, width), torch.zeros((32, width), dtype=dtype))
        return most[:num_rows]

    # What computes on the current stream.

    def model_forward(
        self, ids: Any, positions: torch.Tensor, batch: Any, pp_proxy_tensors: Any = None
    ) -> Any:
        if pp_proxy_tensors is None:
            hidden, residual = self.embed(ids)
        else:
            hidden, residual = (pp_proxy_tensors[x] for x in ("hidden_states", "residual"))
        for _ in range(BLOCKS[self.node]):
            hidden = self.dense(self.attention(*self.qkv(hidden, residual), batch))
        if self.is_head_node:
            return self.model.logits_processor(ids, hidden, None, batch)
        return compat.handoff_tensors(hidden, residual)

    def embed(self, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        with self.rec.named("embed"):
            hidden = ids.unsqueeze(1).expand(-1, HIDDEN).to(FLOAT)
            return hidden, torch.zeros_like(hidden)

    def qkv(self, hidden: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Three views of one tensor, as a fused projection leaves them."""
        with self.rec.named("QKV"):
            residual.add_(hidden)
            return (residual @ torch.ones(HIDDEN, sum(QKV))).split(QKV, dim=-1)

    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        with self.rec.named("attend"):
            return torch.cat((k + v, k * v), dim=-1).add_(q)

    def dense(self, out: torch.Tensor) -> torch.Tensor:
        with self.rec.named("dense"):
            hidden = out @ torch.ones(Q, HIDDEN)
        if self.tp_size > 1:
            self.rec.collective("all-reduce", reads=[hidden], writes=[hidden])
        return hidden

    def head(self, hidden: torch.Tensor) -> torch.Tensor:
        with self.rec.named("head"):
            return hidden @ torch.ones(HIDDEN, VOCABULARY)


@contextlib.contextmanager
def no_process_groups() -> Any:
    """In it no rank asks another one for the logits' shape, and attention is the batch's own."""

    def attend(layer: Any, q: Any, k: Any, v: Any, batch: Any) -> torch.Tensor:
        out: torch.Tensor = batch.attend(q, k, v)
        return out

    with (
        mock.patch.object(Logits, "_agree_on_shape", lambda self: (VOCABULARY, FLOAT)),
        mock.patch.object(RadixAttention, "forward", attend),
    ):
        yield


def run_steps(
    steps: Sequence[Rows],
    *,
    rounds: Sequence[Rows] = (),
    tp_size: int = 1,
    rank: Callable[..., RecordedRank] = RecordedRank,
    **parts: Any,
) -> dict[Place, RecordedRank]:
    """Every rank of a pool after these steps, one after the other."""
    num_nodes = len(steps[0])
    ranks = {}
    for place in ((node, t) for node in range(num_nodes) for t in range(tp_size)):
        with no_process_groups():
            ranks[place] = rank(place, num_nodes, tp_size, **parts)
            for rows in steps:
                ranks[place].step(rows, rounds)
    return ranks


def record(steps: Sequence[Rows], **how: Any) -> dict[Place, list[Op]]:
    """What every rank of a pool does in these steps; the arguments are those of run_steps."""
    return {place: list(ran.rec.ops) for place, ran in run_steps(steps, **how).items()}


def trace(ops: Iterable[Op]) -> list[tuple[Any, ...]]:
    """What a rank does, in order: named computation (once per name), messages, forks, joins."""
    found: list[tuple[Any, ...]] = []
    for op in ops:
        step = (op.stream, op.name, op.messages)
        computes = op.stream == "current" and op.name != "join"
        if "aten" not in op.name and op.name != "free" and not (computes and found[-1:] == [step]):
            found.append(step)
    return found
