"""The comparison's plots, like the paper's figures 8, 9 and 12, with the planner's drawing. Pure.

Measured medians as lines, and the simulator's prediction of the same points as bars beside them.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from compare_report import sweeps
from compare_results import crossover

from sglang_tknp.launch.planner.series import Figure, Panel, Series

Found = Mapping[str, Any]
TITLES = {"tknp": "TKNP", "dp": "DP", "tp": "TP", "pp": "PP"}
NOTE = "Measured on two CPU cores with a toy model; medians. Requests, contexts: see the ratios."


def figures(study: Found, slug: str) -> list[Figure]:
    """All plots of a study that it has points for."""
    found = [_throughput(study, slug), _latency(study, slug), _online(study, slug)]
    found += [_all_points(study, slug), _predicted(study, slug)]
    return [figure for figure in found if figure is not None]


def _points(study: Found) -> dict[str, Found]:
    return {run["point"]["name"]: run["point"] for run in study["runs"]}


def _systems(study: Found) -> list[str]:
    return [name for name in TITLES if any(m["system"] == name for m in study["medians"])]


def _line(system: str, values: Mapping[float, float]) -> Series:
    xs = sorted(values)
    ys = tuple(values[x] for x in xs)
    return Series(kind="line", label=TITLES[system], style=system, x=tuple(xs), y=ys)


def _bars(system: str, xs: Sequence[float], ys: Sequence[float]) -> Series:
    return Series(kind="bar", label=TITLES[system], style=system, x=tuple(xs), y=tuple(ys))


def _fixed(study: Found, context: int, metric: Callable[[Found], float]) -> list[Series]:
    """One line per system over the requests released at once."""
    points = _points(study)
    wanted = {n for n, p in points.items() if p["kind"] == "fixed" and p["context"] == context}
    series = []
    for system in _systems(study):
        medians = [m for m in study["medians"] if m["system"] == system and m["point"] in wanted]
        if medians:
            values = {float(points[m["point"]]["requests"]): metric(m) for m in medians}
            series.append(_line(system, values))
    return series


def _panel(title: str, y_label: str, series: Sequence[Series]) -> Panel:
    ticks = sorted({x for one in series for x in one.x})
    return Panel(
        title=title,
        x_label="requests released at once",
        y_label=y_label,
        series=tuple(series),
        ticks=tuple((x, f"{x:g}") for x in ticks),
        x_log=True,
    )


def _throughput(study: Found, slug: str) -> Figure | None:
    panels = []
    for context, sweep in sorted(sweeps(study).items()):
        if len({one["requests"] for one in sweep}) < 2:
            continue
        ahead = crossover(sweep)
        where = f"TKNP ahead of DP from {ahead}" if ahead else "DP ahead throughout"
        title = f"stands for {context // 1024}K: {where}"
        panels.append(
            _panel(title, "completion throughput (tokens/s)", _fixed(study, context, _speed))
        )
    if not panels:
        return None
    return Figure(
        name=f"{slug}-throughput",
        title=f"{study['name']}, measured: completion throughput",
        panels=tuple(panels),
        notes=(NOTE, "Waves make curves rise and fall."),
    )


def _latency(study: Found, slug: str) -> Figure | None:
    contexts = {c: s for c, s in sweeps(study).items() if len({o["requests"] for o in s}) > 2}
    if not contexts:
        return None
    context = max(contexts, key=lambda c: len(contexts[c]))
    metrics: Sequence[tuple[str, str, Callable[[Found], float]]] = (
        ("mean wait for an owner", "s", lambda m: m["queue_wait"]),
        ("p95 ITL", "ms", lambda m: m["itl_ms"]["p95"]),
        ("mean completion", "s", lambda m: m["completion"]["mean"]),
    )
    return Figure(
        name=f"{slug}-latency",
        title=f"{study['name']}, measured: waits and latencies, {context // 1024}K",
        panels=tuple(_panel(n, unit, _fixed(study, context, f)) for n, unit, f in metrics),
        notes=(NOTE,),
    )


def _online(study: Found, slug: str) -> Figure | None:
    """Arrivals over time, and mixed lengths."""
    points = {n: p for n, p in _points(study).items() if p["kind"] != "fixed"}
    if not points:
        return None
    names = sorted(points, key=lambda n: (points[n]["kind"], float(points[n]["rate"])))
    metrics: Sequence[tuple[str, str, Callable[[Found], float]]] = (
        ("SLO attainment", "%", lambda m: 100 * m["slo_attainment"]),
        ("throughput", "tokens/s", _speed),
        ("p95 completion", "s", lambda m: m["completion"]["p95"]),
    )
    panels = tuple(_named_bars(study, names, title, unit, f) for title, unit, f in metrics)
    return Figure(
        name=f"{slug}-online",
        title=f"{study['name']}, measured: arrivals over time and mixed lengths",
        panels=panels,
        notes=(NOTE, "Names: what the length stands for, requests, arrivals."),
    )


def _named_bars(
    study: Found,
    names: Sequence[str],
    title: str,
    unit: str,
    metric: Callable[[Found], float],
) -> Panel:
    series = []
    for system in _systems(study):
        found = {m["point"]: metric(m) for m in study["medians"] if m["system"] == system}
        kept = [(float(i), found[n]) for i, n in enumerate(names) if n in found]
        if kept:
            series.append(_bars(system, *zip(*kept, strict=True)))
    ticks = tuple((float(i), name) for i, name in enumerate(names))
    return Panel(
        title=title, x_label=unit, y_label="", series=tuple(series), ticks=ticks, horizontal=True
    )


def _all_points(study: Found, slug: str) -> Figure | None:
    """Studies of a point or two have no curves: bars."""
    names = list(_points(study))
    if len(names) > 2:
        return None
    return Figure(
        name=f"{slug}-points",
        title=f"{study['name']}, measured",
        panels=(_named_bars(study, names, "completion throughput", "tokens/s", _speed),),
        notes=(NOTE,),
    )


def _predicted(study: Found, slug: str) -> Figure | None:
    if not study["predictions"]:
        return None
    panels = []
    for system in _systems(study):
        rows = [row for row in study["predictions"] if row["system"] == system]
        names = [row["point"] for row in rows]
        places = tuple(float(i) for i in range(len(rows)))
        measured = _bars(system, places, [row["measured"] for row in rows])
        simulated = Series(
            kind="bar",
            label="simulated",
            style="other",
            x=places,
            y=tuple(row["predicted"] for row in rows),
        )
        panels.append(
            Panel(
                title=f"{TITLES[system]}: mean error {_mean_error(rows):.0%}",
                x_label="tokens/s",
                y_label="",
                series=(measured, simulated),
                ticks=tuple(zip(places, names, strict=True)),
                horizontal=True,
            )
        )
    return Figure(
        name=f"{slug}-predicted",
        title=f"{study['name']}: the simulator beside the measurement",
        panels=tuple(panels),
        notes=("Constants of the simulator come from micro-benchmarks only.",),
    )


def _mean_error(rows: Sequence[Found]) -> float:
    return sum(abs(row["error"]) for row in rows) / len(rows)


def _speed(median: Found) -> float:
    return float(median["throughput"])
