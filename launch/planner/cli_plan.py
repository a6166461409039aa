"""`sglang-tknp plan` and `sglang-tknp simulate`."""

import argparse
import json
import math
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from sglang_tknp.launch.planner import report, results, text
from sglang_tknp.launch.planner.cli_options import (
    add_pool,
    add_workload,
    check_counts,
    setting_of,
    workload_of,
)
from sglang_tknp.launch.planner.commands import Server
from sglang_tknp.launch.planner.compare import LAYOUTS, build, check_name
from sglang_tknp.launch.planner.layouts import Setting
from sglang_tknp.launch.planner.metrics import measure
from sglang_tknp.launch.planner.plan import Plan, make_plan
from sglang_tknp.launch.planner.recommend import Workload
from sglang_tknp.launch.planner.simulate import ANY_LENGTH, ROUTERS, Options, Simulation
from sglang_tknp.shapes import SHAPES

OWNER_POLICIES = ("kv-reserved", "kv-used")
MANY_REQUESTS = 2000  # from here on a progress bar tells that something happens
SLO_MISSED = 3  # exit code


def add_commands(commands: Any) -> None:
    plan = commands.add_parser(
        "plan",
        help="compare all layouts of a pool and recommend one",
        description="Exit code: 0, 1 where nothing fits, "
        f"{SLO_MISSED} where no layout meets the SLO.",
    )
    add_pool(plan)
    add_workload(plan)
    add_controller(plan)
    plan.add_argument("--layouts", help=f"of {', '.join(LAYOUTS)}, dp-tp1, pp2, ... (all)")
    plan.add_argument("--no-bands", action="store_true", help="without the other scenarios")
    plan.add_argument("--json", action="store_true", help="one JSON object: bytes, seconds, tokens")
    plan.set_defaults(run=run_plan)
    page = commands.add_parser("report", help="a plan as one HTML file, without network or scripts")
    add_pool(page)
    add_workload(page)
    add_controller(page)
    page.add_argument("--layouts", help="as for plan")
    page.add_argument("--output", "-o", default="report.html", help="(report.html)")
    page.add_argument("--json", action="store_true", help="the plan as JSON beside it, printed")
    page.set_defaults(run=run_report, no_bands=False)
    simulate = commands.add_parser("simulate", help="serve one trace on one layout, event by event")
    add_pool(simulate)
    add_workload(simulate)
    add_controller(simulate)
    add = simulate.add_argument
    add("--layout", default="tknp", help=f"{', '.join(LAYOUTS)}, dp-tp1, pp2, ... (tknp)")
    add("--output-dir", help="append result.jsonl (SGLang's benchmark) there, write requests.csv")
    add("--tag", help="written to result.jsonl")
    add("--json", action="store_true", help="the line of result.jsonl in place of the table")
    simulate.set_defaults(run=run_simulate)


