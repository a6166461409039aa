"""Plots and one page of a comparison: bench/results/compare.json -> compare.html, PNG and SVG.

    python bench/compare_page.py [--json FILE] [--out FOLDER]

Needs matplotlib and jinja2 (`pip install "sglang-tknp[plot,report]"`). A function of the JSON
alone, which compare.py wrote; nothing is measured.
"""

import argparse
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from compare_figures import figures
from compare_report import losses

from sglang_tknp.launch.planner.plotting import compose, draw_figure, saved, styled
from sglang_tknp.launch.planner.report import inline_svg
from sglang_tknp.launch.planner.series import Figure

RESULTS = Path(__file__).parent / "results"
TEMPLATE = Path(__file__).parent / "compare_page.html.j2"


def render(found: Mapping[str, Any]) -> str:
    """The page; escaped, without scripts or network."""
    import jinja2

    loader = jinja2.FileSystemLoader(TEMPLATE.parent)
    page = jinja2.Environment(loader=loader, autoescape=True, trim_blocks=True)
    plots = {slug_of(s): [inline(f) for f in figures(s, slug_of(s))] for s in found["studies"]}
    template = page.get_template(TEMPLATE.name)
    return template.render(found=found, plots=plots, slug_of=slug_of, losses=losses)


def inline(figure: Figure) -> dict[str, str]:
    with styled(figure.name):
        svg = saved(compose(figure, title=False), "svg").decode()
    return {"title": figure.title, "svg": inline_svg(svg, figure.name, figure.title)}


def slug_of(study: Mapping[str, Any]) -> str:
    return "compare-" + "".join(c if c.isalnum() else "-" for c in study["name"].lower())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, default=RESULTS / "compare.json")
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args()
    found = json.loads(args.json.read_text())
    args.out.mkdir(parents=True, exist_ok=True)
    page = args.out / f"{args.json.stem}.html"
    page.write_text(render(found), encoding="utf-8")
    written = [page]
    for study in found["studies"]:
        for figure in figures(study, slug_of(study)):
            written += draw_figure(figure, args.out)
    print("written:", *written)


if __name__ == "__main__":
    main()
