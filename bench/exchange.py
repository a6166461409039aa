"""How close is one layer's exchange to the same bytes sent raw, and what does it cost the host?

    python bench/exchange.py [--rows 1 8 32 128] [--repeats 300]

Two nodes on gloo, one process per core, bfloat16, no attention. Per case and repeat, one layer of
`Exchange` (scatter + gather) and one raw isend/irecv ping-pong of the same bytes run in turn on
the same group; the table shows medians and the ratio of the fastest deciles. JSON goes to
bench/results/exchange.json.
"""

import argparse
import json
import multiprocessing as mp
import os
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from sglang_tknp.exchange import Exchange
from sglang_tknp.layout import OwnershipLayout
from sglang_tknp.transport import GlooTransport

RESULTS = Path(__file__).parent / "results" / "exchange.json"
DTYPE = torch.bfloat16
ROOT, OWNER = 0, 1
TIMEOUT = 30.0
WARM_UP_REPEATS = 20
RAW_TAG = 100  # apart from the exchange's own tags


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """One TP rank's share of a model's attention."""

    model: str
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    tp_size: int

    @property
    def qkv_width(self) -> int:
        return (self.num_q_heads + 2 * self.num_kv_heads) * self.head_dim // self.tp_size

    @property
    def out_width(self) -> int:
        return self.num_q_heads * self.head_dim // self.tp_size


