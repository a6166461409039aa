"""Proves the ownership layout's slices and the exchange's bytes, the paper's figures included."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_tknp.layout import OwnershipLayout, exchange_bytes

KIB = 1024
# Llama-3.1-405B in bfloat16 on nodes of T=8 ranks: Hq=128, Hkv=8, dh=128.
Q_SIZE = 128 * 128 // 8
KV_SIZE = 8 * 128 // 8


def per_layer(rows: tuple[int, ...], root: int = 0, q: int = Q_SIZE, kv: int = KV_SIZE) -> int:
    return exchange_bytes(OwnershipLayout(rows), root, q_size=q, kv_size=kv, element_bytes=2)


def test_slices_of_uneven_owners() -> None:
    layout = OwnershipLayout((3, 0, 5))
    assert layout.num_owners == 3
    assert layout.num_rows == 8
    assert layout.offsets == (0, 3, 3)
    assert [layout.slice_of(owner) for owner in range(3)] == [
        slice(0, 3),
        slice(3, 3),
        slice(3, 8),
    ]
    assert [layout.remote_rows(root) for root in range(3)] == [5, 8, 3]


@given(st.lists(st.integers(0, 50), min_size=1, max_size=8))
def test_slices_cover_every_row_once(rows: list[int]) -> None:
    layout = OwnershipLayout(tuple(rows))
    batch = list(range(layout.num_rows))
    parts = [batch[layout.slice_of(owner)] for owner in range(layout.num_owners)]
    assert [len(part) for part in parts] == rows
    assert sum(parts, []) == batch


@pytest.mark.parametrize("rows", [(), (-1,), (2, -1, 3)])
def test_impossible_rows_are_refused(rows: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"needs rows >= 0 for every owner, got \("):
        OwnershipLayout(rows)


@pytest.mark.parametrize("node", [-1, 2])
def test_a_node_outside_the_layout_is_our_bug(node: int) -> None:
    layout = OwnershipLayout((1, 2))
    with pytest.raises(AssertionError):
        layout.slice_of(node)
    with pytest.raises(AssertionError):
        layout.remote_rows(node)


def test_paper_bytes_per_remote_owner() -> None:
    scatter, gather = 144 * KIB, 128 * KIB
    assert per_layer((0, 32)) == scatter + gather
    # Without K and V, rows go out and come back at the same size: the gather twice.
    assert per_layer((0, 32), kv=0) == 2 * gather


def test_paper_bytes_per_peer_group_and_layer() -> None:
    assert [per_layer((32, 32, 32, 32), root) for root in range(4)] == [816 * KIB] * 4


def test_bytes_follow_remote_rows_only() -> None:
    assert per_layer((128, 0, 0, 0), root=0) == 0
    assert per_layer((128, 0, 0, 0), root=1) == 128 * 272 * KIB // 32
    assert per_layer((0, 0), root=0) == 0


@given(
    rows=st.lists(st.integers(0, 50), min_size=1, max_size=6),
    heads=st.sampled_from([(8, 2), (128, 8), (9, 3)]),
    element_bytes=st.sampled_from([2, 4]),
)
def test_bytes_are_equation_three(
    rows: list[int], heads: tuple[int, int], element_bytes: int
) -> None:
    hq, hkv = heads
    head_dim = 64
    found = exchange_bytes(
        OwnershipLayout(tuple(rows)),
        0,
        q_size=hq * head_dim,
        kv_size=hkv * head_dim,
        element_bytes=element_bytes,
    )
    assert found == 2 * element_bytes * (hq + hkv) * head_dim * sum(rows[1:])
