"""Steps of one recorded rank: the calls that model_ext makes, by hand and without SGLang.

tests/upstream/test_stream_order.py runs the real Step, RootAttention, attend_for_root and Logits
against the same recorder and finds the same sequence.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from sglang_tknp.exchange import Exchange
from sglang_tknp.layout import OwnershipLayout
from sglang_tknp.model_ext.buffers import StepBuffers
from sglang_tknp.transport_stream import StreamTransport
from tests.unit.recorder import Op, Place, Recorder

BLOCKS = (2, 1, 2, 1)  # layers per node
HIDDEN, VOCABULARY = 5, 6
Q, K, V = QKV = (4, 2, 2)  # of one TP rank; its outputs are as wide as Q
FLOAT, INT, CPU = torch.float32, torch.int64, torch.device("cpu")
Rows = tuple[int, ...]


class HandRank:
    """Decode steps and prompt steps of one rank, on tensors that keep their addresses."""

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
        self.layout: OwnershipLayout
        self.buffers: StepBuffers

    @property
    def head_node(self) -> int:
        return self.num_nodes - 1

    @property
    def num_own(self) -> int:
        return self.layout.rows[self.node]

    def step(self, rows: Rows, rounds: Iterable[Rows] = ()) -> None:
        """`rounds`: rows of logits per node in a prompt step; a decode step wants all at once."""
        self.layout = OwnershipLayout(rows=rows)
        with self.rec:
            self.buffers = StepBuffers(self.layout, self.node, self.take)
            logits = self.run(torch.ones(self.num_own, dtype=INT), list(rounds))
            with self.rec.named("sample"):
                logits.add_(1)
            del logits

    def take(self, name: str, num_rows: int, width: int, dtype: torch.dtype) -> torch.Tensor:
        """A part of storage that all steps share, as steps on slots do."""
        most = self.fixed.setdefault((name, width), torch.zeros((32, width), dtype=dtype))
        return most[:num_rows]

    # What computes on the current stream.

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

    # model_ext/step.py

    def run(self, ids: torch.Tensor, rounds: list[Rows]) -> torch.Tensor:
        all_ids, positions = self.collect_inputs(ids)
        hidden = None
        for root in range(self.num_nodes):
            if root == self.node:
                hidden = self.run_block(all_ids, positions)
            else:
                self.attend_for(root)
        if rounds:
            logits = torch.cat([self.logits_round(hidden, counts) for counts in rounds])
        else:
            logits = self.decode_logits(hidden)
        self.exchange.finish_step()
        return logits

    def collect_inputs(self, ids: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor]:
        local = torch.stack((ids, ids), dim=1)
        if self.node:
            self.exchange.collect(local, self.layout.rows, 0)
            return None, self.buffers.of_step("positions", 1, INT).view(-1)
        both = self.buffers.of_step("inputs", 2, INT)
        self.exchange.collect(local, self.layout.rows, 0, both)
        return both[:, 0].contiguous(), both[:, 1].contiguous()

    def run_block(self, ids: torch.Tensor | None, positions: torch.Tensor) -> torch.Tensor | None:
        if ids is None:
            hidden, residual = (
                self.buffers.of_step(x, HIDDEN, FLOAT) for x in ("hidden", "residual")
            )
            self.exchange.receive_handoff((hidden, residual), positions, self.node - 1)
        else:
            hidden, residual = self.embed(ids)
        for _ in range(BLOCKS[self.node]):
            hidden = self.dense(self.root_attention(*self.qkv(hidden, residual)))
        if self.node == self.head_node:
            return hidden
        self.exchange.send_handoff((hidden, residual), positions, self.node + 1)
        return None

    # model_ext/attention.py

    def root_attention(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        qkv = q.as_strided((q.shape[0], sum(QKV)), (sum(QKV), 1))
        out = self.buffers.of_step("outputs", Q, FLOAT)
        self.exchange.scatter_begin(qkv, out, self.layout)
        if self.num_own:
            mine = self.layout.slice_of(self.node)
            out[mine] = self.attend(q[mine], k[mine], v[mine])
        self.exchange.gather_end()
        return out

    def attend_for(self, root: int) -> None:
        if not self.num_own:
            return
        self.post_rows(root)
        for layers_left in reversed(range(BLOCKS[root])):
            rows = self.exchange.receive_rows_end()
            self.exchange.return_outputs(self.attend(*rows.split(QKV, dim=-1)), root)
            if layers_left:
                self.post_rows(root)

    def post_rows(self, root: int) -> None:
        buffer = self.buffers.of_node("rows", sum(QKV), FLOAT)
        self.exchange.receive_rows_begin(buffer, root)

    # model_ext/logits.py

    def decode_logits(self, hidden: torch.Tensor | None) -> torch.Tensor:
        if hidden is None:
            buffer = self.buffers.of_node("logits", VOCABULARY, FLOAT)
            self.exchange.receive_slice(buffer, self.head_node)
            return buffer
        logits = self.head(hidden)
        self.exchange.send_slices(logits, self.layout.rows)
        return logits[self.layout.slice_of(self.node)]

    def logits_round(self, hidden: torch.Tensor | None, counts: Rows) -> torch.Tensor:
        mine = torch.arange(counts[self.node]) + self.layout.offsets[self.node]
        if hidden is None:
            self.exchange.collect(mine, counts, self.head_node)
            buffer = torch.empty((len(mine), VOCABULARY))
            self.exchange.receive_slice(buffer, self.head_node)
            return buffer
        wanted = mine.new_empty(sum(counts))
        self.exchange.collect(mine, counts, self.head_node, wanted)
        logits = self.head(hidden[wanted])
        self.exchange.send_slices(logits, counts)
        return logits.split(counts)[self.node]


def record(
    steps: Sequence[Rows],
    *,
    rounds: Sequence[Rows] = (),
    tp_size: int = 1,
    rank: Callable[..., HandRank] = HandRank,
    **parts: Any,
) -> dict[Place, list[Op]]:
    """What every rank of a pool does in these steps, one after the other."""
    num_nodes = len(steps[0])
    programs = {}
    for place in ((node, t) for node in range(num_nodes) for t in range(tp_size)):
        runner = rank(place, num_nodes, tp_size, **parts)
        for rows in steps:
            runner.step(rows, rounds)
        programs[place] = list(runner.rec.ops)
    return programs


def trace(ops: Iterable[Op]) -> list[tuple[Any, ...]]:
    """What a rank does, in order: named computation (once per name), messages, forks, joins."""
    found: list[tuple[Any, ...]] = []
    for op in ops:
        step = (op.stream, op.name, op.messages)
        computes = op.stream == "current" and op.name != "join"
        if "aten" not in op.name and op.name != "free" and not (computes and found[-1:] == [step]):
            found.append(step)
    return found
