"""Failures of the exchange on real gloo processes: who is named, and how soon.

Run: pytest tests/gloo/test_exchange_failures.py.
"""

import os
import time
from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch.distributed as dist
from batches import attend, batch_qkv
from harness import Place, make_place, run_ranks

from sglang_tknp.exchange import Exchange, ExchangeError
from sglang_tknp.layout import OwnershipLayout

pytestmark = pytest.mark.gloo

ONE = torch.ones(1, dtype=torch.int64)


def owner_or_root(place: Place, ex: Exchange, num_layers: int, dead: Callable[[], None]) -> None:
    """Layers with root 0; node 2 stops after it received the first."""
    layout = OwnershipLayout(rows=(1, 1, 1))
    qkv = batch_qkv(3, 0, 0, 1)
    for _ in range(num_layers):
        if place.node == 0:
            ex.scatter_begin(qkv, attend(qkv, 0, 1), layout)
            ex.gather_end()
            continue
        ex.receive_rows_begin(torch.empty_like(qkv[:1]), 0)
        received = ex.receive_rows_end()
        if place.node == 2:
            return dead()
        ex.return_outputs(attend(received, place.node, 1), 0)
    return None


def seconds_to_error(action: Callable[[], object]) -> tuple[float, str]:
    start = time.monotonic()
    with pytest.raises(ExchangeError) as info:
        action()
    return time.monotonic() - start, str(info.value)


def killed_peer(rank: int, world_size: int) -> tuple[float, str]:
    place = make_place(rank, world_size, 1)
    ex = place.exchange(timeout=20)
    ex.warm_up()
    return seconds_to_error(lambda: owner_or_root(place, ex, 2, lambda: os._exit(9)))


def test_killed_peer_is_named_at_once_by_every_other_rank() -> None:
    results = run_ranks(killed_peer, 3, dies={2})
    for rank, (seconds, message) in enumerate(results[:2]):
        assert seconds < 5, f"rank {rank} took {seconds:.1f} s"
        assert f"TKNP node {rank} (rank {rank}) failed in the receive of " in message
        assert "node 2 (rank 2)" in message
        assert "--tknp-exchange-timeout=20 seconds" in message


def collect_on_both(place: Place, ex: Exchange) -> None:
    for to_node in (1, 0):
        ex.collect(ONE, (1, 1, 1), to_node, torch.zeros(3, dtype=torch.int64))


def silent_peer(rank: int, world_size: int) -> list[tuple[float, str]]:
    """Node 2 of each new pool stops answering; a time-out closes a pool, hence one per case."""
    actions: list[Callable[[Place, Exchange], object]] = [
        lambda place, ex: owner_or_root(place, ex, 2, lambda: None),
        lambda place, ex: ex.share_counts(1) if place.node != 2 else None,
        lambda place, ex: collect_on_both(place, ex) if place.node != 2 else None,
    ]
    results = []
    for action in actions:
        place = make_place(rank, world_size, 1)
        ex = place.exchange(timeout=1)
        ex.warm_up()
        call = partial(action, place, ex)
        results.append((0.0, str(call())) if rank == 2 else seconds_to_error(call))
        dist.barrier()
    ex = make_place(rank, world_size, 1).exchange(timeout=1)
    results.append((0.0, "") if rank == 2 else seconds_to_error(ex.warm_up))
    dist.barrier()
    return results


def test_silent_peer_is_a_time_out_that_says_what_was_waited_for() -> None:
    root, owner, _ = run_ranks(silent_peer, 3)
    for seconds, message in root + owner:
        assert 0.5 < seconds < 4, message
        assert "--tknp-exchange-timeout=1 seconds" in message
    layer, counts, _, warm_up = (message for _, message in root)
    assert "the receive of gather [1, 32] from node 2 (rank 2)" in layer
    assert "the all-gather of row counts with ranks [0, 1, 2]" in counts
    assert "of warm-up [1] to node 2 (rank 2)" in warm_up
