"""Draws the map of the best layout: context by batch, hatched where the answer is not known."""

from collections.abc import Sequence
from typing import Any

from sglang_tknp.launch.planner.plotting import style_of
from sglang_tknp.launch.planner.report_data import Cell

NOTHING = "#d0d0d0"
WIDTH, ROW, LEFT, BELOW = 7.2, 0.46, 0.75, 0.55  # inches
COLUMNS = 4  # of the legend


def compose_map(cells: Sequence[Cell]) -> Any:
    """A matplotlib figure; inside `plotting.styled`."""
    from matplotlib.figure import Figure as Drawn

    contexts = sorted({cell.context for cell in cells})
    batches = sorted({cell.batch for cell in cells})
    handles = _legend(cells)
    top = 0.15 + 0.22 * -(-len(handles) // COLUMNS)
    height = top + ROW * len(contexts) + BELOW
    drawn = Drawn(figsize=(WIDTH, height))
    size = (1 - (LEFT + 0.15) / WIDTH, ROW * len(contexts) / height)
    axes = drawn.add_axes((LEFT / WIDTH, BELOW / height, *size))
    axes.grid(False)
    for cell in cells:
        _draw_cell(axes, cell, batches.index(cell.batch), contexts.index(cell.context))
    axes.set_xlim(0, len(batches))
    axes.set_ylim(0, len(contexts))
    axes.set_xticks([i + 0.5 for i in range(len(batches))], [str(b) for b in batches])
    axes.set_yticks([i + 0.5 for i in range(len(contexts))], [f"{c / 1024:g}K" for c in contexts])
    axes.tick_params(length=0)
    axes.set_xlabel("concurrency (requests released at once)")
    axes.set_ylabel("context (input tokens)")
    look = {"ncol": COLUMNS, "frameon": False, "fontsize": 8, "borderaxespad": 0.3}
    drawn.legend(handles=handles, loc="upper left", **look)
    return drawn


def _draw_cell(axes: Any, cell: Cell, x: int, y: int) -> None:
    from matplotlib.patches import Rectangle

    colour = style_of(cell.best.name).colour if cell.best else NOTHING
    hatch = "///" if cell.undecided else ""
    look: dict[str, Any] = {"facecolor": colour, "edgecolor": "white", "hatch": hatch, "lw": 1}
    axes.add_patch(Rectangle((x, y), 1, 1, alpha=0.75, **look))
    text = "none"
    if cell.best is not None and cell.best.given is not None:
        text = f"{cell.best.name}\n{cell.best.given.throughput:.0f}"
    axes.text(
        x + 0.5,
        y + 0.5,
        text,
        size=6.5,
        ha="center",
        va="center",
        bbox={"facecolor": "white", "alpha": 0.75, "pad": 1.5, "lw": 0},
    )


def _legend(cells: Sequence[Cell]) -> list[Any]:
    from matplotlib.patches import Patch

    found = dict.fromkeys((c.best.name, c.best.title) for c in cells if c.best is not None)
    handles = [Patch(facecolor=style_of(n).colour, alpha=0.75, label=title) for n, title in found]
    if any(cell.undecided for cell in cells):
        look: dict[str, Any] = {"facecolor": "#888888", "edgecolor": "white", "hatch": "///"}
        handles.append(Patch(label="some scenario ranks another first", **look))
    if any(cell.best is None for cell in cells):
        handles.append(Patch(facecolor=NOTHING, label="nothing can serve it"))
    return handles
