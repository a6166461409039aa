"""Ranks, nodes and peer groups: integers only. World rank = node * T + TP rank."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Topology:
    """One rank's place in a pool of N nodes of T ranks."""

    num_nodes: int  # N
    tp_size: int  # T, inside a node
    rank: int  # world rank, 0 .. N*T-1

    def __post_init__(self) -> None:
        if self.num_nodes < 1 or self.tp_size < 1 or not 0 <= self.rank < self.world_size:
            raise ValueError(
                f"rank {self.rank} is not in a pool of {self.num_nodes} nodes of {self.tp_size} "
                "ranks"
            )

    @property
    def world_size(self) -> int:
        return self.num_nodes * self.tp_size

    @property
    def node(self) -> int:
        return self.rank // self.tp_size

    @property
    def tp_rank(self) -> int:
        return self.rank % self.tp_size

    def all_peer_groups(self) -> tuple[tuple[int, ...], ...]:
        """The T peer groups of the pool, in TP-rank order."""
        return tuple(
            tuple(range(tp_rank, self.world_size, self.tp_size)) for tp_rank in range(self.tp_size)
        )

    def all_node_groups(self) -> tuple[tuple[int, ...], ...]:
        """The ranks of every node, in node order."""
        firsts = range(0, self.world_size, self.tp_size)
        return tuple(tuple(range(first, first + self.tp_size)) for first in firsts)

    def describe(self, rank: int) -> str:
        return f"rank {rank} (node {rank // self.tp_size}, TP rank {rank % self.tp_size})"
