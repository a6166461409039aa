"""Proves that ranks, nodes and peer groups are numbered as world rank = node * T + TP rank."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_tknp.topology import Topology


def test_a_rank_of_three_nodes_of_two() -> None:
    place = Topology(num_nodes=3, tp_size=2, rank=5)
    assert place.world_size == 6
    assert (place.node, place.tp_rank) == (2, 1)
    assert place.all_peer_groups()[place.tp_rank] == (1, 3, 5)
    assert place.all_peer_groups() == ((0, 2, 4), (1, 3, 5))


def test_describe_names_another_rank_too() -> None:
    place = Topology(num_nodes=3, tp_size=2, rank=0)
    assert place.describe(3) == "rank 3 (node 1, TP rank 1)"


@given(nodes=st.integers(1, 9), ranks=st.integers(1, 9))
def test_groups_partition_the_pool(nodes: int, ranks: int) -> None:
    world = nodes * ranks
    pool = [Topology(num_nodes=nodes, tp_size=ranks, rank=rank) for rank in range(world)]
    groups = pool[0].all_peer_groups()
    assert [len(group) for group in groups] == [nodes] * ranks
    assert sorted(rank for group in groups for rank in group) == list(range(world))
    for place in pool:
        assert place.rank == place.node * ranks + place.tp_rank
        # A peer's index in its group is its node: Exchange addresses peers by node.
        assert place.all_peer_groups()[place.tp_rank][place.node] == place.rank


@pytest.mark.parametrize(
    ("nodes", "ranks", "rank"), [(2, 2, 4), (2, 2, -1), (0, 1, 0), (1, 0, 0), (-1, -1, 0)]
)
def test_a_rank_outside_the_pool_is_refused(nodes: int, ranks: int, rank: int) -> None:
    message = rf"^rank {rank} is not in a pool of {nodes} nodes of {ranks} ranks$"
    with pytest.raises(ValueError, match=message):
        Topology(num_nodes=nodes, tp_size=ranks, rank=rank)
