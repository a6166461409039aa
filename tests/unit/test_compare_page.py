"""The comparison's plots and page, from a JSON as compare.py writes it."""

import csv
import io
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "bench"))

from compare_figures import figures  # noqa: E402
from compare_page import render, slug_of  # noqa: E402
from compare_predict import layout_of, predictions, with_host  # noqa: E402
from compare_report import losses  # noqa: E402
from compare_toy import Toy, empty  # noqa: E402

from sglang_tknp.launch.planner import hardware  # noqa: E402
from sglang_tknp.launch.planner.series import to_csv  # noqa: E402

POINTS = [
    ("fixed", 4, "inf", "64K 4 burst"),
    ("fixed", 10, "inf", "64K 10 burst"),
    ("fixed", 20, "inf", "64K 20 burst"),
    ("poisson", 24, "1.0", "64K 24 1/s"),
    ("mixed", 48, "inf", "mixed 48 burst"),
]
SPEEDS = {
    "tknp": [70.0, 120.0, 190.0, 180.0, 170.0],
    "dp": [82.0, 110.0, 105.0, 100.0, 110.0],
    "pp": [65.0, 118.0, 192.0, 181.0, 168.0],
}


def median(system: str, point: str, speed: float) -> dict[str, Any]:
    spread = {"p50": 10.0, "p95": 12.0, "p99": 13.0}
    return {
        "system": system,
        "point": point,
        "runs": 3,
        "throughput": speed,
        "queue_wait": 1.5,
        "completion": {"mean": 10.5, **spread},
        "itl_ms": spread,
        "slo_attainment": 0.5,
        "prefill_share": 0.03,
        "peak_resident": 20,
        "peak_resident_per_owner": {"0": 10, "1": 10},
    }


def study() -> dict[str, Any]:
    runs = [
        {
            "system": system,
            "point": {"kind": k, "requests": n, "rate": r, "context": 65_536, "name": name},
            "requests": [{"arrival": 0.0, "input": 32, "output": 218}] * n,
        }
        for system in SPEEDS
        for k, n, r, name in POINTS
    ]
    systems = {
        name: {
            "not_run": None,
            "kv_tokens": [2576, 2576],
            "expected_kv_tokens": 5184,
            "agreement": {"equal": 8, "outputs": 8, "first_difference": []},
        }
        for name in SPEEDS
    }
    dense = {"1": 25.0, "3": 26.0, "10": 32.0, "20": 41.0}
    machine = {"dense_ms_by_turns": dense, "dense_ms_two_at_once": dense}
    machine |= {
        "attention_ms": {"1250": 20.0, "2500": 36.0},
        "elementwise_ms": {"3": 1.2, "20": 8.0},
    }
    found = {
        "name": "toy <b>",
        "ratios": [{"what": "weights / memory", "paper": 0.811, "toy": 0.811}],
        "systems": {**systems, "tp": {"not_run": "one KV head", "expected_kv_tokens": 1}},
        "machine_does": machine,
        "empty_step_ms": {name: {"4": 5.0, "20": 8.2} for name in SPEEDS},
        "runs": runs,
        "medians": [
            median(system, name, speed)
            for system, speeds in SPEEDS.items()
            for (*_, name), speed in zip(POINTS, speeds, strict=True)
        ],
    }
    return {**found, "predictions": predictions(found, Toy(), 2)}


def test_plots_have_every_median_and_mark_the_crossover() -> None:
    found = {figure.name: figure for figure in figures(study(), "s")}
    assert set(found) == {"s-throughput", "s-latency", "s-online", "s-predicted"}
    (panel,) = found["s-throughput"].panels
    assert "TKNP ahead of DP from 10" in panel.title
    rows = list(csv.DictReader(io.StringIO(to_csv(found["s-throughput"]))))
    shown = {(row["series"], float(row["x"])): float(row["y"]) for row in rows}
    assert shown["TKNP", 20] == 190 and shown["DP", 4] == 82
    online = found["s-online"].panels
    assert [name for _, name in online[0].ticks] == ["mixed 48 burst", "64K 24 1/s"]


def test_the_page_says_where_tknp_loses_and_is_one_file() -> None:
    one = study()
    assert (
        losses(one)
        == "64K 4 burst to dp (0.85); 64K 20 burst to pp (0.99); 64K 24 1/s to pp (0.99)"
    )
    found = {
        "machine": {"cpu": "c", "cores": 2},
        "versions": {"sglang": "0.5.23"},
        "nodes": 2,
        "command": "python bench/compare.py",
        "studies": [one],
    }
    page = render(found)
    assert "64K 4 burst to dp (0.85)" in page and "not run: one KV head" in page
    assert "toy &lt;b&gt;" in page and "<script" not in page
    assert page.count("<svg") == 4
    assert slug_of(one) == "compare-toy--b-"


def test_an_empty_model_tells_the_servers_own_time() -> None:
    toy = hardware.load("cpu-toy")
    dp = with_host(toy, {"4": 5.0, "20": 8.2}, "dp", 2)  # replicas of 2 and 10 rows
    assert dp.step_overhead + 2 * dp.row_overhead == pytest.approx(5.0e-3)
    assert dp.step_overhead + 10 * dp.row_overhead == pytest.approx(8.2e-3)
    tknp = with_host(toy, {"4": 5.0, "20": 8.2}, "tknp", 2)
    assert tknp.step_overhead + 20 * tknp.row_overhead == pytest.approx(8.2e-3)
    assert tknp.exchange_latency == 0, "messages are in the empty model's step"
    pp = with_host(toy, {"4": 5.0, "20": 8.2}, "pp", 2)  # two stages, microbatches of 2 and 10
    assert 2 * (pp.step_overhead + 10 * pp.row_overhead) == pytest.approx(8.2e-3)


def test_a_predicted_step_is_the_sum_of_what_was_measured() -> None:
    one = study()
    machine, hosts = one["machine_does"], one["empty_step_ms"]
    layout = layout_of(Toy(), "tknp", 2, machine, hosts)
    step = layout.step_seconds((10, 10), [2500, 2500])
    # Dense and elementwise of 20 rows, attention by its slope, and the server.
    assert step == pytest.approx((41 + 8 + 32 + 8.2) * 1e-3, rel=0.04)
    alone = layout_of(Toy(), "dp", 2, machine, hosts).step_seconds((3,), [750])
    assert alone == pytest.approx((26 + 1.2 + 32 * 0.3 + 5.4) * 1e-3, rel=0.06)


def test_an_empty_model_has_the_same_layers_and_next_to_no_weights() -> None:
    assert empty(Toy()).layers == Toy().layers
    assert empty(Toy()).weight_bytes < Toy().weight_bytes / 100
