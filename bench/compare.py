"""TKNP beside DP, TP and PP: same model, same ranks, same memory, same requests, one run.

    python bench/compare.py [--quick] [--systems tknp dp tp pp] [--rounds 3]

Starts each system's server in turn, sends it the points of compare_workloads.py with SGLang's own
client, and writes bench/results/compare.json; `python bench/compare_page.py` makes plots and a
page of it. Three studies: the toy that has the paper's ratios (compare_toy.py); the same bytes in
two KV heads, which TP can split; and SmolLM2, whose attention decides early. In each, systems take
turns in rounds, so that a change of the machine meets all.
"""

import argparse
import json
import platform
import signal
import sys
import tempfile
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

from compare_machine import measure
from compare_own import OwnModel, about_toy, own_model, own_points
from compare_predict import expected_kv_tokens, predictions
from compare_report import print_ratios, print_report
from compare_results import agreement, medians
from compare_run import RunError, Server, run_system
from compare_systems import NAMES, Pool, Settings, server_env, server_flags, why_not
from compare_toy import SMOLLM2, Toy, empty, prepare_toy, ratios, split_heads
from compare_workloads import CONTEXTS, Point, edge_of, plan
from exchange import machine

from sglang_tknp import compat
from sglang_tknp.launch.models import default_cache_dir, prepare_smollm2
from sglang_tknp.launch.quickstart import bypass_proxies, check_port, end_orderly

RESULTS = Path(__file__).parent / "results"


@dataclass(frozen=True)
class Study:
    """One model, the systems that serve it, and what they are asked."""

    name: str
    toy: Toy | OwnModel
    model: Path
    systems: tuple[str, ...]
    points: tuple[Point, ...]
    rounds: int
    predicted: bool = False  # by the simulator


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--quick", action="store_true", help="the toy alone, three points, a round")
    parser.add_argument("--systems", nargs="+", choices=NAMES, default=list(NAMES))
    parser.add_argument("--rounds", type=int, help="of the headline points (3; --quick: 1)")
    parser.add_argument("--nodes", type=int, default=2)
    parser.add_argument("--ranks-per-node", type=int, default=1)
    own = parser.add_argument_group("your own model, on the memory that there is (GPUs too)")
    own.add_argument("--model-path", type=Path, help="a dense checkpoint on this machine")
    own.add_argument("--input-len", type=int, default=8192)
    own.add_argument("--output-len", type=int, default=256)
    own.add_argument("--concurrency", type=int, nargs="+", default=[4, 16, 64])
    parser.add_argument("--matmul", default="medium", help="torch's precision of dense products")
    parser.add_argument("--admission", choices=("whole", "stock"), default="whole")
    parser.add_argument("--dp-balance", default="auto", help="DP's --load-balance-method")
    parser.add_argument("--studies", nargs="+", help="only these, by name (toy, SmolLM2-135M, ...)")
    parser.add_argument("--only", nargs="+", help="only points with one of these names")
    parser.add_argument("--port", type=int, default=30175)
    parser.add_argument(
        "--again",
        action="store_true",
        help="no server: measure the machine's parts anew for the JSON that is there, and predict",
    )
    parser.add_argument("--out", type=Path, help="default: bench/results/compare.json")
    args = parser.parse_args()
    args.rounds = args.rounds or (1 if args.quick else 3)
    name = "compare-quick.json" if args.quick else "compare.json"
    args.out = args.out or RESULTS / name
    return args


def studies(args: argparse.Namespace) -> list[Study]:
    all_of = tuple(args.systems)
    if args.model_path:
        model = own_model(args.model_path, args.input_len, args.output_len)
        asked = own_points(model, args.concurrency, args.rounds)
        return [Study(model.model.name, model, args.model_path, all_of, asked, args.rounds)]
    toy, cache = Toy(), default_cache_dir()
    points = plan(toy, args.nodes, args.quick, args.rounds)
    found = [Study("toy", toy, prepare_toy(toy, cache), all_of, tuple(points), args.rounds, True)]
    if not args.quick:
        heads = split_heads(toy)
        some = tuple(name for name in all_of if name in ("tknp", "tp"))
        model = prepare_toy(heads, cache)
        edge = edge_of(heads, args.nodes, CONTEXTS[1], args.rounds)
        found.append(Study("toy, two KV heads", heads, model, some, (edge,), args.rounds))
        some = tuple(name for name in all_of if name in ("tknp", "dp", "pp"))
        edge = edge_of(SMOLLM2, args.nodes, CONTEXTS[0], 1)
        found.append(Study("SmolLM2-135M", SMOLLM2, prepare_smollm2(), some, (edge,), 1))
    if args.studies:
        found = [study for study in found if study.name in args.studies]
    if args.only:
        kept = [(s, tuple(p for p in s.points if p.name in args.only)) for s in found]
        found = [replace(study, points=points) for study, points in kept if points]
    return found


def pool_of(args: argparse.Namespace) -> Pool:
    return Pool(nodes=args.nodes, ranks_per_node=args.ranks_per_node)


def run_study(args: argparse.Namespace, study: Study) -> dict[str, Any]:
    """Every system's starts, each with its runs; or why it was not started."""
    pool, cpu = pool_of(args), compat.cpu_platform_active()
    reasons = {name: why_not(name, pool, study.toy, cpu) for name in study.systems}
    found: dict[str, Any] = {n: {"not_run": reason, "starts": []} for n, reason in reasons.items()}
    order = [name for name in study.systems if reasons[name] is None]
    for number in range(study.rounds):
        wanted = [point for point in study.points if point.repeats > number]
        turn = number % len(order)
        for name in [*order[turn:], *order[:turn]]:
            print(f"{study.name}, round {number + 1}: {name}, {len(wanted)} points", flush=True)
            found[name]["starts"].append(run_once(args, study, name, pool, wanted))
    return found


