"""What can this machine do? The constants of a hardware file for the planner, measured.

    python bench/hardware.py [--device cpu|cuda] [--parts kernels network]

On a CPU: one thread on one core, as the product pins a rank; two gloo processes for the network,
on this host's loopback. Attention is SGLang's torch_native backend, products and FP8 are those of
the CPU platform, elementwise operations are SGLang's modules. Neither ranks nor nodes share
memory bandwidth here: others keep still. Of every point the fastest of two rounds counts, and in
a round the fastest quarter: other work on the cores only makes times longer. Three minutes.

With --device cuda, one GPU's kernels in CUDA graphs, no network. NOT RUN ON A GPU YET.

`step_overhead` is no kernel's: it is read from the recorded profile of bench/step.py (scheduler,
inputs, the rest of TKNP, and what the logits take beside their product), batch 4, SmolLM2.
JSON goes to bench/results/hardware.json, for `sglang-tknp calibrate --bench`.
"""

import argparse
import datetime
import json
import os
import platform
import statistics
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import hardware_kernels as kernels
import hardware_network as network
import numpy as np
import torch
from exchange import machine

from sglang_tknp.launch.planner.nccl_fit import Line, fit_line, weighted_fit

RESULTS = Path(__file__).parent / "results"
PARTS = ("kernels", "network")
ROUNDS = 2
READING_ROWS, COMPUTING_ROWS = (1, 2, 4), (64, 128)
BATCHES, CONTEXTS = (1, 2, 4, 8), (128, 512, 2048)
Constants = dict[str, dict[str, Any]]


def constant(unit: str, factor: float, values: tuple[float, float, float], how: str) -> Any:
    """In the hardware file's unit; without a range where no single point gives another value."""
    value, low, high = (float(f"{number / factor:.4g}") for number in values)
    span = {"low": low, "high": high} if low < high else {}
    return {"value": value, **span, "unit": unit, "how": how}


def spread(values: list[float], value: float | None = None) -> tuple[float, float, float]:
    middle = statistics.median(values) if value is None else value
    return middle, min([middle, *values]), max([middle, *values])


def fastest(rounds: list[Any]) -> Any:
    """Of several rounds' points in the same order, each with its least time."""
    if isinstance(rounds[0][0], dict):
        return [min(same, key=lambda row: row["seconds"]) for same in zip(*rounds, strict=True)]
    return [min(same) for same in zip(*rounds, strict=True)]


def measure_kernels(device: str, points: dict[str, Any]) -> Constants:
    speeds = [
        max(s) for s in zip(*(kernels.read_bandwidth(device) for _ in range(ROUNDS)), strict=True)
    ]
    bandwidth = max(speeds)
    points["read"] = speeds
    found = {
        "memory_bandwidth": constant(
            "GB/s",
            1e9,
            (bandwidth, min(speeds), bandwidth),
            "512 MiB read once, the best of 3 ways",
        )
    }
    found |= measure_products(device, bandwidth, points)
    found |= measure_attention(device, bandwidth, points)
    rows = fastest([kernels.elementwise(device, (1, 2, 4, 8, 32, 128)) for _ in range(ROUNDS)])
    points["elementwise"] = rows
    line = fit_line(*columns(rows, "bytes"))
    thirds = tuple(latency / 3 for latency in line.latency)
    how = f"a layer's 2 norms, rotary and activation, 1 to 128 rows, {line.error:.0%} median error"
    found["elementwise_fixed"] = constant("us", 1e-6, thirds, f"a third of what starts {how}")
    found["elementwise_bandwidth"] = constant("GB/s", 1e9, line.bandwidth, how)
    return found


def columns(rows: list[dict[str, float]], *names: str) -> list[np.ndarray]:
    return [np.array([row[name] for row in rows], dtype=float) for name in (*names, "seconds")]


def measure_products(device: str, bandwidth: float, points: dict[str, Any]) -> Constants:
    sizes = (*READING_ROWS, *COMPUTING_ROWS)
    wide = fastest([kernels.products(device, sizes) for _ in range(ROUNDS)])
    sizes = (READING_ROWS[0], COMPUTING_ROWS[-1])
    narrow = fastest([kernels.products(device, sizes, fp8=True) for _ in range(ROUNDS)])
    points["products_16bit"], points["products_8bit"] = wide, narrow
    line = fit_line(*columns([row for row in wide if row["rows"] in READING_ROWS], "bytes"))
    how = f"products of SmolLM2 and Llama 8B, 1 to 4 rows, {line.error:.0%} median error"
    found = {"gemm_fixed": constant("us", 1e-6, line.latency, how)}
    start = line.latency[0]
    for bits, rows in ((16, wide), (8, narrow)):
        reading = [part_of(row["bytes"], row, start, bandwidth) for row in rows if row["rows"] == 1]
        value = line.bandwidth[0] / bandwidth if bits == 16 else None
        found[f"gemm_efficiency_{bits}bit"] = constant(
            "ratio", 1, spread(reading, value and min(1.0, value)), f"{how}, range over the shapes"
        )
        computing = [
            part_of(2 * row["rows"] * row["n"] * row["k"], row, start, 1.0, 1e99)
            for row in rows
            if row["rows"] in COMPUTING_ROWS
        ]
        found[f"compute_{bits}bit"] = constant(
            "TFLOP/s", 1e12, spread(computing), "the same shapes at 64 and 128 rows, median"
        )
    return found


def part_of(
    work: float, row: dict[str, float], start: float, peak: float, most: float = 1.0
) -> float:
    """Work per second over the peak; a product quicker than `start` alone counts in full."""
    return min(most, work / max(row["seconds"] - start, row["seconds"] / 2) / peak)


