"""How much does an idle pool take, and how soon does it start on a request?

    python bench/idle.py [--seconds 20] [--port 30171]

Starts the quick start's pool (SmolLM2, two nodes), leaves it alone, and sums the processor time
of all its processes. Then sends lone one-token requests to the idle pool: the time from the
client's send to the start of the first step (HTTP, tokenizer and controller included, so an upper
bound of the scheduler's part), and SGLang's own queue time at the scheduler. JSON goes to
bench/results/idle.json.
"""

import argparse
import json
import os
import platform
import statistics
import tempfile
import time
import urllib.request
from importlib.metadata import version
from pathlib import Path
from typing import Any

import psutil

from sglang_tknp.launch.models import prepare_smollm2
from sglang_tknp.launch.quickstart import running, server_command, wait_ready

RESULTS = Path(__file__).parent / "results" / "idle.json"


def processor_seconds(root: psutil.Process) -> float:
    total = 0.0
    for process in (root, *root.children(recursive=True)):
        times = process.cpu_times()
        total += times.user + times.system
    return total


def idle_share(pid: int, seconds: float) -> float:
    """Of one core, over all processes of the pool."""
    root = psutil.Process(pid)
    before = processor_seconds(root)
    time.sleep(seconds)
    return (processor_seconds(root) - before) / seconds


def first_step_delays(port: int, count: int) -> list[dict[str, float]]:
    """Milliseconds of `count` lone requests, each to a pool that sleeps."""
    delays = []
    for index in range(count):
        time.sleep(1.2)
        sampling = {"max_new_tokens": 1, "temperature": 0}
        body = {"input_ids": [index + 10, index + 20], "sampling_params": sampling}
        sent = time.time()
        info = post(port, body)["meta_info"]
        delays.append(
            {
                "from_send": (info["forward_entry_time"] - sent) * 1e3,
                "queue": info["queue_time"] * 1e3,
            }
        )
    return delays


def post(port: int, body: Any) -> Any:
    url, data = f"http://127.0.0.1:{port}/generate", json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as reply:
        return json.load(reply)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=20)
    parser.add_argument("--port", type=int, default=30171)
    args = parser.parse_args()
    command = [*server_command(prepare_smollm2(), 2, args.port), "--enable-metrics"]
    with (
        tempfile.NamedTemporaryFile(suffix=".log") as log,
        running(command, Path(log.name)) as pool,
    ):
        wait_ready(pool, args.port, Path(log.name))
        time.sleep(3)
        share = idle_share(pool.pid, args.seconds)
        delays = first_step_delays(args.port, 10)
    result = {
        "command": "python bench/idle.py",
        "machine": {"processor": platform.processor(), "cores": os.cpu_count()},
        "versions": {name: version(name) for name in ("sglang", "sglang-tknp", "torch")},
        "idle_share_of_a_core": round(share, 4),
        "first_step_ms": delays,
    }
    RESULTS.write_text(json.dumps(result, indent=1) + "\n")
    print(f"idle pool of two nodes: {share:.1%} of one core over {args.seconds:g} s")
    for name in ("from_send", "queue"):
        values = sorted(delay[name] for delay in delays)
        median = statistics.median(values)
        print(f"first step, {name}: median {median:.1f} ms, largest {values[-1]:.1f} ms")


if __name__ == "__main__":
    main()