def empty_steps(args: argparse.Namespace, study: Study) -> dict[str, dict[str, float]]:
    """Milliseconds of a step of a model that does nothing: system -> requests at once -> median."""
    assert isinstance(study.toy, Toy)
    toy, pool = empty(study.toy), pool_of(args)
    model = prepare_toy(toy, default_cache_dir())
    context = headline(study).context
    most = edge_of(study.toy, args.nodes, context, 1).requests
    points = [Point("fixed", n, context=context) for n in (2 * args.nodes, most)]
    cpu, found = compat.cpu_platform_active(), {}
    for name in study.systems:
        if why_not(name, pool, study.toy, cpu) is None:
            print(f"{study.name}, a model that does nothing: {name}", flush=True)
            hollow = replace(study, toy=toy, model=model)
            start = run_once(args, hollow, name, pool, points, lengths_of=study.toy)
            found[name] = {
                str(run["point"]["requests"]): run["summary"]["itl_ms"]["p50"]
                for run in start["runs"]
            }
    return found


def run_once(
    args: argparse.Namespace,
    study: Study,
    name: str,
    pool: Pool,
    points: list[Point],
    lengths_of: Toy | None = None,
) -> dict[str, Any]:
    """One start of one system."""
    settings = Settings(
        model=study.model,
        device_memory_gb=(lengths_of or study.toy).device_memory_gb(),
        context_length=study.toy.context_length,
        matmul=args.matmul,
        admission=args.admission,
        dp_balance=args.dp_balance,
    )
    flags = server_flags(name, pool, settings)
    env = server_env(name, settings, [path for path in sys.path if path.endswith(".site")])
    with tempfile.TemporaryDirectory() as folder:
        server = Server(args.port, Path(folder))
        try:
            start = run_system(flags, env, points, lengths_of or study.toy, study.model, server)
        except RunError as error:
            sys.exit(f"{name}: {error}")
    named = [study.model.name if flag == str(study.model) else flag for flag in flags]
    return {"flags": named, **start}


def results(
    study: Study, found: dict[str, Any], nodes: int, hollow: dict[str, dict[str, float]]
) -> dict[str, Any]:
    ran = {name: one["starts"] for name, one in found.items() if one["starts"]}
    reference = "dp" if "dp" in ran else next(iter(ran))
    runs = [
        {"system": name, "round": number, **run}
        for name, starts in ran.items()
        for number, start in enumerate(starts)
        for run in start["runs"]
    ]
    toy = study.toy if isinstance(study.toy, Toy) else None
    systems: dict[str, Any] = {
        name: {
            "not_run": one["not_run"],
            "expected_kv_tokens": expected_kv_tokens(toy, name, nodes) if toy else None,
        }
        for name, one in found.items()
    }
    for name, starts in ran.items():
        systems[name] |= {
            "flags": starts[0]["flags"],
            "kv_tokens": starts[0]["kv_tokens"],
            "start_seconds": [start["start_seconds"] for start in starts],
            "agreement": agreement(starts[0]["greedy"], ran[reference][0]["greedy"]),
        }
    about = {"name": study.name, "toy": about_toy(study.toy), "agreement_with": reference}
    machine_does = measure(toy, headline(study).context) if toy else {}
    whole = {
        **about,
        "ratios": ratios(toy, nodes, CONTEXTS, machine_does) if toy else [],
        "machine_does": machine_does,
        "empty_step_ms": hollow,
        "systems": systems,
        "medians": medians(runs),
        "runs": runs,
    }
    return {**whole, "predictions": predictions(whole, toy, nodes) if hollow and toy else []}


def predict_again(found: dict[str, Any]) -> None:
    """Machine, ratios and predictions of every toy, from what its runs left in the JSON."""
    for study in found["studies"]:
        points = {run["point"]["name"]: run["point"] for run in study["runs"]}
        if "hidden" not in study["toy"]:
            continue
        toy, fixed = Toy(**study["toy"]), [p for p in points.values() if p["kind"] == "fixed"]
        context = max(fixed, key=lambda p: (p["repeats"], p["requests"]))["context"]
        study["machine_does"] = measure(toy, context)
        study["ratios"] = ratios(toy, found["nodes"], CONTEXTS, study["machine_does"])
        if study["empty_step_ms"]:
            study["predictions"] = predictions(study, toy, found["nodes"])


def headline(study: Study) -> Point:
    """What takes part in the most rounds, with the most requests."""
    fixed = [point for point in study.points if point.kind == "fixed"]
    return max(fixed, key=lambda point: (point.repeats, point.requests))


def main() -> None:
    args = parse_args()
    if args.again:
        again = json.loads(args.out.read_text())
        predict_again(again)
        args.out.write_text(json.dumps(again, indent=1) + "\n")
        print_report(again)
        return
    signal.signal(signal.SIGTERM, end_orderly)  # or its server would stay
    bypass_proxies()
    check_port(args.port)
    found: dict[str, Any] = {
        "command": " ".join(["python", *sys.argv]),
        "machine": machine(),
        "versions": {
            "python": platform.python_version(),
            **{name: version(name) for name in ("torch", "sglang", "sglang-tknp")},
        },
        "nodes": args.nodes,
        "studies": [],
    }
    if not args.model_path:
        print_ratios(ratios(Toy(), args.nodes, CONTEXTS))
    for study in studies(args):
        hollow = empty_steps(args, study) if study.predicted else {}
        found["studies"].append(results(study, run_study(args, study), args.nodes, hollow))
        args.out.write_text(json.dumps(found, indent=1) + "\n")  # what is there is kept
    print_report(found)
    print(f"written: {args.out}")


if __name__ == "__main__":
    main()
