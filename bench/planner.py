"""How long do a simulation and a plan take, on one core?

    python bench/planner.py [--repeats 20]

The paper's burst of 128 requests of 32K on 4 nodes of 8 GPUs, 10,000 mixed requests at 4 per second
on 64 GPUs, and the whole plan of the burst: every layout in every scenario. Reading the model and
making the trace are not counted. JSON goes to bench/results/planner.json.
"""

import argparse
import json
import os
import platform
import statistics
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path

from exchange import machine

from sglang_tknp.launch.planner import hardware, trace
from sglang_tknp.launch.planner.compare import build
from sglang_tknp.launch.planner.paper_pools import LLAMA, Pools
from sglang_tknp.launch.planner.plan import make_plan
from sglang_tknp.launch.planner.recommend import Workload
from sglang_tknp.launch.planner.simulate import Simulation

RESULTS = Path(__file__).parent / "results" / "planner.json"
LIMITS = {"simulate 128": 0.010, "simulate 10,000": 5.0}  # seconds


def seconds(work: Callable[[], object], repeats: int) -> list[float]:
    """Processor time of each of `repeats` runs, after one that is not counted."""
    found = []
    for _ in range(repeats + 1):
        start = time.process_time()
        work()
        found.append(time.process_time() - start)
    return found[1:]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=20)
    args = parser.parse_args()
    about = {**machine(), "used": 1}  # before it is left one core
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    pools = Pools(hardware.load("h100-sxm"))
    four, eight = pools.setting(LLAMA, 4), pools.setting(LLAMA, 8)
    burst = trace.fixed(128, 32_768, 1024)
    many = trace.poisson(trace.mixed(10_000, 1), 4, 1)
    workload = Workload(trace=burst, description="burst")
    few = max(1, args.repeats // 5)
    times = {
        "simulate 128": seconds(
            lambda: Simulation(build("tknp", four), burst).simulate(), args.repeats
        ),
        "simulate 10,000": seconds(lambda: Simulation(build("tknp", eight), many).simulate(), few),
        "plan 128": seconds(lambda: make_plan(four, workload), few),
    }
    result = {
        "command": "python bench/planner.py",
        "machine": about,
        "versions": {
            "python": platform.python_version(),
            **{name: version(name) for name in ("numpy", "sglang-tknp")},
        },
        "median_seconds": {name: round(statistics.median(t), 5) for name, t in times.items()},
        "seconds": {name: [round(x, 5) for x in t] for name, t in times.items()},
    }
    RESULTS.write_text(json.dumps(result, indent=1) + "\n")
    for name, found in times.items():
        limit = f" (limit {LIMITS[name] * 1e3:g} ms)" if name in LIMITS else ""
        print(f"{name}: median {statistics.median(found) * 1e3:.1f} ms{limit}")


if __name__ == "__main__":
    main()
