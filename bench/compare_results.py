"""Numbers of one run out of SGLang's records, medians of repeats, and whether outputs agree. Pure.

The client's JSON lacks arrivals, waiting and owners. SGLang writes a record for every finished
request (--export-metrics-to-file), with times of the wall clock in seconds: received, taken into
its first step, prefilled, finished; and the rank that served it.
"""

import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

Record = Mapping[str, Any]


def percentiles(values: Sequence[float], wanted: Sequence[int] = (50, 95, 99)) -> dict[str, float]:
    """Nearest rank, so that every number is one that was measured."""
    ordered = sorted(values)
    if not ordered:
        return {}
    rank = {p: max(0, -(-p * len(ordered) // 100) - 1) for p in wanted}
    return {f"p{p}": ordered[index] for p, index in rank.items()}


# Seconds from a request's last step to the end that its record names, which is the tokenizer's.
END_LAG = 0.05


def peak_resident(rows: Iterable[Mapping[str, float]]) -> int:
    """The most requests that held KV at once."""
    return most_at_once((row["start"], max(row["start"], row["finish"] - END_LAG)) for row in rows)


def most_at_once(spans: Iterable[tuple[float, float]]) -> int:
    """The most of these (start, end) that overlap; one that ends makes room for one that starts."""
    events = sorted((time, step) for start, end in spans for time, step in ((start, 1), (end, -1)))
    now = most = 0
    for _, step in events:
        now += step
        most = max(most, now)
    return most


def covered(spans: Iterable[tuple[float, float]]) -> float:
    """Seconds that lie in at least one span."""
    total, reached = 0.0, float("-inf")
    for start, end in sorted(spans):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total


def request_rows(records: Sequence[Record]) -> list[dict[str, float]]:
    """One row per request in order of arrival; seconds from the release of the first one."""
    release = min(record["request_received_ts"] for record in records)
    rows = [
        {
            "arrival": record["request_received_ts"] - release,
            "start": record["forward_entry_time"] - release,
            "prefilled": record["prefill_finished_time"] - release,
            "finish": record["request_received_ts"] + record["e2e_latency"] - release,
            "input": record["prompt_tokens"],
            "output": record["completion_tokens"],
            "owner": record.get("dp_rank") or 0,
            "retractions": record.get("num_retractions", 0),
        }
        for record in records
    ]
    rows = [{name: round(value, 4) for name, value in row.items()} for row in rows]
    return sorted(rows, key=lambda row: row["arrival"])


def summary(
    rows: Sequence[Mapping[str, float]], client: Mapping[str, Any], slo_ms: float
) -> dict[str, Any]:
    """The measures of the paper's section 5, of one run."""
    by_owner = defaultdict(list)
    for row in rows:
        by_owner[int(row["owner"])].append(row)
    duration = max(row["finish"] for row in rows)
    completion = [row["finish"] - row["arrival"] for row in rows]
    waits = [row["start"] - row["arrival"] for row in rows]
    tokens = sum(row["output"] for row in rows)
    prefill = [covered((r["start"], r["prefilled"]) for r in part) for part in by_owner.values()]
    met = [1e3 * time / row["output"] <= slo_ms for time, row in zip(completion, rows, strict=True)]
    itls = [1e3 * itl for request in client["itls"] for itl in request]
    return {
        "throughput": tokens / duration,
        "client_throughput": client["output_throughput"],
        "duration": duration,
        "queue_wait": statistics.mean(waits),
        "completion": {"mean": statistics.mean(completion), **percentiles(completion)},
        "itl_ms": percentiles(itls),
        "slo_attainment": sum(met) / len(met),
        "prefill_share": max(prefill) / duration,
        "retractions": sum(row["retractions"] for row in rows),
        "peak_resident": peak_resident(rows),
        "peak_resident_per_owner": {
            owner: peak_resident(part) for owner, part in sorted(by_owner.items())
        },
    }


def median_of(summaries: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Of every number, by name; with how many runs it is of."""
    found: dict[str, Any] = {}
    for name, first in summaries[0].items():
        values = [each[name] for each in summaries if name in each]
        is_group = isinstance(first, Mapping)
        found[name] = median_of(values) if is_group else round(statistics.median(values), 4)
    return found


def medians(runs: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """One entry per (system, point) of the runs, in their order."""
    groups: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
    for run in runs:
        groups.setdefault((run["system"], run["point"]["name"]), []).append(run["summary"])
    return [
        {"system": system, "point": point, "runs": len(group), **median_of(group)}
        for (system, point), group in groups.items()
    ]


def agreement(mine: Sequence[Sequence[int]], other: Sequence[Sequence[int]]) -> dict[str, Any]:
    """How many outputs are the same, and where the first token differs in those that are not."""
    parts = [
        next((i for i, (a, b) in enumerate(zip(left, right, strict=True)) if a != b), None)
        for left, right in zip(mine, other, strict=True)
    ]
    return {
        "outputs": len(parts),
        "equal": parts.count(None),
        "first_difference": [part for part in parts if part is not None],
    }


def crossover(found: Sequence[Mapping[str, Any]], other: str = "dp") -> int | None:
    """Least requests of the fixed sweep from which TKNP has more throughput, up to the last."""
    sweep: dict[int, dict[str, float]] = defaultdict(dict)
    for entry in found:
        sweep[entry["requests"]][entry["system"]] = entry["throughput"]
    best = None
    for requests, systems in sorted(sweep.items(), reverse=True):
        if not {"tknp", other} <= set(systems) or systems["tknp"] <= systems[other]:
            break
        best = requests
    return best
