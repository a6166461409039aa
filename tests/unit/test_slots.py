"""Proves the choice of slots: right against an oracle, the same on every rank, and cheap.

The oracle is written from the docstrings of slots.py. Rows fill the slots that they get, so the
tests end with an owner's rows inside its slice of a captured batch.
"""

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from sglang_tknp.layout import OwnershipLayout
from sglang_tknp.slots import UNEVEN_SAVING, SlotTable, uneven_layouts

# As SGLang lists them: single steps, then ever larger ones.
SGLANG_SIZES = [1, 2, 4, 8, 12, 16, 24, 32, *range(40, 161, 8)]
SIZES = st.one_of(
    st.just(SGLANG_SIZES),
    st.just(list(range(1, 9))),
    st.integers(1, 300).map(lambda size: [size]),
    st.tuples(st.integers(1, 90), st.integers(1, 30)).map(lambda x: list(range(x[0], sum(x)))),
    st.sets(st.integers(1, 300), min_size=1, max_size=20).map(sorted),
)
OWNERS = st.integers(1, 8)
MAX_UNEVEN = st.integers(0, 40)
TABLES = st.builds(SlotTable, SIZES, OWNERS, MAX_UNEVEN)


def holds(layout: OwnershipLayout, rows: Sequence[int]) -> bool:
    return all(slots >= n for slots, n in zip(layout.rows, rows, strict=True))


def oracle(table: SlotTable, rows: Sequence[int]) -> set[OwnershipLayout]:
    """The layouts that `choose` may return: the smallest of those that are worth it."""
    fitting = [layout for layout in table.even if holds(layout, rows)]
    if not fitting:
        return set()
    even = min(fitting, key=lambda layout: layout.num_rows)
    worth = [
        layout
        for layout in table.uneven
        if holds(layout, rows) and even.num_rows - layout.num_rows >= UNEVEN_SAVING * even.num_rows
    ]
    best = min((layout.num_rows for layout in worth), default=None)
    return {layout for layout in worth if layout.num_rows == best} or {even}


@st.composite
def tables_and_rows(draw: Any) -> tuple[SlotTable, list[int]]:
    """Rows of any kind, often such that an uneven layout or none can hold them."""
    table = draw(TABLES)
    num_owners, largest = table.even[0].num_owners, table.sizes[-1]
    rows = draw(st.lists(st.integers(0, largest), min_size=num_owners, max_size=num_owners))
    kind = draw(st.sampled_from(["any", "uneven", "too many"]))
    if kind == "uneven" and table.uneven:
        slots = draw(st.sampled_from(table.uneven)).rows
        rows = [max(0, n - draw(st.integers(0, 3))) for n in slots]
    if kind == "too many":
        rows[draw(st.integers(0, num_owners - 1))] = largest + draw(st.integers(1, 9))
    return table, rows


@given(tables_and_rows())
def test_the_choice_is_the_oracles(case: tuple[SlotTable, list[int]]) -> None:
    table, rows = case
    chosen = table.choose(rows)
    assert (chosen is None) == (max(rows) > table.sizes[-1])
    if chosen is None:
        return
    assert holds(chosen, rows)
    assert chosen in oracle(table, rows)


@given(tables_and_rows())
def test_the_choice_depends_on_the_rows_only(case: tuple[SlotTable, list[int]]) -> None:
    """Every rank has a table of its own, and its own former steps."""
    table, rows = case
    num_owners = table.even[0].num_owners
    other = SlotTable(list(table.sizes), num_owners, len(table.uneven))
    other.choose([table.sizes[-1]] * num_owners)
    assert other.choose(tuple(rows)) == table.choose(rows) == table.choose(rows)


def test_the_choice_by_hand() -> None:
    table = SlotTable([4, 8, 16], 2, max_uneven=2)
    assert [layout.rows for layout in table.uneven] == [(15, 7), (7, 15)]
    assert [chosen.rows for r in [(0, 0), (4, 4), (5, 0)] if (chosen := table.choose(r))] == [
        (4, 4),
        (4, 4),
        (8, 8),
    ]
    assert [chosen.rows for r in [(9, 7), (3, 15), (9, 8)] if (chosen := table.choose(r))] == [
        (15, 7),
        (7, 15),
        (16, 16),
    ]
    assert table.choose((0, 17)) is None


@pytest.mark.parametrize(("max_uneven", "found"), [(0, 0), (2, 0), (3, 3), (5, 3), (6, 6)])
def test_uneven_layouts_come_once_for_every_owner(max_uneven: int, found: int) -> None:
    assert len(uneven_layouts([8, 16, 32, 64], 3, max_uneven)) == found