def measure_attention(device: str, bandwidth: float, points: dict[str, Any]) -> Constants:
    rows = fastest([kernels.attention(device, BATCHES, CONTEXTS) for _ in range(ROUNDS)])
    points["attention"] = rows
    batch, size, taken = columns(rows, "batch", "bytes")
    terms = np.stack([np.ones_like(batch), batch, size], axis=1)
    fixed, request, byte = weighted_fit(terms, taken)
    errors = np.abs(terms @ [fixed, request, byte] / taken - 1)
    how = (
        f"SmolLM2's heads, batch {BATCHES[0]} to {BATCHES[-1]}, {CONTEXTS[0]} to {CONTEXTS[-1]} "
        f"tokens, {np.median(errors):.0%} median error"
    )
    reading = np.maximum(taken - fixed - request * batch, taken / 4)
    shares = np.minimum(1.0, size / reading / bandwidth)
    small = byte * size < taken / 2  # where reading is not the most of it
    requests = ((taken - byte * size) / batch)[small]
    return {
        "attention_fixed": constant("us", 1e-6, (fixed, 0.0, max([fixed, *requests])), how),
        "attention_per_request": constant("us", 1e-6, spread([*requests], request), how),
        "attention_efficiency": constant(
            "ratio", 1, spread([*shares], min(1.0, 1 / byte / bandwidth)), how
        ),
    }


def measure_network(points: dict[str, Any]) -> Constants:
    rounds = [network.collectives() | {"exchange": network.exchanges()} for _ in range(ROUNDS)]
    points |= {name: fastest([found[name] for found in rounds]) for name in rounds[0]}
    reduce, message, exchanged = (
        fit_line(*np.array(points[name], dtype=float).T)
        for name in ("all_reduce", "message", "exchange")
    )
    on = "2 gloo processes on one host's loopback"
    nothing = (0.0, 0.0, 0.0)
    whole = "all of the latency: gloo goes in rounds, one per doubling"
    return {
        **pair("node_allreduce", reduce, f"all-reduce, {on}"),
        **pair("cross_allreduce", reduce, f"all-reduce, {on}"),
        "cross_allreduce_latency": constant("us", 1e-6, nothing, f"{whole}; {on}"),
        "cross_allreduce_doubling": constant("us", 1e-6, reduce.latency, f"{whole}; {on}"),
        **pair("message", message, f"half of a ping-pong, {on}"),
        "exchange_latency": constant(
            "us", 1e-6, exchanged.latency, f"half of a layer's exchange, product code, {on}"
        ),
    }


def pair(name: str, line: Line, what: str) -> Constants:
    how = f"{what}, {line.points} sizes, {line.error:.0%} median error"
    return {
        f"{name}_latency": constant("us", 1e-6, line.latency, how),
        f"{name}_bandwidth": constant("GB/s", 1e9, line.bandwidth, how),
    }


def step_overhead(found: Constants) -> Constants:
    """From bench/step.py's profile: what is no kernel of a layer, on either node."""
    profile = json.loads((RESULTS / "step.json").read_text())["profile"]["results"]
    rate = found["gemm_efficiency_16bit"]["value"] * found["memory_bandwidth"]["value"] * 1e9
    head = (
        49152 * kernels.HIDDEN * kernels.DTYPE.itemsize / rate
        + 1e-6 * (found["gemm_fixed"]["value"])
    )
    steps = [
        (node["scheduler"] + node["inputs"] + node["host"] + node["logits"]) * 1e-3 - head
        for nodes in profile.values()
        for node in nodes
    ]
    how = (
        "bench/results/step.json, profile: scheduler, inputs, the rest of TKNP, and logits less "
        f"their product ({head * 1e3:.1f} ms); SmolLM2, 2 nodes, batch 4, contexts 128 to 4,096"
    )
    return {"step_overhead": constant("us", 1e-6, spread(steps), how)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    args = parser.parse_args()
    host = machine()  # before this process keeps to one core
    load = [os.getloadavg()[0]]
    points: dict[str, Any] = {}
    found: Constants = {}
    if "network" in args.parts and args.device == "cpu":
        found |= measure_network(points)
    if "kernels" in args.parts:
        if args.device == "cpu":
            os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
            torch.set_num_threads(1)
        with torch.inference_mode():
            found |= measure_kernels(args.device, points)
        if args.device == "cpu":
            found |= step_overhead(found)
    if args.device == "cuda":
        host = {"gpu": torch.cuda.get_device_name(), **host}
    report = {
        "command": " ".join(["python", *sys.argv]),
        "date": datetime.date.today().isoformat(),
        "machine": host,
        "versions": {
            "python": platform.python_version(),
            **{name: version(name) for name in ("torch", "sglang", "sglang-tknp")},
        },
        "load_average": [*load, os.getloadavg()[0]],  # before and after; 0 is a quiet machine
        "constants": found,
        "points": points,
    }
    print("| constant | value | low | high | unit | how |\n|---|---|---|---|---|---|")
    for name, c in found.items():
        numbers = " | ".join(f"{c.get(key, c['value']):g}" for key in ("value", "low", "high"))
        print(f"| {name} | {numbers} | {c['unit']} | {c['how']} |")
    RESULTS.mkdir(exist_ok=True)
    file = RESULTS / "hardware.json"
    file.write_text(json.dumps(report, indent=1) + "\n")
    print(f"written: {file}")


if __name__ == "__main__":
    main()
