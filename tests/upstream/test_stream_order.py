"""Proves that the steps of tests/unit/test_stream_order.py are those of the real model_ext.

The real Step, RootAttention, attend_for_root and Logits run on the same recorder, with a stage, a
model and attention that compute next to nothing, and do the same in the same order.
"""

import contextlib
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.layers.radix_attention import RadixAttention

from sglang_tknp import compat
from sglang_tknp.model_ext.attention import RootAttention
from sglang_tknp.model_ext.logits import Logits
from sglang_tknp.model_ext.step import Step
from sglang_tknp.placement import Placement
from tests.unit.recorder import races, stuck, unjoined
from tests.unit.stream_steps import (
    BLOCKS,
    CPU,
    FLOAT,
    HIDDEN,
    VOCABULARY,
    HandRank,
    Rows,
    record,
    trace,
)

pytestmark = pytest.mark.upstream

# Of the sizes QKV by hand: two query heads and one KV head.
LAYER: Any = SimpleNamespace(
    layer_id=0, tp_q_head_num=2, tp_k_head_num=1, tp_v_head_num=1, qk_head_dim=2, v_head_dim=2
)


class Processor:
    """Stands in for SGLang's logits processor: asks for all rows, or for a round's at a time."""

    def __init__(self, rank: "RealRank") -> None:
        self.rank = rank

    def _compute_lm_head(self, hidden: torch.Tensor, lm_head: Any) -> torch.Tensor:
        return self.rank.head(hidden)

    def __call__(self, ids: Any, rows: torch.Tensor, lm_head: Any, batch: Any) -> torch.Tensor:
        if not batch.is_extend_in_batch:
            return self._compute_lm_head(rows, lm_head)
        counts = [counts[self.rank.node] for counts in self.rank.rounds]
        return torch.cat([self._compute_lm_head(rows[:n], lm_head) for n in counts])


class RealRank(HandRank):
    """A rank whose steps are model_ext's; only what it computes is by hand."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.rounds: list[Rows] = []
        self.model = SimpleNamespace(
            forward=self.model_forward, logits_processor=Processor(self), lm_head=None
        )
        blocks = BLOCKS[: self.num_nodes]
        stage: Any = SimpleNamespace(
            node=self.node,
            device=CPU,
            dtype=FLOAT,
            hidden_size=HIDDEN,
            model=self.model,
            placement=Placement(blocks=blocks, node_bytes=(1,) * self.num_nodes),
            attention=[LAYER] * sum(blocks),
            topology=SimpleNamespace(num_nodes=self.num_nodes),
            is_head_node=self.node == self.head_node,
            scope=contextlib.nullcontext,
        )
        self.real = Step(stage, self.exchange)
        self.attention = RootAttention(LAYER, lambda: self.real)

    def run(self, ids: torch.Tensor, rounds: list[Rows]) -> Any:
        self.rounds = rounds
        shared = iter([*rounds, (0,) * self.num_nodes])

        def share_counts(value: int) -> list[int]:
            counts = next(shared)
            assert counts[self.node] == value
            return list(counts)

        self.exchange.share_counts = share_counts  # type: ignore[method-assign]
        batch = SimpleNamespace(is_extend_in_batch=bool(rounds), attend=self.attend)
        return self.real.run(self.buffers, ids, ids, batch)

    def model_forward(
        self, ids: Any, positions: torch.Tensor, batch: Any, pp_proxy_tensors: Any = None
    ) -> Any:
        if pp_proxy_tensors is None:
            hidden, residual = self.embed(ids)
        else:
            hidden, residual = (pp_proxy_tensors[x] for x in ("hidden_states", "residual"))
        for _ in range(BLOCKS[self.node]):
            hidden = self.dense(self.attention(*self.qkv(hidden, residual), batch))
        if self.node == self.head_node:
            return self.model.logits_processor(ids, hidden, None, batch)
        return compat.handoff_tensors(hidden, residual)


@pytest.fixture(autouse=True)
def no_process_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Logits, "_agree_on_shape", lambda self: (VOCABULARY, FLOAT))
    monkeypatch.setattr(
        RadixAttention, "forward", lambda layer, q, k, v, batch: batch.attend(q, k, v)
    )


@pytest.mark.parametrize(
    ("rows", "rounds"),
    [
        ((3, 2), []),
        ((0, 2), []),
        ((3, 0), []),
        ((3, 2), [(1, 2), (1, 0)]),
        ((3, 2, 1), []),
        ((3, 0, 1), []),
        ((0, 2, 0), []),
        ((3, 2, 1), [(1, 2, 1), (0, 0, 1)]),
    ],
)
@pytest.mark.parametrize("tp_size", [1, 2])
def test_model_ext_makes_the_same_steps(rows: Rows, rounds: list[Rows], tp_size: int) -> None:
    steps = [rows, rows]
    by_hand = record(steps, rounds=rounds, tp_size=tp_size)
    real = record(steps, rounds=rounds, tp_size=tp_size, rank=RealRank)
    assert {place: trace(ops) for place, ops in real.items()} == {
        place: trace(ops) for place, ops in by_hand.items()
    }
    # What torch computes unnamed is not in the trace, so the real steps are checked themselves.
    assert not any(races(ops) or unjoined(ops) for ops in real.values())
    assert not stuck(real)
