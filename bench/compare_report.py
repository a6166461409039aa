"""What a terminal shows of a comparison; a function of its JSON alone."""

from collections.abc import Mapping, Sequence
from typing import Any

from compare_results import crossover

Found = Mapping[str, Any]


def print_ratios(rows: Sequence[Found]) -> None:
    print("\n| | paper | toy |\n|---|---|---|")
    for row in rows:
        print(f"| {row['what']} | {row['paper']} | {row['toy']} |")


def print_report(found: Found) -> None:
    for study in found["studies"]:
        print(f"\n== {study['name']}")
        print_ratios(study["ratios"])
        print_systems(study)
        print_points(study)
        print_ratios_to_tknp(study)
        print_predictions(study)


def print_predictions(study: Found) -> None:
    print("\n| point | system | tokens/s | simulated | error |\n|---|---|---|---|---|")
    for one in study["predictions"]:
        print(
            f"| {one['point']} | {one['system']} | {one['measured']:.1f} | {one['predicted']:.1f} "
            f"| {one['error']:+.0%} |"
        )


def print_systems(found: Found) -> None:
    print("\n| system | KV tokens of each part | pool | planned | greedy outputs equal |")
    print("|---|---|---|---|---|")
    for name, one in found["systems"].items():
        if one["not_run"]:
            print(f"| {name} | not run: {one['not_run']} | | {one['expected_kv_tokens']} | |")
            continue
        same = one["agreement"]
        differ = same["first_difference"]
        print(
            f"| {name} | {one['kv_tokens']} | {sum(one['kv_tokens'])} "
            f"| {one['expected_kv_tokens']} | {same['equal']} of {same['outputs']}"
            f"{f', the others up to token {differ}' if differ else ''} |"
        )


def print_points(found: Found) -> None:
    print("\nmedians; wait and completion in s, ITL in ms, prefill: share of the time, worst rank")
    head = "point | system | runs | tokens/s | wait | completion p50 p95 p99 | ITL p50 p95 p99"
    print(f"| {head} | SLO | peak resident, per owner | prefill |\n{'|---' * 10}|")
    for one in sorted(found["medians"], key=lambda entry: entry["point"]):
        completion = " ".join(f"{one['completion'][p]:.1f}" for p in ("p50", "p95", "p99"))
        itl = " ".join(f"{one['itl_ms'][p]:.0f}" for p in ("p50", "p95", "p99"))
        owners = [int(n) for n in one["peak_resident_per_owner"].values()]
        print(
            f"| {one['point']} | {one['system']} | {one['runs']} | {one['throughput']:.1f} "
            f"| {one['queue_wait']:.1f} | {completion} | {itl} | {one['slo_attainment']:.0%} "
            f"| {one['peak_resident']:.0f} {owners} | {one['prefill_share']:.0%} |"
        )


def ratios_to_tknp(found: Found) -> dict[str, dict[str, float]]:
    """TKNP's throughput over each other system's, by point; below 1 it loses."""
    by_point: dict[str, dict[str, float]] = {}
    for one in found["medians"]:
        by_point.setdefault(one["point"], {})[one["system"]] = one["throughput"]
    return {
        point: {n: systems["tknp"] / speed for n, speed in systems.items() if n != "tknp"}
        for point, systems in by_point.items()
        if "tknp" in systems
    }


def losses(found: Found) -> str:
    """Where TKNP is slower than another system, and by how much."""
    return "; ".join(
        f"{point} to {', '.join(f'{name} ({ratio:.2f})' for name, ratio in lost.items())}"
        for point, ratios in ratios_to_tknp(found).items()
        if (lost := {name: ratio for name, ratio in ratios.items() if ratio < 1})
    )


def print_ratios_to_tknp(found: Found) -> None:
    print("\nTKNP's completion throughput over the others'")
    for point, ratios in ratios_to_tknp(found).items():
        print(f"  {point}: {', '.join(f'{name} {ratio:.2f}' for name, ratio in ratios.items())}")
    print(f"  TKNP loses: {losses(found) or 'nowhere in these points'}")
    for context, sweep in sweeps(found).items():
        print(f"  crossover with DP at {context // 1024}K: {crossover(sweep) or 'none'} requests")


def sweeps(found: Found) -> dict[int, list[dict[str, Any]]]:
    """Fixed lengths, all at once: context -> (system, requests, throughput)."""
    points = {run["point"]["name"]: run["point"] for run in found["runs"]}
    groups: dict[int, list[dict[str, Any]]] = {}
    for one in found["medians"]:
        point = points[one["point"]]
        if point["kind"] == "fixed":
            entry = {name: one[name] for name in ("system", "throughput")}
            groups.setdefault(point["context"], []).append({**entry, "requests": point["requests"]})
    return groups
