"""What a figure shows, without how it is drawn: series of numbers, and the same as CSV."""

import csv
import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass

KINDS = ("line", "band", "bar", "published")
FIELDS = (
    "panel",
    "series",
    "kind",
    "x",
    "y",
    "low",
    "high",
    "published",
    "simulated",
    "difference_percent",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    """Points of one system. `low` and `high` are of the same length as `x`, or empty.

    A `published` series is one number that a paper's text states: drawn at (x, y), which for a
    ratio is the ratio times our own simulated baseline, and compared as `published` against
    `simulated`, the same quantity in the simulation.
    """

    label: str
    kind: str  # of KINDS
    style: str  # of plotting.STYLES: who or what it is about
    x: tuple[float, ...]
    y: tuple[float, ...] = ()  # empty for a band
    low: tuple[float, ...] = ()
    high: tuple[float, ...] = ()
    published: float | None = None
    simulated: float | None = None
    bound: str = ""  # "up to", "below" or "nearly" if the text says so

    @property
    def difference(self) -> float | None:
        """Of the simulation from the publication, as a part of the latter."""
        if self.published is None or self.simulated is None:
            return None
        return self.simulated / self.published - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Panel:
    """One pair of axes."""

    title: str
    x_label: str
    y_label: str
    series: tuple[Series, ...]
    ticks: tuple[tuple[float, str], ...] = ()  # of x; bars stand on them
    x_log: bool = False
    y_log: bool = False
    y_top: float | None = None  # what lies above is marked at the edge
    stacked: bool = False  # bars, each on the one before; else side by side
    horizontal: bool = False  # bars
    dodge: bool = False  # lines that may coincide stand a little apart


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    name: str  # of its files
    title: str
    panels: tuple[Panel, ...]
    notes: tuple[str, ...] = ()


def number(value: float | None) -> str:
    """Six digits: what a machine's last bits change must not change a file."""
    return "" if value is None else f"{value:.6g}"


def to_csv(figure: Figure) -> str:
    """Every point of every series, a line each."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(FIELDS)
    for panel in figure.panels:
        names = dict(panel.ticks)
        for series in panel.series:
            writer.writerows(_rows(panel, series, names))
    return text.getvalue()


def _rows(panel: Panel, series: Series, names: dict[float, str]) -> list[list[str]]:
    def at(values: Sequence[float], index: int) -> str:
        return number(values[index]) if values else ""

    difference = series.difference
    tail = [number(series.published), number(series.simulated)]
    tail.append("" if difference is None else f"{percent(difference):.1f}")
    return [
        [panel.title, series.label, series.kind, names.get(x, number(x))]
        + [at(values, i) for values in (series.y, series.low, series.high)]
        + tail
        for i, x in enumerate(series.x)
    ]


def percent(part: float) -> float:
    """To a tenth; never a negative zero."""
    return round(100 * part, 1) + 0.0


def as_ratio(value: float) -> str:
    return f"{value:.2f}x" if value < 10 else f"{value:.1f}x"


def published(
    label: str,
    style: str,
    at: tuple[float, float],
    *,
    published: float,
    simulated: float,
    show: Callable[[float], str] = as_ratio,
    bound: str = "",
) -> Series:
    """A published number at (x, y), its label saying what the simulation has instead."""
    stated = f"{bound} {show(published)}".strip()
    difference = f"{percent(simulated / published - 1):+.1f} %"
    if bound == "below":
        difference = "holds" if simulated < published else "does not hold"
    return Series(
        label=f"paper: {label}: {stated}; here {show(simulated)} ({difference})",
        kind="published",
        style=style,
        x=(at[0],),
        y=(at[1],),
        published=published,
        simulated=simulated,
        bound=bound,
    )
