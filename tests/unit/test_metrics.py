"""Proves a run's metrics against every token of every request, one by one."""

import random
from collections.abc import Iterable

import numpy as np
import pytest

from sglang_tknp.launch.planner import trace
from sglang_tknp.launch.planner.metrics import Intervals, measure
from sglang_tknp.launch.planner.simulate import Run, Simulation, Taken
from sglang_tknp.launch.planner.steps import Piece
from sglang_tknp.launch.planner.trace import Arrival
from tests.unit.pool_oracle import Ask, Oracle, Toy, random_trace


def intervals_of(asks: Iterable[Ask]) -> np.ndarray:
    return np.concatenate([np.diff(ask.times) for ask in asks] or [np.zeros(0)])


def served_by(layout: Toy, requests: list[Arrival]) -> tuple[Run, list[Ask]]:
    asks = Oracle(layout, requests).run()
    return Simulation(layout, requests).simulate(), [a for a in asks if not a.refused]


@pytest.mark.parametrize("seed", range(6))
def test_intervals_are_those_of_every_token(seed: int) -> None:
    rng = random.Random(seed)
    layout = Toy(
        [300, 200],
        groups=((0,), (1,)) if seed % 2 else None,
        queues=((0,), (1,)) if seed % 2 else None,
        per_row=0.013,
        per_token=0.0007,
    )
    run, asks = served_by(layout, random_trace(rng, 60, 220, 25, 40.0))
    expected, found = intervals_of(asks), Intervals(run)
    assert found.count == len(expected)
    assert found.mean() == pytest.approx(expected.mean())
    assert found.std() == pytest.approx(expected.std())
    for percent in (0, 1, 50, 90, 95, 99, 99.9, 100):
        wanted = np.percentile(expected, percent)
        assert found.percentile(percent) == pytest.approx(wanted, rel=1e-9)


def test_intervals_of_few_tokens_and_of_none() -> None:
    none = Intervals(Run("none", [], [], []))
    assert (none.count, none.mean(), none.std(), none.percentile(95)) == (0, 0.0, 0.0, 0.0)
    first = Intervals(Run("first tokens", [], [Taken(0.0, Piece(1, 2.0, 0.0), 3, 3)], []))
    assert (first.count, first.percentile(50)) == (0, 0.0)
    # Two old requests and one new: two intervals of 2 s, then three of each 3 s and 4 s.
    mixed = Intervals(Run("mixed", [], [Taken(0.0, Piece(3, 2.0, 1.0), 3, 1)], []))
    expected = [2.0] * 2 + [3.0] * 3 + [4.0] * 3
    assert mixed.count == 8 and mixed.mean() == pytest.approx(np.mean(expected))
    for percent in range(0, 101, 5):
        assert mixed.percentile(percent) == pytest.approx(np.percentile(expected, percent))


def test_the_wait_is_part_of_completion_and_of_no_interval() -> None:
    """Two requests that do not fit together: the second waits for all of the first."""
    run = Simulation(Toy([100]), trace.fixed(2, 80, 4)).simulate()
    metrics = measure(run, slo_per_token=0.5)
    assert metrics.mean_itl == metrics.p95_itl == 0.5
    assert metrics.mean_wait == (0 + 2.0) / 2
    assert metrics.mean_completion == (2.0 + 4.0) / 2
    assert metrics.p95_completion == pytest.approx(2.0 + 0.95 * 2.0)
    assert metrics.attainment == 0.5, "waiting counts: 4 s for 4 tokens are 1 s each"
    assert (metrics.seconds, metrics.throughput) == (4.0, 2.0)
    assert (metrics.peak_requests, metrics.peak_waiting) == ((1,), 1)
    assert measure(run).attainment is None


def test_a_request_that_is_refused_has_missed_its_objective() -> None:
    requests = [Arrival(0.0, 50, 4), Arrival(0.0, 500, 4), Arrival(0.0, 40, 4)]
    metrics = measure(Simulation(Toy([100]), requests).simulate(), slo_per_token=0.5)
    assert (metrics.completed, metrics.refused) == (2, 1)
    assert metrics.attainment == pytest.approx(2 / 3)
    assert metrics.throughput == 8 / 2.0, "and no tokens"
    alone = measure(Simulation(Toy([100]), requests[1:2]).simulate(), slo_per_token=0.5)
    assert (alone.completed, alone.throughput, alone.attainment) == (0, 0.0, 0.0)


def test_an_objective_is_met_at_its_very_limit() -> None:
    run = Simulation(Toy([100]), [Arrival(0.0, 10, 8)]).simulate()
    assert measure(run, slo_per_token=0.5).attainment == 1.0
    assert measure(run, slo_per_token=0.4999).attainment == 0.0


def saturated(requests: list[Arrival]) -> bool:
    """Ten requests at a time, two seconds each: five a second."""
    return measure(Simulation(Toy([1000], step=0.05), requests).simulate()).saturated


def test_a_growing_queue_is_saturation() -> None:
    for seed in range(5):
        assert saturated(trace.poisson(trace.fixed(200, 60, 40), 7.5, seed))
    assert saturated(trace.burst([60] * 200, 40, per_burst=1, seconds_between=0.1))


def test_a_burst_a_stable_load_and_a_handful_are_not() -> None:
    assert not saturated(trace.fixed(500, 60, 40))
    for seed in range(5):
        assert not saturated(trace.poisson(trace.fixed(200, 60, 40), 2.5, seed))
    assert not saturated(trace.burst([60] * 200, 40, per_burst=20, seconds_between=5.0))
    assert not saturated(trace.poisson(trace.fixed(8, 60, 40), 100, 0))
