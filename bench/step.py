"""What does TKNP add to a decode step: on the host, against stock SGLang, and section by section?

    python bench/step.py [--parts host ratio profile] [--rounds 2] [--keep-awake] [--port 30173]

host     processor time in us that TKNP's own code takes per step and per layer, N = 2, 4, 8
ratio    TKNP's decode step over (stock's step on one core + the same messages sent raw), SmolLM2,
         N=2, T=1, batch 1 and 8, context 64 and 512
         (with --keep-awake: both on cores that idle processes keep from sleeping)
profile  where the time of a step goes, at contexts of 128, 1K and 4K tokens

Each number of host and ratio stands beside its limit; those that miss it are named at the end.
JSON goes to bench/results/step.json, the picture of the profile to docs/step-profile.png.
"""

import argparse
import contextlib
import json
import platform
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import Any

from exchange import machine
from step_host import measure as measure_host
from step_limits import RATIO_LIMIT, host_limits, missed_limits

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "bench" / "results" / "step.json"
PICTURE = ROOT / "docs" / "step-profile.png"
PARTS = ("host", "ratio", "profile")


def host() -> list[dict[str, Any]]:
    found = []
    for nodes in (2, 4, 8):
        found.append({**measure_host(nodes), "limit": host_limits(nodes)})
    print("\nhost work of TKNP, us of processor time, medians of the end node with more")
    print("with peers / alone: the same code in a process that never waits")
    print("| nodes | per step | limit | root, per layer | limit | owner, per layer | limit |")
    print("|---|---|---|---|---|---|---|")
    for row in found:
        cells = [
            f"{row[name]} / {row[name + '_alone']} | {row['limit'][name]}"
            for name in ("step", "root", "owner")
        ]
        print(f"| {row['nodes']} | {' | '.join(cells)} |")
    return found


def ratio(port: int, rounds: int, keep_awake: bool) -> list[dict[str, Any]]:
    from step_pools import CASES, awake_cores, measure_raw, measure_servers

    raw = measure_raw()
    with awake_cores() if keep_awake else contextlib.nullcontext():
        steps = measure_servers(port, rounds)
    print("\nms of a decode step, SmolLM2, N=2, T=1; stock on one core")
    print("| batch | context | TKNP | stock | raw messages | ratio | limit |")
    print("|---|---|---|---|---|---|---|")
    rows = []
    for case in CASES:
        tknp, stock = steps["tknp"][case], steps["stock"][case]
        row = {"batch": case[0], "context": case[1], "tknp": tknp, "stock": stock}
        row |= {"raw": raw[case], "ratio": tknp / (stock + raw[case]), "limit": RATIO_LIMIT}
        rows.append({name: round(value, 3) for name, value in row.items()})
        print(
            f"| {case[0]} | {case[1]} | {tknp:.1f} | {stock:.1f} | {raw[case]:.2f} "
            f"| {row['ratio']:.2f} | {RATIO_LIMIT} |"
        )
    return rows


def profile(port: int) -> Any:
    from step_profile import draw_profile, format_profile, measure_profile

    with tempfile.TemporaryDirectory() as folder:
        found = measure_profile(port, Path(folder))
    print("\n" + format_profile(found))
    draw_profile(found, PICTURE)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--rounds", type=int, default=2, help="starts of each server (ratio)")
    parser.add_argument("--keep-awake", action="store_true", help="cores never sleep (ratio)")
    parser.add_argument("--port", type=int, default=30173)
    args = parser.parse_args()
    found: dict[str, Any] = {}
    if "host" in args.parts:
        found["host"] = host()
    if "ratio" in args.parts:
        name = "ratio_awake" if args.keep_awake else "ratio"
        found[name] = ratio(args.port, args.rounds, args.keep_awake)
    if "profile" in args.parts:
        found["profile"] = profile(args.port)
    write(found)
    missed = list(missed_limits(found))
    print("\n".join(["limits missed:", *missed] if missed else ["no limit is missed"]))


def write(found: dict[str, Any]) -> None:
    """Each part with its own command; a part that was not run keeps its last result."""
    made = {
        "command": " ".join(["python", *sys.argv]),
        "machine": machine(),
        "versions": {
            "python": platform.python_version(),
            **{name: version(name) for name in ("torch", "sglang", "sglang-tknp")},
        },
    }
    parts = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    parts |= {name: {**made, "results": results} for name, results in found.items()}
    RESULTS.write_text(json.dumps(parts, indent=1) + "\n")
    print(f"written: {RESULTS}")


if __name__ == "__main__":
    main()
