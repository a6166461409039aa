"""Constants of the network from nccl-tests runs: latency and bandwidth by robust least squares."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from sglang_tknp.launch.planner.hardware import CONSTANTS, Constant, Hardware
from sglang_tknp.launch.planner.nccl_output import NcclRun

# Messages of a decode step: one row of a small model to 512 rows of a large one. Outside, NCCL
# uses other protocols, whose times would bend the line.
SMALLEST, LARGEST = 4 << 10, 16 << 20
FEWEST_POINTS = 4
ROUNDS = 100
LEAST_ERROR = 0.01  # relative; below it, a point's weight grows no more


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """seconds = latency + bytes / bandwidth, with what single points would give for each."""

    latency: tuple[float, float, float]  # value, low, high; seconds
    bandwidth: tuple[float, float, float]  # bytes per second
    points: int
    error: float  # median over the points, relative

    def describe(self) -> str:
        return f"{self.points} points of 4 KiB to 16 MiB, median error {self.error:.1%}"


def from_nccl(runs: Sequence[NcclRun], machine: Hardware) -> dict[str, Constant]:
    """All-reduces inside a node, over nodes, and messages, each from its own runs."""
    found: dict[str, Constant] = {}
    reduces = [run for run in runs if run.test == "all_reduce_perf"]
    if inside := [run for run in reduces if run.nodes == 1]:
        for run in inside:
            _check_ranks(run, machine)
        found |= _constants("node_allreduce", fit_runs(inside), inside)
    if across := [run for run in reduces if run.nodes > 1]:
        found |= _cross_allreduce(across, machine)
    if messages := [run for run in runs if run.test == "sendrecv_perf"]:
        found |= _messages(messages)
    return found


def _check_ranks(run: NcclRun, machine: Hardware) -> None:
    if run.ranks != machine.node_size * run.nodes:
        raise ValueError(
            f"{run.file}: {run.ranks} ranks on {run.nodes} hosts, while a node of {machine.name} "
            f"has {machine.node_size}; run the test on all of them, or add --set gpus_per_node="
            f"{run.ranks // run.nodes}"
        )


def _cross_allreduce(runs: Sequence[NcclRun], machine: Hardware) -> dict[str, Constant]:
    """latency + doubling * log2(nodes): one node count alone leaves the base's doubling."""
    for run in runs:
        _check_ranks(run, machine)
    counts = sorted({run.nodes for run in runs})
    lines = [fit_runs([run for run in runs if run.nodes == count]) for count in counts]
    doublings = np.log2(counts)
    times = np.array([line.latency for line in lines])  # per count: value, low, high
    found: dict[str, Constant] = {}
    if len(counts) > 1:
        doubling = max(0.0, float(np.polyfit(doublings, times[:, 0], 1)[0]))
        span = doublings[-1] - doublings[0]
        found["cross_allreduce_doubling"] = _measured(
            "cross_allreduce_doubling",
            (
                doubling,
                min(doubling, max(0.0, float(times[-1, 1] - times[0, 2]) / span)),
                max(doubling, float(times[-1, 2] - times[0, 1]) / span),
            ),
            f"growth over {', '.join(map(str, counts))} nodes; {_origin(runs)}",
        )
    else:
        doubling = machine.cross_allreduce_doubling
        if doubling * doublings[0] > times[0, 0]:  # nothing would be left for the start
            doubling, low, high = (float(time / doublings[0]) for time in times[0])
            found["cross_allreduce_doubling"] = _measured(
                "cross_allreduce_doubling",
                (doubling, low, high),
                f"all of the latency, as one node count cannot divide it; {_origin(runs)}",
            )
    starts = times - doubling * doublings[:, None]
    bandwidths = np.array([line.bandwidth for line in lines])
    whole = Line(
        latency=_clip((starts[:, 0].mean(), starts[:, 1].min(), starts[:, 2].max())),
        bandwidth=(
            float(np.median(bandwidths[:, 0])),
            float(bandwidths[:, 1].min()),
            float(bandwidths[:, 2].max()),
        ),
        points=sum(line.points for line in lines),
        error=max(line.error for line in lines),
    )
    return _constants("cross_allreduce", whole, runs) | found


