"""The paper's figures as simulated: PNG, SVG and CSV, the same bytes on every run.

Numbers come from figures_layer.py and figures_pool.py, the drawing is plotting.py. Published values
are those that the paper's text states, never read off a bar.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from sglang_tknp.launch.planner import figures_layer, figures_pool
from sglang_tknp.launch.planner.hardware import Hardware
from sglang_tknp.launch.planner.layouts import Setting
from sglang_tknp.launch.planner.paper_pools import LLAMA, NEMOTRON, paper_setting
from sglang_tknp.launch.planner.plotting import draw_figure, styled
from sglang_tknp.launch.planner.series import Figure, to_csv

# Of each figure: the model, the nodes, and where its numbers come from.
FIGURES: Mapping[str, tuple[str, int, Callable[[Setting], Figure]]] = {
    "1": (LLAMA, 1, figures_layer.figure_1),
    "3": (LLAMA, 1, figures_layer.figure_3),
    "4": (LLAMA, 1, figures_layer.figure_4),
    "5": (LLAMA, 8, figures_layer.figure_5),
    "8": (LLAMA, 4, figures_pool.figure_8),
    "9": (LLAMA, 4, figures_pool.figure_9),
    "10": (NEMOTRON, 4, figures_pool.figure_10),
    "11": (LLAMA, 8, figures_pool.figure_11),
    "12": (LLAMA, 4, figures_pool.figure_12),
}


HOLLOW = (
    "Hollow markers: the paper's text, measured on H100; a ratio stands at that ratio times our "
    "own simulated baseline."
)


def provenance(hardware: Hardware) -> str:
    """What stands below every figure."""
    fitted = "; ".join(hardware.fitted()) or "nothing"
    return f"Simulated, never measured, with hardware file {hardware.name}; fitted: {fitted}."


def make_figure(number: str, hardware: Hardware) -> Figure:
    """The numbers of one figure."""
    model, nodes, figure = FIGURES[number]
    setting = paper_setting(hardware, model, nodes)
    made = figure(setting)
    claims = any(series.kind == "published" for panel in made.panels for series in panel.series)
    notes = (provenance(hardware), *((HOLLOW,) if claims else ()), *made.notes)
    return replace(made, notes=notes)


def draw(
    folder: Path,
    hardware: Hardware,
    only: Sequence[str] | None = None,
    on_progress: Callable[[str], None] = lambda name: None,
) -> list[Path]:
    """Write figure-N.png, .svg and .csv to `folder`, made if need be; the paths written.

    Args:
        only: numbers of figures, of FIGURES; None for all.
        on_progress: hears the figure that is made next.

    Raises:
        ValueError: there is no such figure.
        ImportError: matplotlib is not installed.
    """
    numbers = list(only or FIGURES)
    if unknown := [number for number in numbers if number not in FIGURES]:
        raise ValueError(
            f"no figure {', '.join(unknown)} is simulated; those that are: {', '.join(FIGURES)}"
        )
    with styled("check"):  # before anything is simulated or written
        folder.mkdir(parents=True, exist_ok=True)
    written = []
    for number in numbers:
        on_progress(f"figure {number}")
        figure = make_figure(number, hardware)
        table = folder / f"{figure.name}.csv"
        table.write_text(to_csv(figure))
        written += [*draw_figure(figure, folder), table]
    return written
