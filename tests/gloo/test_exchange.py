"""The exchange on real gloo processes: values, exact bytes, canaries, failures, random schedules.

Run: pytest tests/gloo/test_exchange.py. Each test starts one set of processes for many checks.
"""

import os
import random
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import pytest
import torch
import torch.distributed as dist
from harness import Place, make_place, run_ranks

from sglang_tknp import exchange as exchange_module
from sglang_tknp.exchange import Exchange, ExchangeError
from sglang_tknp.layout import OwnershipLayout

pytestmark = pytest.mark.gloo

HQ, HKV, DH = 4, 2, 8
NAN = float("nan")
ONE = torch.ones(1, dtype=torch.int64)
ROWS = {
    2: [(2, 2), (5, 1), (0, 3), (3, 0), (0, 0)],
    3: [(2, 2, 2), (4, 1, 2), (0, 2, 3), (3, 0, 1), (2, 0, 0), (0, 0, 4), (0, 0, 0)],
}


# Values: every check knows the whole batch, so it computes what must arrive where.


def batch_qkv(num_rows: int, layer: int, tp_rank: int, tp_size: int) -> torch.Tensor:
    width = (HQ + 2 * HKV) * DH // tp_size
    values = torch.arange(num_rows * width).view(num_rows, width)
    return (values * 7 + layer * 31 + tp_rank * 13) % 64  # exact in bfloat16 too


