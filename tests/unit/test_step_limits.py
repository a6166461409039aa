"""Proves what bench/step.py says of limits: which apply, and which are missed."""

import importlib.util
from pathlib import Path
from typing import Any

import pytest

FILE = Path(__file__).parents[2] / "bench" / "step_limits.py"


@pytest.fixture(scope="module")
def limits() -> Any:
    """bench is no package: its files are scripts."""
    spec = importlib.util.spec_from_file_location("step_limits", FILE)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(("nodes", "root"), [(2, 60), (3, 80), (8, 180)])
def test_a_root_may_take_more_for_each_further_owner(limits: Any, nodes: int, root: int) -> None:
    assert limits.host_limits(nodes) == {"step": 200, "root": root, "owner": 60}


def test_what_is_above_its_limit_is_named(limits: Any) -> None:
    host = {"nodes": 4, "step": 366.6, "root": 100.0, "owner": 60.8}
    results = {
        "host": [
            {**host, "limit": limits.host_limits(4)},
            {**host, "nodes": 8, "step": 200, "owner": 60, "limit": limits.host_limits(8)},
        ],
        "ratio": [
            {"batch": 1, "context": 64, "ratio": 1.25, "limit": limits.RATIO_LIMIT},
            {"batch": 8, "context": 512, "ratio": 1.251, "limit": limits.RATIO_LIMIT},
        ],
    }
    assert list(limits.missed_limits(results)) == [
        "host, 4 nodes, step: 366.6 us, limit 200 us",
        "host, 4 nodes, owner: 60.8 us, limit 60 us",
        "ratio, batch 8, context 512: 1.251, limit 1.25",
    ]
    assert list(limits.missed_limits({})) == []
