"""Proves a planned decode step's bytes: the paper's numbers, and each of its sums by hand.

That a real step sends them is in tests/upstream/test_step_traffic.py.
"""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_tknp.layout import OwnershipLayout
from sglang_tknp.traffic import RowSizes, even_layout, step_traffic

KIB = 1 << 10
MIB = 1 << 20
# Llama 3.1 405B on nodes of eight ranks, bfloat16.
LLAMA_405B = RowSizes(
    q_size=16 * 128,
    kv_size=128,
    hidden_size=16384,
    head_width=128256 // 8,
    element_bytes=2,
    tp_size=8,
)


def test_the_papers_messages_at_batch_128_on_four_nodes() -> None:
    found = step_traffic(even_layout(128, 4), (31, 32, 32, 31), LLAMA_405B)
    assert found.qkv == (144 * KIB,) * 4
    assert found.output == (128 * KIB,) * 4
    assert found.layer == (816 * KIB,) * 4


def test_a_step_sums_layers_handoffs_logits_and_ids() -> None:
    found = step_traffic(even_layout(128, 4), (31, 32, 32, 31), LLAMA_405B)
    assert found.exchange == 126 * 816 * KIB
    assert found.handoff == 2 * 128 * 16384 * 2 // 8 == 1 * MIB
    assert found.handoffs == 3 * MIB
    assert found.logits == (*(32 * 16032 * 2,) * 3, 0)  # the head's node keeps its own
    assert found.positions == 128 * 8
    assert found.inputs == 96 * 16 + 3 * 128 * 8
    assert found.peer_group == found.exchange + 3 * MIB + 3 * 32 * 16032 * 2 + 4608
    assert found.pool == 8 * found.peer_group


def test_a_layer_counts_the_rows_that_are_not_its_roots() -> None:
    layout = OwnershipLayout((5, 0, 2))
    sizes = RowSizes(q_size=8, kv_size=2, hidden_size=10, head_width=7, element_bytes=2, tp_size=4)
    found = step_traffic(layout, (1, 2, 3), sizes)
    row = (8 + 2 * 2 + 8) * 2
    assert found.layer == (2 * row, 7 * row, 5 * row)
    assert found.exchange == (1 * 2 + 2 * 7 + 3 * 5) * row
    assert found.qkv == (5 * 24, 0, 2 * 24)
    # 70 elements over 4 ranks: the first rank sends 18, all of them together 70.
    assert found.handoff == 2 * 18 * 2
    assert found.logits == (5 * 14, 0, 0)
    assert found.inputs == 2 * 16 + 2 * 7 * 8  # the first root has the ids of its own 5 rows
    groups = 4 * (found.exchange + 5 * 14 + found.inputs)
    assert found.pool == groups + 2 * 2 * 70 * 2


@pytest.mark.parametrize(
    ("batch", "rows"), [(128, (32, 32, 32, 32)), (130, (33, 33, 32, 32)), (3, (1, 1, 1, 0))]
)
def test_an_even_layout(batch: int, rows: tuple[int, ...]) -> None:
    assert even_layout(batch, 4).rows == rows


@given(st.integers(1, 300), st.integers(2, 9))
def test_even_rows_differ_by_one_at_most(batch: int, num_nodes: int) -> None:
    rows = even_layout(batch, num_nodes).rows
    assert sum(rows) == batch
    assert max(rows) - min(rows) <= 1