def test_a_layout_that_saves_exactly_a_quarter_is_chosen() -> None:
    layout = OwnershipLayout(rows=(6, 5, 5, 5))  # 21 rows, where (7, 7, 7, 7) has 28
    assert SlotTable([7, 20], 4, 64).choose(layout.rows) == layout


@given(SIZES, OWNERS, MAX_UNEVEN)
@example([4, 8], 8, 16)  # numbers run out for some owners before every owner was busy once
@example(list(range(9, 17)), 2, 8)  # (8, 8) would be called uneven, and never be chosen
@example([11, 32], 8, 40)  # (8,) * 8 would be worth it, but nobody would be busy in it
def test_uneven_layouts(sizes: list[int], num_owners: int, max_uneven: int) -> None:
    found = uneven_layouts(sizes, num_owners, max_uneven)
    table = SlotTable(sizes, num_owners, max_uneven)
    assert sorted(layout.rows for layout in table.uneven) == sorted(x.rows for x in found)
    assert len(found) <= max_uneven
    assert all(0 not in layout.rows and layout.num_owners == num_owners for layout in found)
    # Owners are busy in turn, so equally often.
    assert len(found) % num_owners == 0
    for index, layout in enumerate(found):
        busy = layout.rows[index % num_owners]
        assert [n for n in layout.rows if n >= busy] == [busy]
    # One plan of an attention backend per number of rows.
    for owner in range(num_owners):
        slots = [layout.rows[owner] for layout in (*table.even, *table.uneven)]
        assert len(set(slots)) == len(slots)
    # No graph is captured for nothing: each is the choice for the rows that fill it.
    assert all(table.choose(layout.rows) == layout for layout in found)


@pytest.mark.parametrize(("num_owners", "expected"), [(2, 10), (3, 15), (4, 16), (8, 16)])
def test_sglangs_sizes_leave_room_for_uneven_layouts(num_owners: int, expected: int) -> None:
    """Two or three owners are busy with each of 160, 80, 40, 20, 10 slots."""
    assert len(uneven_layouts(SGLANG_SIZES, num_owners, 16)) == expected


@pytest.mark.parametrize("sizes", [[], [0], [0, 1], [-1, 2], [2, 1], [1, 1], [1, 4, 4, 8]])
def test_bad_sizes_are_refused(sizes: list[int]) -> None:
    with pytest.raises(ValueError, match="slots need ascending sizes of at least 1, got "):
        SlotTable(sizes, 2)


class Counting(tuple[Any, ...]):
    """A tuple that counts how many of its items were looked at."""

    looks = 0

    def __getitem__(self, index: Any) -> Any:
        self.looks += 1
        return super().__getitem__(index)

    def __iter__(self) -> Any:
        for item in super().__iter__():
            self.looks += 1
            yield item


@pytest.mark.parametrize("rows", [(400, *[0] * 7), (0,) * 8, (99,) * 8, (399, *[190] * 7)])
def test_a_choice_looks_at_few_layouts(rows: tuple[int, ...]) -> None:
    """Every step makes it on the host: a search of the sizes, then the uneven layouts at most."""
    table = SlotTable(range(8, 401, 8), 8, 16)
    assert len(table.sizes) == 50 and len(table.uneven) == 16
    expected = table.choose(rows)
    counted: Any = table
    counted.sizes, counted.even = Counting(table.sizes), Counting(table.even)
    counted.uneven = Counting(table.uneven)
    assert table.choose(rows) == expected
    assert counted.sizes.looks <= 6, "a binary search of 50"
    assert counted.even.looks == 1
    assert counted.uneven.looks <= 16


@given(tables_and_rows())
def test_rows_fill_the_first_slots_of_their_owner(case: tuple[SlotTable, list[int]]) -> None:
    """The captured batch: owners in node order, each with its rows, then its empty slots."""
    table, rows = case
    chosen = table.choose(rows)
    if chosen is None:
        return
    batch: list[tuple[int, int] | None] = [None] * chosen.num_rows
    for owner, num_rows in enumerate(rows):
        own = range(chosen.num_rows)[chosen.slice_of(owner)]
        for row, slot in enumerate(own[:num_rows]):
            assert batch[slot] is None, "two owners share a slot"
            batch[slot] = (owner, row)
    exact = OwnershipLayout(rows=tuple(rows))
    filled = [place for place in batch if place is not None]
    assert filled == [(n, row) for n in range(len(rows)) for row in range(rows[n])]
    assert len(filled) == exact.num_rows
