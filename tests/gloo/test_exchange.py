"""The exchange on real gloo processes: values, exact bytes, canaries, random schedules.

Run: pytest tests/gloo/test_exchange.py. Each test starts one set of processes for many checks.
"""

import contextlib
import random
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from batches import (
    DH,
    HKV,
    HQ,
    NAN,
    assert_only_inside,
    attend,
    batch_outputs,
    batch_qkv,
    padded,
)
from harness import Place, make_place, run_ranks

from sglang_tknp.exchange import Exchange
from sglang_tknp.layout import OwnershipLayout
from sglang_tknp.transport import Transfer
from sglang_tknp.transport_stream import StreamTransport

pytestmark = pytest.mark.gloo

ROWS = {
    2: [(2, 2), (5, 1), (0, 3), (3, 0), (0, 0)],
    3: [(2, 2, 2), (4, 1, 2), (0, 2, 3), (3, 0, 1), (2, 0, 0), (0, 0, 4), (0, 0, 0)],
}


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
    """Owners post every receive as soon as the former layer's outputs are on their way."""
    layout = OwnershipLayout(rows=tuple(range(2, 2 + place.num_nodes)))
    walk_layers(place, ex, layout, [n for n in range(place.num_nodes) for _ in range(4)])


def walk_layers(place: Place, ex: Exchange, layout: OwnershipLayout, roots: Sequence[int]) -> None:
    owner = Owner(place, ex, layout, roots)
    for layer, root in enumerate(roots):
        qkv = batch_qkv(layout.num_rows, layer, place.tp_rank, place.tp_size).double()
        if place.node != root:
            assert torch.equal(owner.answer(layer), qkv[layout.slice_of(place.node)])
        else:
            root_layer(place, ex, layout, qkv)
    ex.finish_step()


class Owner:
    """The owner's side of a walk: the next receive is posted as soon as outputs are sent.

    Never before layers of which this node is the root: on one stream they would wait for it.
    """

    def __init__(
        self, place: Place, ex: Exchange, layout: OwnershipLayout, roots: Sequence[int]
    ) -> None:
        self.place, self.ex, self.roots = place, ex, roots
        width = (HQ + 2 * HKV) * DH // place.tp_size
        self.buffer = torch.full((layout.rows[place.node], width), NAN, dtype=torch.float64)
        self.posted = False

    def post(self, layer: int) -> None:
        if not self.posted and self.roots[layer : layer + 1] not in ([], [self.place.node]):
            self.ex.receive_rows_begin(self.buffer, self.roots[layer])
            self.posted = True

    def answer(self, layer: int) -> torch.Tensor:
        """Attend a layer's rows; returns what they were."""
        self.post(layer)
        received = self.ex.receive_rows_end().clone()
        self.posted = False
        out = attend(received, self.place.node, self.place.tp_size)
        self.ex.return_outputs(out, self.roots[layer])
        self.post(layer + 1)
        return received


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
    positions = torch.arange(num_rows) * 7
    if place.node == 0:
        ex.send_handoff((hidden, residual), positions, 1)
    elif place.node == 1:
        canaries, buffers = zip(*[padded(num_rows, dim, dtype) for _ in range(2)], strict=True)
        received = torch.full_like(positions, -1)
        ex.receive_handoff(buffers, received, 0)
        assert torch.equal(buffers[0], hidden) and torch.equal(buffers[1], residual)
        assert torch.equal(received, positions)
        for canary in canaries:
            assert_only_inside(canary)
    ex.finish_step()
    # Each row's hidden and residual cross the network once, whether or not T divides them.
    sent = torch.tensor(ex.stats["handoff"].bytes)
    dist.all_reduce(sent)
    assert sent.item() == 2 * num_rows * dim * dtype.itemsize


