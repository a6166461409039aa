"""Layouts serving one workload after another: the points of a curve, and its band.

A point may have several runs (seeds): its value is their mean as given, its band what lies between
the worst and the best of all runs in all scenarios (compare.py).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from sglang_tknp.launch.planner.compare import Outcome, compare
from sglang_tknp.launch.planner.layouts import Setting
from sglang_tknp.launch.planner.metrics import Metrics
from sglang_tknp.launch.planner.series import Series
from sglang_tknp.launch.planner.trace import Arrival

Metric = Callable[[Metrics], float]
# Nobody knows how far its stages overlap, so it has no best guess: only a band.
ONLY_BANDS = ("pp",)


@dataclass(frozen=True, slots=True)
class Point:
    x: float
    outcomes: tuple[Outcome, ...]  # of the same layout; one per seed

    def value(self, metric: Metric) -> float:
        """As given."""
        found = [metric(o.given) for o in self.outcomes if o.given is not None]
        return sum(found) / len(found)

    def ends(self, metric: Metric) -> tuple[float, float]:
        found = [
            metric(m)
            for o in self.outcomes
            for m in (o.given, *o.by_scenario.values())
            if m is not None
        ]
        return min(found), max(found)


@dataclass(frozen=True, slots=True)
class Curve:
    """One layout; points at which it cannot serve are left out."""

    name: str
    title: str
    points: tuple[Point, ...]

    def at(self, x: float) -> Point | None:
        return next((point for point in self.points if point.x == x), None)


def sweep(
    setting: Setting,
    workloads: Sequence[tuple[float, Sequence[Sequence[Arrival]]]],
    names: Sequence[str],
    *,
    slo_per_token: float | None = None,
    bands: bool = True,
) -> dict[str, Curve]:
    """Curves by the layout's name, over workloads of (x, one trace per seed)."""
    points: dict[str, list[Point]] = {name: [] for name in names}
    titles = dict.fromkeys(names, "")
    for x, traces in workloads:
        runs = [
            compare(setting, trace, names=names, slo_per_token=slo_per_token, bands=bands)
            for trace in traces
        ]
        for name, *outcomes in zip(names, *runs, strict=True):
            titles[name] = outcomes[0].title
            if all(outcome.given is not None for outcome in outcomes):
                points[name].append(Point(x, tuple(outcomes)))
    return {name: Curve(name, titles[name], tuple(points[name])) for name in names}


def series_of(curve: Curve, metric: Metric, *, bars: bool = False) -> list[Series]:
    """The curve as a line and, where it has one, a band around it; or as bars with ranges."""
    if not curve.points:
        return []
    xs = tuple(point.x for point in curve.points)
    values = tuple(point.value(metric) for point in curve.points)
    low, high = zip(*(point.ends(metric) for point in curve.points), strict=True)
    wide = any(b > a for a, b in zip(low, high, strict=True))
    only_band = curve.name in ONLY_BANDS and wide
    shared = {"label": curve.title, "style": curve.name, "x": xs}
    if bars:
        return [Series(kind="bar", y=values, low=low, high=high, **shared)]  # type: ignore[arg-type]
    found = []
    if wide:
        found.append(Series(kind="band", low=low, high=high, **shared))  # type: ignore[arg-type]
    if not only_band:
        found.append(Series(kind="line", y=values, **shared))  # type: ignore[arg-type]
    return found


def best_ratio(curve: Curve, other: Curve, metric: Metric) -> tuple[float, float, float] | None:
    """(ratio, x, the other's value) where the curve, as given, is furthest ahead of the other."""
    found = []
    for point in curve.points:
        if (base := other.at(point.x)) is not None:
            found.append((point.value(metric) / base.value(metric), point.x, base.value(metric)))
    return max(found) if found else None
