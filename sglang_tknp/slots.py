"""Slots: fixed places per owner, so that one captured step serves many batches. Pure integers.

An owner's rows fill its first slots; the others stay empty. Every rank chooses the layout from
the same rows per owner, so all choose the same one.
"""

from bisect import bisect_left
from collections.abc import Sequence

from sglang_tknp.layout import OwnershipLayout

# An uneven layout is worth its graph when it saves this share of the even one's rows.
UNEVEN_SAVING = 0.25
_SMALLEST_UNEVEN = 8  # below, a few rows of padding cost less than another graph


class SlotTable:
    """The captured layouts of a pool: one even layout per size, and a bounded number of others."""

    def __init__(self, sizes: Sequence[int], num_owners: int, max_uneven: int = 0) -> None:
        """`sizes`: slots per owner, ascending; `max_uneven`: the most uneven layouts."""
        if not sizes or sizes[0] < 1 or list(sizes) != sorted(set(sizes)):
            raise ValueError(f"slots need ascending sizes of at least 1, got {list(sizes)}")
        self.sizes = tuple(sizes)
        self.even = tuple(OwnershipLayout(rows=(size,) * num_owners) for size in sizes)
        uneven = uneven_layouts(self.sizes, num_owners, max_uneven)
        self.uneven = tuple(sorted(uneven, key=lambda layout: layout.num_rows))

    def choose(self, rows: Sequence[int]) -> OwnershipLayout | None:
        """The layout for these rows per owner; None if no captured layout holds them."""
        index = bisect_left(self.sizes, max(rows))
        if index == len(self.sizes):
            return None
        even = self.even[index]
        limit = even.num_rows * (1 - UNEVEN_SAVING)
        for layout in self.uneven:
            if layout.num_rows > limit:
                break
            if all(map(int.__ge__, layout.rows, rows)):
                return layout
        return even


def uneven_layouts(sizes: Sequence[int], num_owners: int, max_uneven: int) -> list[OwnershipLayout]:
    """Layouts with one busy owner: its slots of one size, half as many for every other.

    From the largest size down by halves, each time once for every owner or not at all. No owner
    has the same number of slots in two layouts, because attention backends keep one plan per
    number of rows: a number that is taken becomes the next smaller one that is not.
    """
    used = [set(sizes) for _ in range(num_owners)]
    found: list[OwnershipLayout] = []
    size = sizes[-1]
    while len(found) + num_owners <= max_uneven and size >= _SMALLEST_UNEVEN:
        layouts = _busy_in_turn(size, used)
        if all(_is_worth_its_graph(rows, busy, sizes) for busy, rows in enumerate(layouts)):
            found += [OwnershipLayout(rows=rows) for rows in layouts]
            for taken, new in zip(used, zip(*layouts, strict=True), strict=True):
                taken.update(new)
        size //= 2
    return found


def _busy_in_turn(size: int, used: Sequence[set[int]]) -> list[tuple[int, ...]]:
    """Rows of one layout per busy owner; 0 where an owner has no number left."""
    used = [set(taken) for taken in used]
    layouts = []
    for busy in range(len(used)):
        rows = []
        for owner, taken in enumerate(used):
            wanted = size if owner == busy else size // 2
            rows.append(next((n for n in range(wanted, 0, -1) if n not in taken), 0))
            taken.add(rows[-1])
        layouts.append(tuple(rows))
    return layouts


def _is_worth_its_graph(rows: Sequence[int], busy: int, sizes: Sequence[int]) -> bool:
    """Whether the busy owner has the most slots, and `choose` would take this layout, if full."""
    even = sizes[bisect_left(sizes, max(rows))]
    return (
        0 not in rows
        and all(n < rows[busy] for owner, n in enumerate(rows) if owner != busy)
        and sum(rows) <= even * len(rows) * (1 - UNEVEN_SAVING)
    )
