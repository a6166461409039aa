"""`sglang-tknp validate`, `figures` and `report`."""

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from sglang_tknp.launch.planner import figures, hardware, validate_aic
from sglang_tknp.launch.planner.cli_plan import progress
from sglang_tknp.launch.planner.misses import misses
from sglang_tknp.launch.planner.paper_pools import (
    TKNP_OVER_DP,
    check_paper_pool,
    fit_exchange_latency,
)
from sglang_tknp.launch.planner.published import HOLDS, Check, Miss, between
from sglang_tknp.launch.planner.validate import checks
from sglang_tknp.tables import table

PAPER = "h100-paper"


def add_commands(commands: Any) -> None:
    validate = commands.add_parser(
        "validate",
        help="the paper's numbers beside what is computed here",
        description="Exit code 1 if a number lies outside its tolerance. The known misses, which "
        "no constants mend, are listed and do not count.",
    )
    validate.add_argument("--hardware", default=PAPER, help=f"a hardware file ({PAPER})")
    validate.add_argument(
        "--fit", action="store_true", help="fit the one constant anew, and print it; no table"
    )
    validate.add_argument("--json", action="store_true", help="one JSON object")
    validate.set_defaults(run=run_validate)
    figures = commands.add_parser(
        "figures",
        help="the paper's figures as simulated: PNG, SVG and CSV, the same bytes each time",
    )
    figures.add_argument("--hardware", default=PAPER, help=f"a hardware file ({PAPER})")
    figures.add_argument("--only", help="numbers of figures, for example 8,11 (all)")
    figures.add_argument("--output-dir", "-o", default="figures", help="folder to write (figures)")
    figures.add_argument("--json", action="store_true", help="the files written, as JSON")
    figures.set_defaults(run=run_figures)


def run_validate(args: argparse.Namespace) -> int:
    machine = hardware.load(args.hardware)
    check_paper_pool(machine)
    if args.fit:
        latency = fit_exchange_latency(machine)
        text = f"exchange_latency = {latency:g} us gives TKNP over DP = {TKNP_OVER_DP:g}"
        print(json.dumps({"exchange_latency": latency}) if args.json else text)
        return 0
    measured, not_run = _measured_steps()
    found, missed = [*checks(machine), *measured], list(misses(machine))
    failed = [check for check in found if not check.passes]
    if args.json:
        print(json.dumps({**_json(machine, found, missed), "not_run": not_run}, indent=2))
    else:
        lines = [*_checks(found), *([not_run] if not_run else [])]
        print("\n".join([*_head(machine), "", *lines, "", *_misses(missed)]))
    if failed:
        ids = ", ".join(dict.fromkeys(check.id for check in failed))
        sys.stderr.write(f"sglang-tknp: outside their tolerance: {ids}\n")
    return 1 if failed else 0


def _measured_steps() -> tuple[list[Check], str | None]:
    """X1, where the package with the measurements is installed, or why it did not run."""
    try:
        rows = validate_aic.compare()
    except ModuleNotFoundError as missing:
        return [], f"not run: {missing}"
    claim = f"mean error of {len(rows)} measured decode steps, Llama 3.1 70B on H100"
    error = validate_aic.mean_error(rows)
    source = f"{validate_aic.PACKAGE} {validate_aic.VERSION}"
    return [between("X1", claim, "0", error, 0, validate_aic.TOLERANCE, source)], None


def run_figures(args: argparse.Namespace) -> int:
    machine = hardware.load(args.hardware)
    check_paper_pool(machine)
    only = args.only.split(",") if args.only else None
    if not args.json:
        print(figures.provenance(machine))
    with progress(True, len(only or figures.FIGURES), "figure") as bar:
        files = figures.draw(
            Path(args.output_dir), machine, only, lambda name: bar.update() if bar else None
        )
    names = [str(file) for file in files]
    print(json.dumps(names, indent=2) if args.json else f"wrote {', '.join(names)}")
    return 0


def _head(machine: hardware.Hardware) -> list[str]:
    return [
        "assumed",
        f"  hardware  {machine.name}: {machine.description}",
        f"  fitted    {'; '.join(machine.fitted()) or 'nothing'}",
        f"  presets   {', '.join(f'{k} = {v}' for k, v in machine.presets.items()) or 'none'}",
        "  published numbers are the paper's; Nemotron's FP8 recipe is assumed to be Llama's",
    ]


def _checks(found: Sequence[Check]) -> list[str]:
    header = ["", "claim", "published", "computed", "error", "tolerance", "", "source"]
    rows = [header]
    for check in found:
        error = "" if check.error is None else f"{check.error:+.1%}"
        if check.tolerance == HOLDS:
            computed = "holds" if check.passes else "does not hold"
        else:
            computed = f"{check.computed:.6g}"
        verdict = ("fitted" if check.fitted else "ok") if check.passes else "OUTSIDE"
        cells = (check.claim, check.published, computed, error, check.tolerance, verdict)
        rows.append([check.id, *cells, check.source])
    return table(rows, left=(0, 1, 6, 7))


def _misses(found: Sequence[Miss]) -> list[str]:
    rows = [["known miss", "published", "computed", "why"]]
    rows += [[miss.claim, miss.published, miss.computed, miss.why] for miss in found]
    return table(rows, left=(0, 1, 2, 3))


def _json(
    machine: hardware.Hardware, found: Sequence[Check], missed: Sequence[Miss]
) -> dict[str, Any]:
    return {
        "hardware": machine.name,
        "fitted": machine.fitted(),
        "checks": [{**asdict(check), "passes": check.passes} for check in found],
        "known_misses": [asdict(miss) for miss in missed],
    }
