"""A simulated run in the formats that users already read.

One JSON line with the keys of `python -m sglang.benchmark.serving --output-file --output-details`,
so that the same scripts read both, and a CSV of every request with what that lacks: arrival,
admission, first token, finish and owner.
"""

import csv
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from sglang_tknp.launch.planner.metrics import Intervals, served
from sglang_tknp.launch.planner.simulate import Run, Served

REQUEST_FIELDS = (
    "request",
    "input_tokens",
    "output_tokens",
    "arrival_s",
    "admit_s",
    "first_token_s",
    "finish_s",
    "owner",
    "refused",
)
PERCENTILES = (90, 95, 99)


def benchmark_line(
    run: Run, *, tag: str | None, request_rate: float, slo_per_token: float | None, about: Any
) -> dict[str, Any]:
    """The keys of SGLang's benchmark; what it takes from a server is None or empty.

    Args:
        request_rate: requests per second; infinite for a burst, as in the benchmark.
        slo_per_token: seconds of a whole request per output token; `--goodput e2el:` of the
            benchmark says the same where all outputs are equal.
        about: stands in `server_info`.
    """
    requests = served(run)
    seconds = max((r.finish for r in requests), default=0.0)
    inputs, outputs = (
        sum(r.input_tokens for r in requests),
        sum(r.output_tokens for r in requests),
    )
    line: dict[str, Any] = {
        "tag": tag,
        "backend": f"simulated-{run.layout}",
        "dataset_name": "trace",
        "request_rate": request_rate,
        "max_concurrency": None,
        "sharegpt_output_len": None,
        "random_input_len": None,
        "random_output_len": None,
        "random_range_ratio": None,
        "server_info": about,
        "duration": seconds,
        "completed": len(requests),
        "total_input_tokens": inputs,
        "total_input_text_tokens": inputs,
        "total_input_vision_tokens": 0,
        "total_output_tokens": outputs,
        "total_output_tokens_retokenized": outputs,
        "request_throughput": _per(len(requests), seconds),
        "input_throughput": _per(inputs, seconds),
        "output_throughput": _per(outputs, seconds),
        "total_throughput": _per(inputs + outputs, seconds),
        **_latencies(run, requests),
        "concurrency": _per(sum(r.finish - r.arrival for r in requests), seconds),
        "accept_length": None,
        **_peaks(run, requests),
    }
    if slo_per_token is not None:
        line |= _goodput(run, requests, seconds, slo_per_token)
    return line | _details(run)


def write(folder: Path, line: Mapping[str, Any], run: Run) -> tuple[Path, Path]:
    """Append the line to result.jsonl in `folder`, as the benchmark does; write requests.csv."""
    folder.mkdir(parents=True, exist_ok=True)
    lines, rows = folder / "result.jsonl", folder / "requests.csv"
    with lines.open("a") as file:
        file.write(json.dumps(line) + "\n")
    with rows.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(REQUEST_FIELDS)
        writer.writerows(_row(index, request) for index, request in enumerate(run.requests))
    return lines, rows


def _row(index: int, r: Served) -> tuple[Any, ...]:
    if r.refused:
        return (index, r.input_tokens, r.output_tokens, f"{r.arrival:.6f}", *[""] * 4, r.refused)
    times = (f"{seconds:.6f}" for seconds in (r.arrival, r.admit, r.first, r.finish))
    return (index, r.input_tokens, r.output_tokens, *times, r.owner, "")


def _per(amount: float, seconds: float) -> float:
    return amount / seconds if seconds else 0.0


def _latencies(run: Run, requests: Sequence[Served]) -> dict[str, float]:
    samples = {
        "e2e_latency": [r.finish - r.arrival for r in requests],
        "ttft": [r.first - r.arrival for r in requests],
        "tpot": [
            (r.finish - r.first) / (r.output_tokens - 1) for r in requests if r.output_tokens > 1
        ],
    }
    found: dict[str, float] = {}
    for name, values in samples.items():
        seconds = np.array(values or [0.0])
        found[f"mean_{name}_ms"] = float(seconds.mean()) * 1e3
        found[f"median_{name}_ms"] = float(np.median(seconds)) * 1e3
        found[f"std_{name}_ms"] = float(seconds.std()) * 1e3
        found |= {f"p{p}_{name}_ms": float(np.percentile(seconds, p)) * 1e3 for p in PERCENTILES}
    intervals = Intervals(run)
    found["mean_itl_ms"] = intervals.mean() * 1e3
    found["median_itl_ms"] = intervals.percentile(50) * 1e3
    found["std_itl_ms"] = intervals.std() * 1e3
    return found | {f"p{p}_itl_ms": intervals.percentile(p) * 1e3 for p in PERCENTILES}


def _peaks(run: Run, requests: Sequence[Served]) -> dict[str, float]:
    """Over seconds from the first arrival on, as the benchmark counts them."""
    if not requests:
        return {"max_output_tokens_per_s": 0.0, "max_concurrent_requests": 0}
    release = min(r.arrival for r in requests)
    buckets = int(np.ceil(max(r.finish for r in requests) - release)) + 1
    tokens = np.zeros(buckets)
    for start, piece, rows, _ in run.steps:
        steps = np.arange(1, piece.steps + 1)
        ends = start + steps * piece.first + piece.growth * steps * (steps - 1) / 2
        seconds = np.clip((ends - release).astype(int), 0, buckets - 1)
        tokens += rows * np.bincount(seconds, minlength=buckets)
    changes = np.zeros(buckets + 1, int)
    for r in requests:
        changes[int(r.arrival - release)] += 1
        changes[min(int(r.finish - release) + 1, buckets)] -= 1
    return {
        "max_output_tokens_per_s": float(tokens.max()),
        "max_concurrent_requests": int(np.cumsum(changes).max()),
    }


def _goodput(
    run: Run, requests: Sequence[Served], seconds: float, slo_per_token: float
) -> dict[str, Any]:
    good = sum(r.finish - r.arrival <= slo_per_token * r.output_tokens for r in requests)
    attained = good / len(run.requests) if run.requests else 0.0
    outputs = {r.output_tokens for r in run.requests}
    name, slo = "e2el_per_output_token", slo_per_token * 1e3
    if len(outputs) == 1:
        name, slo = "e2el", slo * outputs.pop()
    return {
        "goodput_slos_ms": {name: slo},
        "request_goodput": _per(good, seconds),
        "slo_attainment": attained,
        "slo_attainment_by_metric": {name: attained},
    }


def _details(run: Run) -> dict[str, Any]:
    """Per request, in the order of the trace; a refused one has no output and its error.

    Every token's interval is in the line's `itl` statistics alone: a list of all is too long.
    """
    requests = run.requests
    return {
        "input_lens": [r.input_tokens for r in requests],
        "output_lens": [0 if r.refused else r.output_tokens for r in requests],
        "ttfts": [0.0 if r.refused else r.first - r.arrival for r in requests],
        "itls": [[] for _ in requests],
        "generated_texts": ["" for _ in requests],
        "errors": [r.refused for r in requests],
        "wanted_output_lens": [r.output_tokens for r in requests],
        "arrivals": [r.arrival for r in requests],
        "queue_times": [0.0 if r.refused else r.wait for r in requests],
        "owners": [r.owner for r in requests],
    }
