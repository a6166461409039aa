"""Drawing with matplotlib: one style for each system in all figures, the same bytes on every run.

Sizes are laid out in inches by hand, so that nothing overlaps however many legend lines and notes
a figure has. matplotlib is optional and imported inside functions only.
"""

import io
import math
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from sglang_tknp.launch.planner.series import Figure, Panel, Series

MISSING = "figures need matplotlib, which is not installed; run: pip install matplotlib"


class Style(NamedTuple):
    colour: str
    marker: str
    line: str
    hatch: str


# Colours that colour-blind readers tell apart, of different greys where they can be. No hatches of
# circles: they make an SVG large.
STYLES: Mapping[str, Style] = {
    "tknp": Style("#0050a0", "o", "-", ""),
    "tknp-dual": Style("#56b4e9", "P", "-", "++"),
    "dp": Style("#d55e00", "s", "--", "//"),
    "dcp": Style("#009e73", "D", "-.", "xx"),
    "tp": Style("#555555", "^", ":", "||"),
    "pp": Style("#e69f00", "v", "-", "\\\\"),
    "attention-dp": Style("#cc79a7", "X", "--", "--"),
    # Tensor-parallel degrees, darker with more GPUs.
    "TP1": Style("#e69f00", "v", ":", ""),
    "TP4": Style("#d55e00", "s", "--", ""),
    "TP8": Style("#0050a0", "o", "-", ""),
    "TP16": Style("#009e73", "D", "-.", ""),
    "TP64": Style("#222222", "x", "--", ""),
    # Parts of a step or of a layer.
    "attention": Style("#0050a0", "", "", ""),
    "MLP compute": Style("#e69f00", "", "", "//"),
    "dense": Style("#e69f00", "", "", "//"),
    "QKV projection": Style("#f0d58c", "", "", "\\\\"),
    "output projection": Style("#d55e00", "", "", "xx"),
    "elementwise": Style("#bbbbbb", "", "", ""),
    "other": Style("#bbbbbb", "", "", ""),
    "all-reduce": Style("#009e73", "", "", "----"),
    "exchange": Style("#56b4e9", "", "", "++"),
    "attention merge": Style("#8fd3bd", "", "", "xx"),
    "handoff": Style("#cc79a7", "", "", "\\\\"),
    "hops": Style("#8a4a75", "", "", "||"),
    "step overhead": Style("#444444", "", "", ""),
    # Memory of a node.
    "weights": Style("#e69f00", "", "", "//"),
    "KV": Style("#0050a0", "", "", ""),
    "unusable": Style("#dddddd", "", "", "xx"),
}
PLAIN = Style("#888888", "h", "-", "")
HOLLOW = "DsphP^v<"  # shapes of published markers, by turns
RC: Mapping[str, Any] = {
    "font.family": ["DejaVu Sans"],
    "font.size": 9,
    "svg.fonttype": "path",
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#dddddd",
    "grid.linewidth": 0.6,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "hatch.linewidth": 0.5,
    "lines.markersize": 5,
    "savefig.dpi": 120,
    "figure.facecolor": "white",
}
# Inches.
PANEL, SINGLE, HEIGHT, LEFT, NAMES, RIGHT = 3.9, 6.2, 3.0, 0.75, 2.3, 0.15
TITLE, LEGEND, X_LABEL, CLAIM, NOTE = 0.62, 0.26, 0.55, 0.19, 0.15


def style_of(name: str) -> Style:
    """Variants (`dp-tp2`, `pp2`) look like their family, dotted."""
    if name in STYLES:
        return STYLES[name]
    family = next((f for f in ("dp", "pp") if name.startswith(f)), None)
    if family is None:
        return PLAIN
    return STYLES[family]._replace(marker="h" if family == "dp" else "d", line=":")


@contextmanager
def styled(salt: str) -> Iterator[None]:
    """Our style whatever the user's matplotlibrc; `salt` makes the SVG's ids.

    Raises:
        ImportError: matplotlib is not installed; it says what to install.
    """
    try:
        import matplotlib
        from matplotlib import style
    except ImportError:
        raise ImportError(MISSING) from None
    with style.context("default"), matplotlib.rc_context({**RC, "svg.hashsalt": salt}):
        yield


def draw_figure(figure: Figure, folder: Path) -> list[Path]:
    """Write the figure as PNG and SVG; ImportError without matplotlib."""
    paths = [folder / f"{figure.name}.{kind}" for kind in ("png", "svg")]
    with styled(figure.name):
        drawn = compose(figure)
        for path in paths:
            path.write_bytes(saved(drawn, path.suffix[1:]))
    return paths


