"""Proves the benchmark's line and the CSV of a run: by hand, and token by token."""

import csv
import json
import math
import random
from pathlib import Path
from typing import Any

import pytest

from sglang_tknp.launch.planner import results, trace
from sglang_tknp.launch.planner.simulate import Run, Simulation
from sglang_tknp.launch.planner.trace import Arrival
from tests.unit.pool_oracle import Ask, Oracle, Toy, random_trace


def line_of(run: Run, slo_per_token: float | None = None) -> dict[str, Any]:
    return results.benchmark_line(
        run, tag="t", request_rate=math.inf, slo_per_token=slo_per_token, about=None
    )


@pytest.fixture
def by_hand() -> Run:
    """Steps of 0.5 s; room for one: 0 to 2 s, 2 to 3 s, 3 to 3.5 s; one never fits."""
    return Simulation(
        Toy([100]),
        [Arrival(0, 80, 4), Arrival(0.25, 70, 2), Arrival(0.5, 200, 2), Arrival(1, 90, 1)],
    ).simulate()


def test_the_line_by_hand(by_hand: Run) -> None:
    line = line_of(by_hand)
    assert (line["completed"], line["duration"]) == (3, 3.5)
    assert (line["total_input_tokens"], line["total_output_tokens"]) == (240, 7)
    assert line["request_throughput"] == 3 / 3.5
    assert line["input_throughput"] == 240 / 3.5
    assert line["output_throughput"] == 7 / 3.5
    assert line["total_throughput"] == 247 / 3.5
    assert line["concurrency"] == (2.0 + 2.75 + 2.5) / 3.5
    assert line["mean_e2e_latency_ms"] == pytest.approx(1e3 * (2.0 + 2.75 + 2.5) / 3)
    assert line["median_ttft_ms"] == pytest.approx(2250.0)  # 500, 2250, 2500
    assert line["p90_ttft_ms"] == pytest.approx(2450.0)
    assert line["mean_tpot_ms"] == line["median_itl_ms"] == line["p99_itl_ms"] == 500.0
    assert line["std_itl_ms"] == line["std_tpot_ms"] == 0.0
    # Tokens at 0.5; 1.0, 1.5; 2.0, 2.5; 3.0, 3.5; requests of seconds 0 to 2, 0 to 3, 1 to 3.
    assert line["max_output_tokens_per_s"] == 2.0
    assert line["max_concurrent_requests"] == 3
    assert "slo_attainment" not in line


def test_the_details_by_hand(by_hand: Run) -> None:
    line = line_of(by_hand)
    assert line["input_lens"] == [80, 70, 200, 90] and line["output_lens"] == [4, 2, 0, 1]
    assert line["arrivals"] == [0, 0.25, 0.5, 1]
    assert line["ttfts"] == [0.5, 2.25, 0.0, 2.5]
    assert line["queue_times"] == [0.0, 1.75, 0.0, 2.0]
    assert line["owners"] == [0, 0, -1, 0]
    assert [bool(error) for error in line["errors"]] == [False, False, True, False]


def test_goodput_counts_all_that_were_sent(by_hand: Run) -> None:
    line = line_of(by_hand, slo_per_token=1.375)
    assert line["goodput_slos_ms"] == {"e2el_per_output_token": 1375.0}
    assert line["slo_attainment"] == 2 / 4 and line["request_goodput"] == 2 / 3.5
    # Where all outputs are equal, it is what the benchmark's --goodput e2el: says.
    equal = line_of(Simulation(Toy([100]), trace.fixed(2, 80, 4)).simulate(), slo_per_token=0.5)
    assert equal["goodput_slos_ms"] == {"e2el": 2000.0}
    assert equal["slo_attainment_by_metric"] == {"e2el": 0.5}


def test_a_run_without_a_served_request() -> None:
    line = line_of(Simulation(Toy([10]), trace.fixed(2, 80, 4)).simulate(), slo_per_token=1.0)
    numbers = [v for v in line.values() if isinstance(v, float) and v != math.inf]
    assert numbers and not any(numbers) and line["max_concurrent_requests"] == 0


def peaks(asks: list[Ask]) -> tuple[int, int]:
    """A bucket for every second from the first arrival on."""
    release = min(ask.arrival for ask in asks)
    last = math.ceil(max(ask.finish for ask in asks) - release)
    tokens, requests = [0] * (last + 1), [0] * (last + 1)
    for ask in asks:
        for time in ask.times:
            tokens[int(time - release)] += 1
        for second in range(int(ask.arrival - release), int(ask.finish - release) + 1):
            requests[second] += 1
    return max(tokens), max(requests)


@pytest.mark.parametrize("seed", range(6))
def test_peaks_second_by_second(seed: int) -> None:
    rng = random.Random(seed)
    layout = Toy([900, 700], step=rng.uniform(0.01, 0.3), per_token=1e-4)
    requests = [
        arrival._replace(seconds=arrival.seconds + 3.21)
        for arrival in random_trace(rng, 50, 300, 60, rng.choice([5.0, 50.0]))
    ]
    line = line_of(Simulation(layout, requests).simulate())
    expected = peaks([ask for ask in Oracle(layout, requests).run() if not ask.refused])
    assert (line["max_output_tokens_per_s"], line["max_concurrent_requests"]) == expected


def test_files(by_hand: Run, tmp_path: Path) -> None:
    line = line_of(by_hand)
    lines, rows = results.write(tmp_path / "run", line, by_hand)
    results.write(tmp_path / "run", line, by_hand)
    assert [json.loads(text) for text in lines.read_text().splitlines()] == [line, line]
    with rows.open(newline="") as file:
        found = list(csv.DictReader(file))
    assert len(found) == 4 and tuple(found[0]) == results.REQUEST_FIELDS
    assert list(found[1].values())[:8] == [
        *("1", "70", "2", "0.250000", "2.000000", "2.500000", "3.000000", "0")
    ]
    assert found[2]["owner"] == found[2]["finish_s"] == "" and "200" in found[2]["refused"]