def attend(qkv: torch.Tensor, owner: int, tp_size: int) -> torch.Tensor:
    return qkv[:, : HQ * DH // tp_size] * 2 + owner


def batch_outputs(qkv: torch.Tensor, layout: OwnershipLayout, tp_size: int) -> torch.Tensor:
    owners = range(len(layout.rows))
    return torch.cat([attend(qkv[layout.slice_of(n)], n, tp_size) for n in owners])


def padded(num_rows: int, width: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """A buffer inside a larger NaN-filled one: whatever is written must be exactly the buffer."""
    canary = torch.full((num_rows + 2, width), NAN, dtype=dtype)
    return canary, canary[1 : num_rows + 1]


def assert_only_inside(canary: torch.Tensor) -> None:
    assert canary[0].isnan().all() and canary[-1].isnan().all(), "written outside the buffer"
    assert not canary[1:-1].isnan().any(), "part of the buffer was not written"


# Checks that run inside a rank.


def check_layer(place: Place, ex: Exchange) -> None:
    for rows in ROWS[place.num_nodes]:
        for root in range(place.num_nodes):
            for dtype in (torch.float32, torch.bfloat16):
                one_layer(place, ex, OwnershipLayout(rows=rows), root, dtype)


def one_layer(
    place: Place, ex: Exchange, layout: OwnershipLayout, root: int, dtype: torch.dtype
) -> None:
    ex.reset_stats()
    qkv = batch_qkv(layout.num_rows, 0, place.tp_rank, place.tp_size).to(dtype)
    mine = layout.slice_of(place.node)
    if place.node == root:
        expected = batch_outputs(qkv, layout, place.tp_size)
        canary, out = padded(*expected.shape, dtype)
        ex.scatter_begin(qkv, out, layout)
        out[mine] = attend(qkv[mine], root, place.tp_size)
        ex.gather_end()
        assert torch.equal(out, expected)
    else:
        canary, buffer = padded(layout.rows[place.node], qkv.shape[1], dtype)
        ex.receive_rows_begin(buffer, root)
        received = ex.receive_rows_end()
        assert received.data_ptr() == buffer.data_ptr() and torch.equal(received, qkv[mine])
        ex.return_outputs(attend(received, place.node, place.tp_size), root)
    ex.finish_step()
    assert_only_inside(canary)
    assert_equation_3(place, ex, layout, root, dtype.itemsize)


def assert_equation_3(
    place: Place, ex: Exchange, layout: OwnershipLayout, root: int, itemsize: int
) -> None:
    """2 s (Hq + Hkv) dh / T times the remote owners' rows, over the peer group; N-1 messages."""
    kinds = ("scatter", "gather")
    sent = torch.tensor([[ex.stats[k].bytes for k in kinds], [ex.stats[k].messages for k in kinds]])
    dist.all_reduce(sent, group=place.peer_group)
    remote = [n for r, n in enumerate(layout.rows) if r != root]
    equation_3 = 2 * itemsize * (HQ + HKV) * DH // place.tp_size * sum(remote)
    assert sent[0].sum().item() == equation_3
    assert sent[1].tolist() == [sum(n > 0 for n in remote)] * 2
    # Counted at the sender: an owner scatters nothing, the root gathers nothing.
    idle = "gather" if place.node == root else "scatter"
    assert ex.stats[idle].messages == ex.stats[idle].bytes == 0


def check_receive_ahead(place: Place, ex: Exchange) -> None:
    """Owners post every receive one layer ahead, across changes of the root too."""
    layout = OwnershipLayout(rows=tuple(range(2, 2 + place.num_nodes)))
    walk_layers(place, ex, layout, [n for n in range(place.num_nodes) for _ in range(4)])


def walk_layers(place: Place, ex: Exchange, layout: OwnershipLayout, roots: Sequence[int]) -> None:
    rows = rows_ahead(place, ex, layout, roots)
    for layer, root in enumerate(roots):
        qkv = batch_qkv(layout.num_rows, layer, place.tp_rank, place.tp_size).double()
        if place.node != root:
            received = next(rows)
            assert torch.equal(received, qkv[layout.slice_of(place.node)])
            ex.return_outputs(attend(received, place.node, place.tp_size), root)
        else:
            root_layer(place, ex, layout, qkv)
    ex.finish_step()


def rows_ahead(
    place: Place, ex: Exchange, layout: OwnershipLayout, roots: Sequence[int]
) -> Iterator[torch.Tensor]:
    foreign = [root for root in roots if root != place.node]
    width = (HQ + 2 * HKV) * DH // place.tp_size
    buffers = torch.full((2, layout.rows[place.node], width), NAN, dtype=torch.float64)
    for layer, root in enumerate(foreign):
        if layer == 0:
            ex.receive_rows_begin(buffers[0], root)
        if layer + 1 < len(foreign):
            ex.receive_rows_begin(buffers[(layer + 1) % 2], foreign[layer + 1])
        yield ex.receive_rows_end()


def root_layer(
    place: Place, ex: Exchange, layout: OwnershipLayout, qkv: torch.Tensor
) -> torch.Tensor:
    expected = batch_outputs(qkv, layout, place.tp_size)
    canary, out = padded(*expected.shape, torch.float64)
    ex.scatter_begin(qkv, out, layout)
    mine = layout.slice_of(place.node)
    out[mine] = attend(qkv[mine], place.node, place.tp_size)
    ex.gather_end()
    assert torch.equal(out, expected)
    assert_only_inside(canary)
    return out


def check_handoff(place: Place, ex: Exchange) -> None:
    for num_rows, dim in [(4, 6), (3, 7), (1, 1), (1, 5), (0, 6)]:
        for dtype in (torch.float32, torch.bfloat16):
            ex.reset_stats()
            one_handoff(place, ex, num_rows, dim, dtype)


def one_handoff(place: Place, ex: Exchange, num_rows: int, dim: int, dtype: torch.dtype) -> None:
    hidden = torch.arange(num_rows * dim).view(num_rows, dim).to(dtype)
    residual = hidden + 100
    if place.node == 0:
        ex.send_handoff((hidden, residual), 1)
    elif place.node == 1:
        canaries, buffers = zip(*[padded(num_rows, dim, dtype) for _ in range(2)], strict=True)
        ex.receive_handoff(buffers, 0)
        assert torch.equal(buffers[0], hidden) and torch.equal(buffers[1], residual)
        for canary in canaries:
            assert_only_inside(canary)
    ex.finish_step()
    # Each row's hidden and residual cross the network once, whether or not T divides them.
    sent = torch.tensor(ex.stats["handoff"].bytes)
    dist.all_reduce(sent)
    assert sent.item() == 2 * num_rows * dim * dtype.itemsize


def check_share(place: Place, ex: Exchange) -> None:
    for counts in ROWS[place.num_nodes]:
        ex.reset_stats()
        local = torch.arange(counts[place.node]) + 1000 * place.node
        expected = torch.cat([torch.arange(c) + 1000 * n for n, c in enumerate(counts)])
        canary = torch.full((sum(counts) + 2,), -1)
        shared = ex.share(local, counts, canary[1:-1])
        assert torch.equal(shared, expected) and torch.equal(canary[1:-1], expected)
        assert canary[0] == canary[-1] == -1
        assert torch.equal(ex.share(local, counts), expected)
        assert ex.stats["metadata"].bytes == 2 * 8 * counts[place.node] * (place.num_nodes - 1)
        assert ex.share_counts(place.node + 5) == [n + 5 for n in range(place.num_nodes)]
    ex.finish_step()


def check_logits(place: Place, ex: Exchange) -> None:
    """Two rounds per case, because an owner may need several in a step."""
    head = place.num_nodes - 1
    for counts in ROWS[place.num_nodes] * 2:
        ex.reset_stats()
        rows = torch.arange(sum(counts) * 9.0).view(-1, 9)
        if place.node == head:
            ex.send_slices(rows, counts)
            assert ex.stats["logits"].bytes == 36 * (sum(counts) - counts[head])
        else:
            start = sum(counts[: place.node])
            canary, buffer = padded(counts[place.node], 9, torch.float32)
            ex.receive_slice(buffer, head)
            assert torch.equal(buffer, rows[start : start + counts[place.node]])
            assert_only_inside(canary)
    ex.finish_step()


def check_misuse(place: Place, ex: Exchange) -> None:
    empty = torch.empty(0, 4)
    ex.receive_rows_begin(empty, 0)
    with pytest.raises(AssertionError, match="receive of rows outstanding"):
        ex.finish_step()
    ex.receive_rows_begin(empty, 0)
    with pytest.raises(AssertionError, match="more than two receives"):
        ex.receive_rows_begin(empty, 0)
    ex.receive_rows_end()
    ex.receive_rows_end()
    ex.finish_step()


def check_random_schedule(place: Place, ex: Exchange) -> None:
    """30 random steps through blocks of moving roots, against the same step done locally."""
    draw = random.Random(7)
    for _ in range(30):
        rows = tuple(draw.choice((0, 1, 2, 3, 9)) for _ in range(place.num_nodes))
        roots = [n for n in range(place.num_nodes) for _ in range(draw.randint(1, 3))]
        random_step(place, ex, OwnershipLayout(rows=rows), roots, dim=draw.choice((4, 5, 6)))


def random_step(
    place: Place, ex: Exchange, layout: OwnershipLayout, roots: Sequence[int], dim: int
) -> None:
    mine = layout.slice_of(place.node)
    tokens = torch.arange(layout.num_rows) * 3 + 1
    shared = ex.share(tokens[mine].clone(), layout.rows)
    assert torch.equal(shared, tokens)
    rows = rows_ahead(place, ex, layout, roots)
    hidden = local = embed(shared, dim)
    for layer, root in enumerate(roots):
        local = next_hidden(local, layout, layer, range(place.tp_size), place.tp_size)
        if layer and root == place.node != roots[layer - 1]:
            hidden = torch.full_like(hidden, NAN)
            residual = torch.full_like(hidden, NAN)
            ex.receive_handoff((hidden, residual), roots[layer - 1])
            assert torch.equal(residual, -hidden)
        if root != place.node:
            ex.return_outputs(attend(next(rows), place.node, place.tp_size), root)
            continue
        out = root_layer(place, ex, layout, hidden_qkv(hidden, layer, place.tp_rank, place.tp_size))
        hidden = add_outputs(hidden, out, place)
        assert torch.equal(hidden, local)
        if layer + 1 < len(roots) and roots[layer + 1] != root:
            ex.send_handoff((hidden, -hidden), roots[layer + 1])
    next(rows, None)
    ex.finish_step()


def embed(tokens: torch.Tensor, dim: int) -> torch.Tensor:
    return (tokens[:, None] + torch.arange(dim)).double()


def hidden_qkv(hidden: torch.Tensor, layer: int, tp_rank: int, tp_size: int) -> torch.Tensor:
    return hidden[:, :1] + batch_qkv(hidden.shape[0], layer, tp_rank, tp_size).double()


def add_outputs(hidden: torch.Tensor, out: torch.Tensor, place: Place) -> torch.Tensor:
    partial_sum = out.sum(1, keepdim=True)
    if place.tp_size > 1:
        dist.all_reduce(partial_sum, group=place.node_group)
    return (hidden + partial_sum) % 97


def next_hidden(
    hidden: torch.Tensor, layout: OwnershipLayout, layer: int, tp_ranks: range, tp_size: int
) -> torch.Tensor:
    qkvs = [hidden_qkv(hidden, layer, t, tp_size) for t in tp_ranks]
    outs = [batch_outputs(qkv, layout, tp_size).sum(1, keepdim=True) for qkv in qkvs]
    return (hidden + torch.stack(outs).sum(0)) % 97


CHECKS: list[Callable[[Place, Exchange], None]] = [
    check_layer,
    check_receive_ahead,
    check_handoff,
    check_share,
    check_logits,
    check_misuse,
    check_random_schedule,
]


def run_checks(rank: int, world_size: int, num_nodes: int) -> None:
    place = make_place(rank, num_nodes, world_size // num_nodes)
    ex = place.exchange()
    ex.warm_up()
    assert all(t.messages == 0 for t in ex.stats.values()), "the warm-up is not traffic"
    for check in CHECKS:
        check(place, ex)
    # The order that NCCL needs gives the same results; gloo can show that, not NCCL's blocking.
    ex._post_on_wire, ex._posts_ahead = exchange_module._sends_first, False
    for check in CHECKS:
        check(place, ex)
    dist.barrier()


@pytest.mark.parametrize(("num_nodes", "tp_size"), [(2, 1), (3, 1), (2, 2)])
def test_values_bytes_and_canaries(num_nodes: int, tp_size: int) -> None:
    run_ranks(run_checks, num_nodes * tp_size, num_nodes)


# Failures.


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


def silent_peer(rank: int, world_size: int) -> list[tuple[float, str]]:
    """Node 2 of each new pool stops answering; a time-out closes a pool, hence one per case."""
    actions: list[Callable[[Place, Exchange], object]] = [
        lambda place, ex: owner_or_root(place, ex, 2, lambda: None),
        lambda place, ex: ex.share_counts(1) if place.node != 2 else None,
        lambda place, ex: ex.share(ONE, (1, 1, 1)) if place.node != 2 else None,
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
    assert "the metadata all-gather with ranks [0, 1, 2]" in counts
    assert "the receive of warm-up [1] from node 2 (rank 2)" in warm_up
