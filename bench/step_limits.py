"""For step.py: what a decode step may cost at most, and which of the measured numbers cost more."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

RATIO_LIMIT = 1.25  # TKNP's step over stock's with the same messages


def host_limits(nodes: int) -> dict[str, float]:
    """Microseconds per step, and per layer as root and as owner, of a pool of `nodes`.

    A root has two messages more in a layer for each further owner.
    """
    return {"step": 200, "root": 60 + 20 * (nodes - 2), "owner": 60}


def missed_limits(results: Mapping[str, Sequence[Mapping[str, Any]]]) -> Iterator[str]:
    """A line for each number above the "limit" of its row; of the parts "host" and "ratio"."""
    for row in results.get("host", ()):
        for name, limit in row["limit"].items():
            if row[name] > limit:
                yield f"host, {row['nodes']} nodes, {name}: {row[name]} us, limit {limit} us"
    for row in results.get("ratio", ()):
        if row["ratio"] > row["limit"]:
            case = f"batch {row['batch']}, context {row['context']}"
            yield f"ratio, {case}: {row['ratio']}, limit {row['limit']}"