def _messages(runs: Sequence[NcclRun]) -> dict[str, Constant]:
    for run in runs:
        if run.nodes == 1:
            raise ValueError(
                f"{run.file}: sendrecv_perf ran on one host, {run.hosts[0]}; the planner needs "
                "messages between nodes, so run it with one rank on each of two hosts"
            )
    line = fit_runs(runs)
    found = _constants("message", line, runs)
    found["exchange_latency"] = _measured(
        "exchange_latency", line.latency, f"a message to one peer; {_origin(runs)}"
    )
    return found


def _constants(prefix: str, line: Line, runs: Sequence[NcclRun]) -> dict[str, Constant]:
    source = f"fit of {line.describe()}; {_origin(runs)}"
    return {
        f"{prefix}_latency": _measured(f"{prefix}_latency", line.latency, source),
        f"{prefix}_bandwidth": _measured(f"{prefix}_bandwidth", line.bandwidth, source),
    }


def _measured(name: str, spread: tuple[float, float, float], source: str) -> Constant:
    unit, factor, _ = CONSTANTS[name]
    value, low, high = (float(f"{number / factor:.4g}") for number in spread)
    return Constant(value=value, unit=unit, source=source, status="measured", low=low, high=high)


def _origin(runs: Sequence[NcclRun]) -> str:
    def one(run: NcclRun) -> str:
        graph = "CUDA graph" if run.graph else "no CUDA graph"
        return f"{run.file}: {run.test}, {run.ranks} x {run.gpu} on {run.nodes} hosts, {graph}"

    return "; ".join(one(run) for run in runs)


def fit_runs(runs: Sequence[NcclRun]) -> Line:
    """One line through all points of decode's sizes; ValueError with too few of them."""
    points = [
        (size, seconds)
        for run in runs
        for size, seconds in zip(run.sizes, run.seconds, strict=True)
        if SMALLEST <= size <= LARGEST
    ]
    sizes = {size for size, _ in points}
    if len(sizes) < FEWEST_POINTS or max(sizes) < 64 * min(sizes):
        files = ", ".join(run.file for run in runs)
        raise ValueError(
            f"{files}: {len(sizes)} sizes between 4 KiB and 16 MiB cannot tell latency from "
            "bandwidth; run the test with -b 4K -e 16M -f 2"
        )
    x, y = np.array(points, dtype=float).T
    return fit_line(x, y)


def weighted_fit(terms: np.ndarray, seconds: np.ndarray) -> np.ndarray:
    """Coefficients, none below 0, of seconds = terms @ coefficients; terms is [points, n].

    Least squares of relative errors, weights falling with the error: outliers count less.
    """
    used = list(range(terms.shape[1]))
    while True:
        matrix, weights = terms[:, used], 1 / seconds
        for _ in range(ROUNDS):
            some = np.linalg.lstsq(matrix * weights[:, None], seconds * weights, rcond=None)[0]
            errors = np.abs(matrix @ some / seconds - 1)
            weights = 1 / seconds / np.sqrt(np.maximum(errors, LEAST_ERROR))
        if min(some) >= 0 or len(used) == 1:
            found = np.zeros(terms.shape[1])
            found[used] = some
            return found
        del used[int(np.argmin(some))]


def fit_line(sizes: np.ndarray, seconds: np.ndarray) -> Line:
    """Latency and bandwidth by `weighted_fit`, and what single points would give for each."""
    terms = np.stack([np.ones_like(sizes), sizes], axis=1)
    a, b = weighted_fit(terms, seconds)
    b = max(b, 1e-18)
    moving, rest = b * sizes, seconds - a
    starts = (seconds - moving)[moving <= a]
    slopes = (sizes / np.where(rest > 0, rest, np.inf))[(moving > a) & (rest > 0)]
    return Line(
        latency=_clip(_spread(float(a), starts)),
        bandwidth=_spread(float(1 / b), slopes),
        points=len(sizes),
        error=float(np.median(np.abs(terms @ [a, b] / seconds - 1))),
    )


def _spread(value: float, singles: np.ndarray) -> tuple[float, float, float]:
    return value, float(min([value, *singles])), float(max([value, *singles]))


def _clip(spread: tuple[float, float, float]) -> tuple[float, float, float]:
    value, low, high = (max(0.0, number) for number in spread)
    return value, low, high
