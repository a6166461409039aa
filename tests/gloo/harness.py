"""Run one function on real gloo ranks: `run_ranks(fn, world_size, ...)`, and build an Exchange.

A process start costs seconds, nearly all of it `import torch`: put several checks into one `fn`.
File rendezvous (no ports), short collective time-outs, every process killed at the time limit.
"""

import multiprocessing as mp
import os
import tempfile
import time
import traceback
from collections.abc import Callable, Collection
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.process import BaseProcess
from typing import Any

import torch
import torch.distributed as dist

from sglang_tknp.exchange import Exchange
from sglang_tknp.transport import GlooTransport, Transport

COLLECTIVE_TIMEOUT = timedelta(seconds=30)
_GRACE = 0.5  # seconds in which other ranks' tracebacks may join the first one


def run_ranks(
    fn: Callable[..., Any],
    world_size: int,
    *args: Any,
    timeout: float = 60.0,
    dies: Collection[int] = (),
) -> list[Any]:
    """Return `fn(rank, world_size, *args)` of every rank; None for the ranks named in `dies`.

    `fn` must be importable (module level). A rank that raises, dies without being named in
    `dies`, or outlives `timeout` seconds fails the caller with its number and traceback.
    """
    context = mp.get_context("spawn")
    queue = context.SimpleQueue()
    with tempfile.TemporaryDirectory() as folder:
        store = f"file://{folder}/store"
        processes: list[BaseProcess] = [
            context.Process(target=_run_rank, args=(fn, rank, world_size, store, queue, args))
            for rank in range(world_size)
        ]
        os.environ["OMP_NUM_THREADS"] = "1"  # children read it when they import torch
        try:
            for process in processes:
                process.start()
            return _results(processes, queue, time.monotonic() + timeout, timeout, dies)
        finally:
            for process in processes:
                process.kill()
                process.join()


def _run_rank(
    fn: Callable[..., Any], rank: int, world_size: int, store: str, queue: Any, args: Any
) -> None:
    torch.set_num_threads(1)
    try:
        dist.init_process_group(
            "gloo",
            init_method=store,
            rank=rank,
            world_size=world_size,
            timeout=COLLECTIVE_TIMEOUT,
        )
        queue.put((rank, None, fn(rank, world_size, *args)))
    except BaseException:
        queue.put((rank, traceback.format_exc(), None))
    # No tear-down: a rank whose peer died on purpose would hang or raise in it.
    os._exit(0)


def _results(
    processes: list[BaseProcess],
    queue: Any,
    deadline: float,
    timeout: float,
    dies: Collection[int],
) -> list[Any]:
    values: dict[int, Any] = {}
    failures: dict[int, str] = {}
    while len(values.keys() | failures.keys() | set(dies)) < len(processes):
        # Exit codes first: what a rank reported before it exited is then surely in the queue.
        exited = {r: p.exitcode for r, p in enumerate(processes) if p.exitcode is not None}
        while not queue.empty():
            rank, failure, value = queue.get()
            if failure is None:
                values[rank] = value
            else:
                failures[rank] = failure
                deadline = min(deadline, time.monotonic() + _GRACE)
        for rank in exited.keys() - values.keys() - failures.keys() - set(dies):
            failures[rank] = f"died with exit code {exited[rank]}"
        if time.monotonic() > deadline:
            break
        time.sleep(0.01)
    missing = [r for r in range(len(processes)) if r not in values and r not in dies]
    if failures:
        raise AssertionError("\n".join(f"rank {r} failed:\n{failures[r]}" for r in failures))
    if missing:
        raise AssertionError(f"ranks {missing} did not finish within {timeout:g} s")
    return [values.get(rank) for rank in range(len(processes))]


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where a rank stands in a pool of `num_nodes` nodes of `tp_size` ranks, with its groups."""

    num_nodes: int
    tp_size: int
    node: int
    tp_rank: int
    peer_group: dist.ProcessGroup
    node_group: dist.ProcessGroup

    def exchange(self, timeout: float = 10.0, transport: Transport | None = None) -> Exchange:
        gloo = GlooTransport(
            self.peer_group,
            timeout=timeout,
            node_group=self.node_group if self.tp_size > 1 else None,
        )
        return Exchange(
            transport or gloo,
            self.node,
            dist.get_process_group_ranks(self.peer_group),
            timeout=timeout,
            tp_rank=self.tp_rank,
            tp_size=self.tp_size,
            cpu_group=self.peer_group,
        )


def make_place(rank: int, num_nodes: int, tp_size: int) -> Place:
    """Make all peer and node groups. Every rank must reach it, as `new_group` demands."""
    peers = [
        dist.new_group([n * tp_size + t for n in range(num_nodes)], timeout=COLLECTIVE_TIMEOUT)
        for t in range(tp_size)
    ]
    nodes = [
        dist.new_group([n * tp_size + t for t in range(tp_size)], timeout=COLLECTIVE_TIMEOUT)
        for n in range(num_nodes)
    ]
    node, tp_rank = divmod(rank, tp_size)
    return Place(
        num_nodes=num_nodes,
        tp_size=tp_size,
        node=node,
        tp_rank=tp_rank,
        peer_group=peers[tp_rank],
        node_group=nodes[node],
    )