def check_collect(place: Place, ex: Exchange) -> None:
    for counts in ROWS[place.num_nodes]:
        for to_node in range(place.num_nodes):
            ex.reset_stats()
            own = torch.arange(counts[place.node]) + 1000 * place.node
            if place.node == to_node:
                expected = torch.cat([torch.arange(c) + 1000 * n for n, c in enumerate(counts)])
                canary = torch.full((sum(counts) + 2,), -1)
                ex.collect(own, counts, to_node, canary[1:-1])
                assert torch.equal(canary[1:-1], expected) and canary[0] == canary[-1] == -1
            else:
                ex.collect(own, counts, to_node)
            sent = 0 if place.node == to_node else 8 * counts[place.node]
            assert ex.stats["metadata"].bytes == sent, "only the node that asks gets them"
            assert ex.share_counts(place.node + 5) == [n + 5 for n in range(place.num_nodes)]
            sent += 8 * (place.num_nodes - 1)
            assert ex.stats["metadata"].bytes == sent, "one count to every other node"
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
    with pytest.raises(AssertionError, match="before the former layer's receive_rows_end"):
        ex.receive_rows_begin(empty, 0)
    ex.receive_rows_end()
    with pytest.raises(AssertionError, match="receive_rows_end before receive_rows_begin"):
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
    shared = torch.full_like(tokens, -1) if place.node == 0 else None
    ex.collect(tokens[mine].clone(), layout.rows, 0, shared)
    assert shared is None or torch.equal(shared, tokens)
    owner = Owner(place, ex, layout, roots)
    hidden = local = embed(tokens, dim)
    for layer, root in enumerate(roots):
        local = next_hidden(local, layout, layer, range(place.tp_size), place.tp_size)
        if layer and root == place.node != roots[layer - 1]:
            hidden = torch.full_like(hidden, NAN)
            residual = torch.full_like(hidden, NAN)
            positions = torch.full_like(tokens, -1)
            ex.receive_handoff((hidden, residual), positions, roots[layer - 1])
            assert torch.equal(residual, -hidden) and torch.equal(positions, tokens)
        if root != place.node:
            owner.answer(layer)
            continue
        out = root_layer(place, ex, layout, hidden_qkv(hidden, layer, place.tp_rank, place.tp_size))
        hidden = add_outputs(hidden, out, place)
        assert torch.equal(hidden, local)
        if layer + 1 < len(roots) and roots[layer + 1] != root:
            ex.send_handoff((hidden, -hidden), tokens, roots[layer + 1])
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
    check_collect,
    check_logits,
    check_misuse,
    check_random_schedule,
]


class ThreadStreams:
    """A side stream on a CPU: one thread that runs what is posted, one by one and to its end."""

    def __init__(self) -> None:
        self.thread = ThreadPoolExecutor(1)
        self.last: Future[None] | None = None

    def fork(self) -> None:
        """The current stream is the calling thread: all that it has posted has run."""

    def on_side(self) -> Any:
        return contextlib.nullcontext()

    def mark(self) -> Any:
        return self.last

    def join(self, event: Any) -> None:
        event.result(10)


class GlooChannel:
    """Stands for NCCL: an operation blocks its stream until it is over on both ends."""

    def __init__(self, place: Place, streams: ThreadStreams) -> None:
        self.gloo = place.exchange().transport
        self.streams = streams

    def run(self, transfers: Sequence[Transfer]) -> None:
        sends = [replace(t) for t in transfers if t.verb == "send"]
        receives = [replace(t) for t in transfers if t.verb == "receive"]
        self.streams.last = self.streams.thread.submit(self._run, sends, receives)

    def _run(self, sends: list[Transfer], receives: list[Transfer]) -> None:
        self.gloo.post(sends, receives)
        for t in sends + receives:
            self.gloo.wait(t)

    def all_gather(self, whole: torch.Tensor, part: torch.Tensor) -> None:
        self.streams.last = self.streams.thread.submit(self.gloo.join, whole, part)


def run_checks(rank: int, world_size: int, num_nodes: int) -> None:
    place = make_place(rank, num_nodes, world_size // num_nodes)
    streams = ThreadStreams()
    on_stream = StreamTransport(torch.device("cpu"), streams, GlooChannel(place, streams))
    # The transport of accelerators gives the same results and does not deadlock, although its
    # side stream runs one message after the other.
    for transport in (None, on_stream):
        ex = place.exchange(transport=transport)
        ex.warm_up()
        assert all(t.messages == 0 for t in ex.stats.values()), "the warm-up is not traffic"
        for check in CHECKS:
            check(place, ex)
    dist.barrier()


@pytest.mark.parametrize(("num_nodes", "tp_size"), [(2, 1), (3, 1), (2, 2)])
def test_values_bytes_and_canaries(num_nodes: int, tp_size: int) -> None:
    run_ranks(run_checks, num_nodes * tp_size, num_nodes)
