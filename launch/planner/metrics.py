"""What a simulated run says, in the paper's words and in those of SGLang's benchmark."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from sglang_tknp.launch.planner.simulate import Run, Served


class Intervals:
    """Inter-token latencies of a run, exact: every step's seconds, as often as it had tokens.

    The wait before a request's first token is no interval (paper, figure 9b).
    """

    def __init__(self, run: Run) -> None:
        seconds, weights = [], []
        for _, piece, rows, new in run.steps:
            steps = piece.first + piece.growth * np.arange(piece.steps)
            tokens = np.full(piece.steps, rows)
            tokens[0] -= new
            seconds.append(steps)
            weights.append(tokens)
        self._seconds = np.concatenate(seconds) if seconds else np.zeros(0)
        self._weights = np.concatenate(weights) if weights else np.zeros(0, int)
        order = np.argsort(self._seconds, kind="stable")
        self._seconds, self._weights = self._seconds[order], self._weights[order]
        self._ranks = np.cumsum(self._weights)

    @property
    def count(self) -> int:
        return int(self._ranks[-1]) if len(self._ranks) else 0

    def percentile(self, percent: float) -> float:
        """Seconds, between two intervals as numpy.percentile of all has it; 0 of none."""
        if not self.count:
            return 0.0
        rank, between = divmod(percent * (self.count - 1) / 100, 1)
        ranks = [rank + 1, min(rank + 2, self.count)]
        lower, upper = self._seconds[np.searchsorted(self._ranks, ranks)]
        return float(lower + (upper - lower) * between)

    def mean(self) -> float:
        return float(self._seconds @ self._weights / self.count) if self.count else 0.0

    def std(self) -> float:
        if not self.count:
            return 0.0
        away = (self._seconds - self.mean()) ** 2
        return float(np.sqrt(away @ self._weights / self.count))


@dataclass(frozen=True, slots=True, kw_only=True)
class Metrics:
    """Seconds, tokens and requests of one run, over the requests that were served."""

    completed: int
    refused: int
    seconds: float  # release to last finish
    throughput: float  # output tokens per second of them (paper, section 5.2)
    mean_wait: float  # release to owner
    p95_itl: float
    mean_itl: float
    mean_completion: float
    p95_completion: float
    attainment: float | None  # share whose completion time per output token meets the SLO
    peak_requests: tuple[int, ...]  # by owner
    peak_waiting: int
    saturated: bool
    is_burst: bool  # all requests came at once


def served(run: Run) -> list[Served]:
    return [request for request in run.requests if not request.refused]


def measure(run: Run, slo_per_token: float | None = None) -> Metrics:
    """`slo_per_token`: seconds from arrival to completion, per output token (paper, 5.4)."""
    requests, intervals = served(run), Intervals(run)
    completions = np.array([r.finish - r.arrival for r in requests])
    outputs = np.array([r.output_tokens for r in requests])
    seconds = max((r.finish for r in requests), default=0.0)
    attained = None
    if slo_per_token is not None:
        good = np.count_nonzero(completions <= slo_per_token * outputs) if requests else 0
        attained = float(good / len(run.requests)) if run.requests else 1.0
    return Metrics(
        completed=len(requests),
        refused=len(run.requests) - len(requests),
        seconds=seconds,
        throughput=float(outputs.sum() / seconds) if seconds else 0.0,
        mean_wait=_mean([r.wait for r in requests]),
        p95_itl=intervals.percentile(95),
        mean_itl=intervals.mean(),
        mean_completion=_mean(completions),
        p95_completion=float(np.percentile(completions, 95)) if requests else 0.0,
        attainment=attained,
        peak_requests=tuple(run.peak_requests),
        peak_waiting=run.peak_waiting,
        saturated=_saturated(requests),
        is_burst=len({r.arrival for r in run.requests}) <= 1,
    )


def _mean(values: Sequence[float] | np.ndarray) -> float:
    return float(np.mean(values)) if len(values) else 0.0


def _saturated(requests: Sequence[Served]) -> bool:
    """Whether arrivals outpace completions: the waits of the last quarter are still growing.

    A burst has no rate, and is never called saturated.
    """
    by_arrival = sorted(requests, key=lambda r: r.arrival)
    quarter = len(by_arrival) // 4
    if quarter < 4 or by_arrival[-1].arrival == by_arrival[0].arrival:
        return False
    waits = [_mean([r.wait for r in by_arrival[i * quarter : (i + 1) * quarter]]) for i in range(4)]
    service = _mean([r.finish - r.admit for r in by_arrival])
    return waits[3] > waits[2] > waits[1] > waits[0] and waits[3] > service / 10
