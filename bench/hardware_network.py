"""For hardware.py: two gloo processes of one core each, as two nodes of one rank on one host."""

import os
import statistics
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import exchange
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

SIZES = [4 << 10 << n for n in range(11)]  # 4 KiB to 4 MiB
REPEATS, WARM_UP = 120, 20
TAG = 200
LIMIT = timedelta(seconds=60)

Points = list[tuple[int, float]]  # bytes and seconds


def quick_seconds(call: Callable[[], None]) -> float:
    """The fastest quarter's slowest, as hardware_kernels.seconds."""
    times = []
    for _ in range(WARM_UP + REPEATS):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return statistics.quantiles(times[WARM_UP:], n=4)[0]


def run_rank(rank: int, store: str, queue: Any) -> None:
    # Before gloo starts its threads, so that they stay on this process's core too.
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[rank % len(cores)]})
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=2, timeout=LIMIT)
    reduced: Points = []
    sent: Points = []
    for size in SIZES:
        data = torch.zeros(size // 2, dtype=torch.bfloat16)
        reduced.append((size, quick_seconds(lambda data=data: dist.all_reduce(data))))
        # There and back: twice a message.
        both = quick_seconds(lambda data=data: ping_pong(rank, data))
        sent.append((size, both / 2))
        dist.barrier()
    if rank == 0:
        queue.put({"all_reduce": reduced, "message": sent})
    dist.destroy_process_group()


def ping_pong(rank: int, data: torch.Tensor) -> None:
    if rank == 0:
        dist.send(data, 1, tag=TAG)
        dist.recv(data, 1, tag=TAG)
    else:
        dist.recv(data, 0, tag=TAG)
        dist.send(data, 0, tag=TAG)


def collectives() -> dict[str, Points]:
    context = mp.get_context("spawn")
    queue = context.Queue()
    with tempfile.TemporaryDirectory() as folder:
        args = (f"file://{folder}/store", queue)
        processes = [context.Process(target=run_rank, args=(rank, *args)) for rank in (0, 1)]
        try:
            for process in processes:
                process.start()
            found: dict[str, Points] = queue.get(timeout=LIMIT.total_seconds())
            for process in processes:
                process.join(LIMIT.total_seconds())
            return found
        finally:
            for process in processes:
                process.kill()


def exchanges() -> Points:
    """Half of one layer's exchange, product code, by its bytes: a scatter or a gather.

    Of the fastest decile, which bench/exchange.py reports beside the median.
    """
    rows = exchange.run_both([1, 8, 32, 128], REPEATS)
    return [(row.payload_bytes // 2, row.exchange_p10_us * 1e-6 / 2) for row in rows]