def saved(drawn: Any, kind: str) -> bytes:
    """The file's bytes, without dates and versions; inside `styled`."""
    nothing = dict.fromkeys(
        ("Software",) if kind == "png" else ("Date", "Creator", "Format", "Type")
    )
    file = io.BytesIO()
    drawn.savefig(file, format=kind, metadata=nothing)
    return file.getvalue()


def compose(figure: Figure, *, title: bool = True) -> Any:
    """The figure with all its panels, a legend of systems above and notes below."""
    from matplotlib.figure import Figure as Drawn

    count = len(figure.panels)
    width_of = SINGLE if count == 1 else PANEL
    names = NAMES if any(panel.horizontal for panel in figure.panels) else LEFT
    width = count * (names + width_of + RIGHT)
    claims = max(len(_published(panel)) for panel in figure.panels)
    notes = [line for note in figure.notes for line in textwrap.wrap(note, int(width * 16.5))]
    entries = _legend(figure)
    rows = math.ceil(len(entries) / _columns(entries, width))
    top = (TITLE if title else 0.35) + LEGEND * rows
    below = X_LABEL + CLAIM * claims + NOTE * len(notes) + 0.12
    height = top + HEIGHT + below
    drawn = Drawn(figsize=(width, height))
    for i, panel in enumerate(figure.panels):
        left = i * (names + width_of + RIGHT) + names
        place = (left / width, below / height, width_of / width, HEIGHT / height)
        _draw_panel(drawn.add_axes(place), panel)
    if title:
        drawn.text(0.1 / width, 1 - 0.1 / height, figure.title, va="top", size=11, weight="bold")
    _draw_legend(drawn, entries, width, 1 - (0.33 if title else 0.05) / height)
    for i, line in enumerate(reversed(notes)):
        drawn.text(0.1 / width, (0.06 + NOTE * i) / height, line, size=6.8, color="#333333")
    return drawn


def _published(panel: Panel) -> list[Series]:
    return [series for series in panel.series if series.kind == "published"]


def _legend(figure: Figure) -> dict[str, tuple[str, set[str]]]:
    """Style and kinds of each label of all panels, in their order."""
    found: dict[str, tuple[str, set[str]]] = {}
    for series in (s for panel in figure.panels for s in panel.series if s.kind != "published"):
        found.setdefault(series.label, (series.style, set()))[1].add(series.kind)
    return found


def _columns(entries: Mapping[str, object], width: float) -> int:
    longest = max((len(label) for label in entries), default=1)
    return max(1, min(len(entries), int((width - 0.2) / (0.62 + 0.075 * longest))))


def _draw_legend(
    drawn: Any, entries: Mapping[str, tuple[str, set[str]]], width: float, top: float
) -> None:
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    handles: list[Any] = []
    for name, kinds in entries.values():
        style = style_of(name)
        parts: list[Any] = []
        if "bar" in kinds:
            parts.append(Patch(facecolor=style.colour, hatch=style.hatch, edgecolor="white"))
        if "band" in kinds:
            parts.append(Patch(color=style.colour, alpha=0.25, hatch=style.hatch, lw=0))
        if "line" in kinds:
            parts.append(Line2D([], [], color=style.colour, marker=style.marker, ls=style.line))
        elif "band" in kinds:  # its edges
            parts.append(Line2D([], [], color=style.colour, marker=style.marker, lw=0.7, ms=2.5))
        handles.append(parts[0] if len(parts) == 1 else tuple(parts))
    if handles:
        drawn.legend(
            handles,
            list(entries),
            loc="upper left",
            bbox_to_anchor=(0.0, top),
            ncol=_columns(entries, width),
            frameon=False,
            handlelength=2.6,
        )


def _draw_panel(axes: Any, panel: Panel) -> None:
    _draw_bars(axes, panel)
    lines = [series for series in panel.series if series.kind == "line"]
    for series in panel.series:
        if series.kind == "band":
            _draw_band(axes, series)
    for i, series in enumerate(lines):
        style = style_of(series.style)
        shift = 6 * ((len(lines) - 1) / 2 - i) if panel.dodge else 0.0
        (line,) = axes.plot(
            series.x,
            series.y,
            color=style.colour,
            ls=style.line,
            marker=style.marker,
            lw=1.8 if series.style == "tknp" else 1.4,
            zorder=3 if series.style == "tknp" else 2,
        )
        if shift:  # only now, so that the axes' limits come from the data
            line.set_transform(_shifted(axes, shift))
    if not any(series.x for series in panel.series):
        axes.text(0.5, 0.5, "nothing to show", transform=axes.transAxes, ha="center")
    _set_axes(axes, panel)
    _draw_published(axes, panel)


