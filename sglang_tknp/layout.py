"""Ownership layout: how many rows of a step belong to each owner. Pure integers."""

from dataclasses import dataclass, field
from functools import lru_cache
from itertools import accumulate


@dataclass(frozen=True, slots=True)
class OwnershipLayout:
    """Rows of one step: owners in node order, each owner's rows in its own batch order.

    So an owner's rows are one contiguous slice of the root's batch. An owner or a root with zero
    rows is ordinary.
    """

    rows: tuple[int, ...]  # rows per owner, in node order
    offsets: tuple[int, ...] = field(init=False)  # first row of each owner

    def __post_init__(self) -> None:
        if not self.rows or min(self.rows) < 0:
            raise ValueError(
                f"an ownership layout needs rows >= 0 for every owner, got {self.rows}"
            )
        object.__setattr__(self, "offsets", tuple(accumulate(self.rows, initial=0))[:-1])

    @classmethod
    @lru_cache(maxsize=1024)  # steps repeat their rows
    def of(cls, rows: tuple[int, ...]) -> "OwnershipLayout":
        return cls(rows=rows)

    @property
    def num_owners(self) -> int:
        return len(self.rows)

    @property
    def num_rows(self) -> int:
        return sum(self.rows)

    def slice_of(self, owner: int) -> slice:
        """The owner's rows in the full batch."""
        assert 0 <= owner < self.num_owners, owner  # a negative one would wrap silently
        return slice(self.offsets[owner], self.offsets[owner] + self.rows[owner])

    def remote_rows(self, root: int) -> int:
        """Rows that the root exchanges over the network: those of all other owners."""
        assert 0 <= root < self.num_owners, root
        return self.num_rows - self.rows[root]


def exchange_bytes(
    layout: OwnershipLayout, root: int, *, q_size: int, kv_size: int, element_bytes: int
) -> int:
    """Bytes of one layer's scatter and gather in one peer group (paper, equation 3).

    Args:
        q_size: Hq*dh/T elements; kv_size: Hkv*dh/T elements; of one row on one TP rank.
    """
    scatter = q_size + 2 * kv_size
    gather = q_size
    return layout.remote_rows(root) * (scatter + gather) * element_bytes