def add_controller(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("controller, as the server's own flags").add_argument
    add("--tknp-owner-policy", choices=OWNER_POLICIES, default=OWNER_POLICIES[0])
    add("--tknp-max-overtakes", type=int, help="(16 for TKNP, 0 for other layouts)")
    add("--max-running-requests", type=int, help="of a server (no limit)")
    add("--page-size", type=int, default=1, help="KV tokens of a page (1)")
    add(
        "--router",
        choices=ROUTERS,
        default=ROUTERS[0],
        help="between DP replicas; TKNP's controller chooses by KV (round-robin, as SGLang's "
        "decode servers)",
    )


def options_of(args: argparse.Namespace) -> Options:
    check_counts(args, "max_running_requests", "page_size")
    check_counts(args, "tknp_max_overtakes", least=0)
    return Options(
        by_used=args.tknp_owner_policy == OWNER_POLICIES[1],
        max_overtakes=args.tknp_max_overtakes,
        max_running=args.max_running_requests or ANY_LENGTH,
        page_size=args.page_size,
        router=args.router,
    )


def server_of(args: argparse.Namespace) -> Server:
    """What of this command line a server needs too."""
    flags, tknp_flags = [], []
    if args.quantization:
        flags.append(f"--quantization {args.quantization}")
    if args.kv_cache_dtype != "auto":
        flags.append(f"--kv-cache-dtype {args.kv_cache_dtype}")
    if args.page_size != 1:
        flags.append(f"--page-size {args.page_size}")
    if args.max_running_requests is not None:
        flags.append(f"--max-running-requests {args.max_running_requests}")
    if args.tknp_owner_policy != OWNER_POLICIES[0]:
        tknp_flags.append(f"--tknp-owner-policy {args.tknp_owner_policy}")
    if args.tknp_max_overtakes is not None:
        tknp_flags.append(f"--tknp-max-overtakes {args.tknp_max_overtakes}")
    model = "$MODEL" if args.model_path in SHAPES else args.model_path
    return Server(model_path=model, flags=tuple(flags), tknp_flags=tuple(tknp_flags))


def names_of(args: argparse.Namespace) -> list[str] | None:
    return args.layouts.split(",") if args.layouts else None


def plan_of(args: argparse.Namespace, setting: Setting, workload: Workload) -> Plan:
    """Make the plan, with a progress bar where it takes long."""
    with progress(len(workload.trace) >= MANY_REQUESTS, None, "layout") as bar:

        def heard(name: str) -> None:
            if bar is not None:
                bar.set_description(name)
                bar.update()

        return make_plan(
            setting,
            workload,
            names=names_of(args),
            options=options_of(args),
            server=server_of(args),
            bands=not args.no_bands,
            on_progress=heard,
        )


def run_plan(args: argparse.Namespace) -> int:
    setting, workload = setting_of(args), workload_of(args)
    for name in names_of(args) or ():
        check_name(name, setting)
    options_of(args)
    if not args.json:  # first, and before anything takes long
        print("\n".join(text.assumptions(setting, workload)), flush=True)
    plan = plan_of(args, setting, workload)
    print(json.dumps(text.plan_json(plan), indent=2) if args.json else "\n" + text.plan_text(plan))
    return exit_code(plan)


def run_report(args: argparse.Namespace) -> int:
    """Write the page, with a map of those layouts that can be launched."""
    report.check_libraries()
    plan = plan_of(args, setting_of(args), workload_of(args))
    with progress(True, None, "part") as bar:

        def heard(name: str) -> None:
            if bar is not None:
                bar.set_description(name)
                bar.update()

        report.write(
            Path(args.output),
            plan.setting,
            plan.workload.trace,
            [row.outcome for row in plan.rows],
            "\n\n".join(text.verdict(plan)),
            workload=plan.workload.description,
            slo_per_token=plan.workload.slo_per_token,
            names=[
                row.outcome.name
                for row in plan.rows
                if row.launchable is None and row.outcome.layout is not None
            ],
            on_progress=heard,
        )
    print(json.dumps(text.plan_json(plan), indent=2) if args.json else f"wrote {args.output}")
    return exit_code(plan)


def exit_code(plan: Plan) -> int:
    """1 where nothing fits, SLO_MISSED where no layout meets the SLO; the reason on stderr."""
    if not plan.fits:
        sys.stderr.write(f"sglang-tknp: {plan.recommendation.reasons[-1]}\n")
        return 1
    if plan.recommendation.meets_slo is False:
        sys.stderr.write(f"sglang-tknp: {plan.recommendation.reasons[-1]}\n")
        return SLO_MISSED
    return 0


def run_simulate(args: argparse.Namespace) -> int:
    setting, workload, options = setting_of(args), workload_of(args), options_of(args)
    layout = build(args.layout, setting)
    if not args.json:
        print("\n".join(text.assumptions(setting, workload)), end="\n\n")
    sys.stdout.flush()
    simulation = Simulation(layout, workload.trace, options)
    total = len(workload.trace)
    with progress(total >= MANY_REQUESTS, total, "request") as bar:
        run = simulation.simulate(
            (lambda n: bar.update(n - bar.n)) if bar is not None else (lambda n: None)
        )
    metrics = measure(run, workload.slo_per_token)
    line = results.benchmark_line(
        run,
        tag=args.tag,
        request_rate=args.request_rate or math.inf,
        slo_per_token=workload.slo_per_token,
        about=text.about(setting, workload),
    )
    print(json.dumps(line) if args.json else text.metrics_text(layout.title, metrics))
    if args.output_dir:
        files = results.write(Path(args.output_dir), line, run)
        sys.stderr.write(f"sglang-tknp: wrote {' and '.join(map(str, files))}\n")
    if not metrics.completed:
        sys.stderr.write(f"sglang-tknp: nothing fits: {run.requests[0].refused}\n")
        return 1
    return 0


@contextmanager
def progress(wanted: bool, total: int | None, unit: str) -> Iterator[Any]:
    """A progress bar on stderr where that is a terminal, else None."""
    if not wanted or not sys.stderr.isatty():
        yield None
        return
    try:
        from tqdm import tqdm
    except ImportError:  # the planner works without
        yield None
        return
    with tqdm(total=total, unit=f" {unit}", leave=False) as bar:
        yield bar