def _draw_band(axes: Any, series: Series) -> None:
    style = style_of(series.style)
    look = {"facecolor": style.colour, "edgecolor": style.colour, "hatch": style.hatch}
    axes.fill_between(series.x, series.low, series.high, alpha=0.16, linewidth=0, **look)
    for edge in (series.low, series.high):
        axes.plot(series.x, edge, color=style.colour, lw=0.7, marker=style.marker, ms=2.5)


def _draw_bars(axes: Any, panel: Panel) -> None:
    bars = [series for series in panel.series if series.kind == "bar"]
    base: dict[float, float] = {}
    thick = 0.72 if panel.stacked else 0.8 / max(1, len(bars))
    for i, series in enumerate(bars):
        style = style_of(series.style)
        shift = 0.0 if panel.stacked else (i - (len(bars) - 1) / 2) * thick
        places = [x + shift for x in series.x]
        below = [base.get(x, 0.0) if panel.stacked else 0.0 for x in series.x]
        look = {"color": style.colour, "hatch": style.hatch, "edgecolor": "white", "lw": 0.4}
        if panel.horizontal:
            axes.barh(places, series.y, thick, left=below, **look)
        else:
            axes.bar(places, series.y, thick, bottom=below, **look)
        base.update({x: b + y for x, b, y in zip(series.x, below, series.y, strict=True)})
        if series.low:
            _draw_whiskers(axes, places, series)


def _draw_whiskers(axes: Any, places: Sequence[float], series: Series) -> None:
    below = [y - low for y, low in zip(series.y, series.low, strict=True)]
    above = [high - y for y, high in zip(series.y, series.high, strict=True)]
    axes.errorbar(places, series.y, (below, above), fmt="none", ecolor="black", lw=0.9, capsize=2)


def _set_axes(axes: Any, panel: Panel) -> None:
    axes.set_title(panel.title, size=9, loc="left")
    axes.set_xlabel(panel.x_label)
    axes.set_ylabel(panel.y_label)
    if panel.y_log:
        from matplotlib.ticker import LogLocator, NullLocator

        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_minor_locator(NullLocator())
        axes.yaxis.set_major_formatter("{x:g}")
    if panel.x_log:
        axes.set_xscale("log", base=2)
    if panel.ticks:
        places, names = zip(*panel.ticks, strict=True)
        axis = axes.yaxis if panel.horizontal else axes.xaxis
        axis.set_ticks(list(places), list(names))
        axis.grid(not any(series.kind == "bar" for series in panel.series))
    if panel.horizontal:
        axes.invert_yaxis()
    elif not panel.y_log:
        claimed = max((series.y[0] for series in _published(panel)), default=0.0)
        axes.set_ylim(0, panel.y_top or max(axes.get_ylim()[1], 1.05 * claimed))


def _draw_published(axes: Any, panel: Panel) -> None:
    """Hollow markers, one shape per claim, explained below the axes."""
    from matplotlib.patheffects import withStroke

    claims = _published(panel)
    for i, (series, shift) in enumerate(zip(claims, _dodged(axes, claims), strict=True)):
        shape, y = HOLLOW[i % len(HOLLOW)], series.y[0]
        if panel.y_top is not None and y > panel.y_top:
            shape, y = "^", panel.y_top
        axes.plot(
            series.x[0],
            y,
            shape,
            ms=8,
            mfc="none",
            mec=style_of(series.style).colour,
            mew=1.5,
            label=series.label + (" (above the axis)" if y < series.y[0] else ""),
            clip_on=False,
            zorder=5,
            ls="none",
            path_effects=[withStroke(linewidth=3.6, foreground="white")],  # on bars of its colour
            transform=_shifted(axes, shift),
        )
    if claims:
        height = axes.get_position().height * axes.figure.get_figheight()
        axes.legend(
            loc="upper left",
            bbox_to_anchor=(-0.08, -(X_LABEL - 0.07) / height),
            borderaxespad=0,
            frameon=False,
            fontsize=7,
            handlelength=1.2,
            labelspacing=0.55,
        )


def _dodged(axes: Any, claims: Sequence[Series]) -> list[int]:
    """Points to the left for each marker, where others would lie under it."""
    at = [axes.transLimits.transform(axes.transScale.transform((s.x[0], s.y[0]))) for s in claims]
    shifts: list[int] = []
    for i, (x, y) in enumerate(at):
        near = [
            shifts[j] for j in range(i) if abs(at[j][0] - x) < 0.02 and abs(at[j][1] - y) < 0.06
        ]
        shifts.append(max(near) + 12 if near else 0)
    return shifts


def _shifted(axes: Any, points: float) -> Any:
    from matplotlib.transforms import ScaledTranslation

    return axes.transData + ScaledTranslation(-points / 72, 0, axes.figure.dpi_scale_trans)