SIZES = (
    Size(model="SmolLM2-135M", num_q_heads=9, num_kv_heads=3, head_dim=64, tp_size=1),
    Size(model="Llama-3.1-8B", num_q_heads=32, num_kv_heads=8, head_dim=128, tp_size=1),
    Size(model="Llama-3.1-405B", num_q_heads=128, num_kv_heads=8, head_dim=128, tp_size=8),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One line of the table; times in microseconds on the root, medians over the repeats."""

    model: str
    tp_size: int
    rows: int  # per remote owner
    payload_bytes: int
    exchange_us: float
    raw_us: float
    ratio: float
    exchange_p10_us: float  # the fastest decile: on a shared machine medians may be bimodal
    raw_p10_us: float
    ratio_p10: float
    overhead_us: float  # median of the paired differences exchange - raw
    post_us: float  # of the exchange: the call of scatter_begin alone


class Case:
    """Buffers and the two ways of moving one layer, for either rank."""

    def __init__(self, exchange: Exchange, group: dist.ProcessGroup, size: Size, rows: int) -> None:
        self.exchange, self.group = exchange, group
        self.layout = OwnershipLayout(rows=(rows, rows))
        self.qkv = torch.ones(2 * rows, size.qkv_width, dtype=DTYPE)
        self.out = torch.ones(2 * rows, size.out_width, dtype=DTYPE)
        self.my_out = torch.ones(rows, size.out_width, dtype=DTYPE)
        self.buffers = torch.empty(2, rows, size.qkv_width, dtype=DTYPE)
        self.remote = self.layout.slice_of(OWNER)
        self.limit = timedelta(seconds=TIMEOUT)
        self.receive: dist.Work  # the owner's raw receive posted ahead
        self.sent: dist.Work | None = None  # the owner's last raw send

    def exchange_root(self) -> float:
        """Returns the seconds of the posting alone."""
        start = time.perf_counter()
        self.exchange.scatter_begin(self.qkv, self.out, self.layout)
        posted = time.perf_counter() - start
        self.exchange.gather_end()
        return posted

    def raw_root(self) -> None:
        receive = self._irecv(self.out[self.remote], OWNER)
        send = self._isend(self.qkv[self.remote], OWNER)
        receive.wait(self.limit)
        send.wait(self.limit)

    def owner(self, repeats: int) -> None:
        """Answer both ways, each with its next receive posted one repeat ahead."""
        self.exchange.receive_rows_begin(self.buffers[0], ROOT)
        self.receive = self._irecv(self.buffers[1], ROOT)
        for repeat in range(repeats):
            for way in ways(repeat):
                more = repeat + 1 < repeats
                self.exchange_owner(more) if way == "exchange" else self.raw_owner(more)
        if self.sent:
            self.sent.wait(self.limit)
        self.exchange.finish_step()

    def exchange_owner(self, more: bool) -> None:
        self.exchange.receive_rows_end()
        self.exchange.return_outputs(self.my_out, ROOT)
        if more:
            self.exchange.receive_rows_begin(self.buffers[0], ROOT)

    def raw_owner(self, more: bool) -> None:
        self.receive.wait(self.limit)
        former, self.sent = self.sent, self._isend(self.my_out, ROOT)
        if former:
            former.wait(self.limit)
        if more:
            self.receive = self._irecv(self.buffers[1], ROOT)

    def root(self, repeats: int) -> dict[str, list[float]]:
        """Returns microseconds of every repeat: exchange, raw, and posting (scatter_begin)."""
        times: dict[str, list[float]] = {"exchange": [], "raw": [], "post": []}
        for repeat in range(repeats):
            for way in ways(repeat):
                start = time.perf_counter()
                posted = self.exchange_root() if way == "exchange" else self.raw_root()
                times[way].append((time.perf_counter() - start) * 1e6)
                if posted is not None:
                    times["post"].append(posted * 1e6)
        self.exchange.finish_step()
        return {name: values[WARM_UP_REPEATS:] for name, values in times.items()}

    def _isend(self, tensor: torch.Tensor, peer: int) -> dist.Work:
        work = dist.isend(tensor, group=self.group, group_dst=peer, tag=RAW_TAG)
        assert work is not None
        return work

    def _irecv(self, tensor: torch.Tensor, peer: int) -> dist.Work:
        work = dist.irecv(tensor, group=self.group, group_src=peer, tag=RAW_TAG)
        assert work is not None
        return work


def ways(repeat: int) -> tuple[str, str]:
    """Alternates, because whichever comes second can inherit stalls of the first."""
    return ("exchange", "raw") if repeat % 2 else ("raw", "exchange")


def measure(case: Case, size: Size, rows: int, repeats: int) -> Row:
    times = case.root(repeats)
    exchange, raw, post = (statistics.median(times[n]) for n in ("exchange", "raw", "post"))
    exchange_p10, raw_p10 = (statistics.quantiles(times[n], n=10)[0] for n in ("exchange", "raw"))
    pairs = zip(times["exchange"], times["raw"], strict=True)
    return Row(
        model=size.model,
        tp_size=size.tp_size,
        rows=rows,
        payload_bytes=rows * (size.qkv_width + size.out_width) * DTYPE.itemsize,
        exchange_us=round(exchange, 1),
        raw_us=round(raw, 1),
        ratio=round(exchange / raw, 3),
        exchange_p10_us=round(exchange_p10, 1),
        raw_p10_us=round(raw_p10, 1),
        ratio_p10=round(exchange_p10 / raw_p10, 3),
        overhead_us=round(statistics.median(e - r for e, r in pairs), 1),
        post_us=round(post, 1),
    )


def run_rank(rank: int, store: str, rows_list: Sequence[int], repeats: int, queue: Any) -> None:
    # Before gloo starts its threads, so that they stay on this process's core too.
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[rank % len(cores)]})
    torch.set_num_threads(1)
    limit = timedelta(seconds=TIMEOUT)
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=2, timeout=limit)
    group = dist.new_group([ROOT, OWNER], timeout=limit)
    transport = GlooTransport(group, timeout=TIMEOUT)
    exchange = Exchange(transport, rank, [ROOT, OWNER], timeout=TIMEOUT)
    exchange.warm_up()
    results = []
    for size in SIZES:
        for rows in rows_list:
            case = Case(exchange, group, size, rows)
            if rank == ROOT:
                results.append(measure(case, size, rows, repeats + WARM_UP_REPEATS))
            else:
                case.owner(repeats + WARM_UP_REPEATS)
            dist.barrier(group)
    if rank == ROOT:
        queue.put(results)
    dist.destroy_process_group()


def run_both(rows_list: Sequence[int], repeats: int) -> list[Row]:
    context = mp.get_context("spawn")
    queue = context.Queue()
    with tempfile.TemporaryDirectory() as folder:
        args = (f"file://{folder}/store", rows_list, repeats, queue)
        processes = [context.Process(target=run_rank, args=(rank, *args)) for rank in (0, 1)]
        try:
            for process in processes:
                process.start()
            results: list[Row] = queue.get(timeout=600)
            for process in processes:
                process.join(TIMEOUT)
            return results
        finally:
            for process in processes:
                process.kill()


def machine() -> dict[str, Any]:
    cpu = platform.processor() or platform.machine()
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            cpu = line.split(":", 1)[1].strip()
            break
    return {"cpu": cpu, "cores": len(os.sched_getaffinity(0)), "system": platform.platform()}


def print_table(rows: Sequence[Row]) -> None:
    columns = "model (T) | rows | payload KiB | exchange us | raw us | ratio | p10 ratio"
    print(f"| {columns} | overhead us | post us |")
    print("|---" * 9 + "|")
    for r in rows:
        print(
            f"| {r.model} ({r.tp_size}) | {r.rows} | {r.payload_bytes / 1024:.1f} "
            f"| {r.exchange_us:.0f} | {r.raw_us:.0f} | {r.ratio:.2f} | {r.ratio_p10:.2f} "
            f"| {r.overhead_us:.0f} | {r.post_us:.0f} |"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 32, 128])
    parser.add_argument("--repeats", type=int, default=300)
    args = parser.parse_args()
    rows = run_both(args.rows, args.repeats)
    print_table(rows)
    report = {
        "command": " ".join(["python", *sys.argv]),
        "machine": machine(),
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "sglang-tknp": version("sglang-tknp"),
        },
        "backend": "gloo, 2 processes of one core each on one host",
        "dtype": str(DTYPE),
        "repeats": args.repeats,
        "results": [asdict(row) for row in rows],
    }
    RESULTS.parent.mkdir(exist_ok=True)
    RESULTS.write_text(json.dumps(report, indent=2) + "\n")
    print(f"written: {RESULTS}")


if __name__ == "__main__":
    main()
