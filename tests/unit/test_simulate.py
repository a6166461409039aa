"""Proves the simulator against an oracle that takes one step at a time, and by hand."""

import math
import random
from dataclasses import replace
from typing import Any

import pytest

from sglang_tknp.launch.planner import hardware, trace
from sglang_tknp.launch.planner.compare import build
from sglang_tknp.launch.planner.layouts import Layout, Setting
from sglang_tknp.launch.planner.paper_pools import Pools
from sglang_tknp.launch.planner.simulate import AS_SERVED, Options, Run, Simulation
from sglang_tknp.launch.planner.trace import Arrival
from tests.unit.pool_oracle import Oracle, Toy, random_trace

CLOSE = 1e-6  # relative
OPTIONS = [
    Options(),
    Options(by_used=True, max_overtakes=4),
    Options(max_overtakes=0, max_running=3),
    Options(max_overtakes=16, page_size=16),
    Options(max_overtakes=1, router="least-requests"),
    Options(max_overtakes=10**6),
]
TOYS: dict[str, dict[str, Any]] = {
    "one queue, lockstep": {},
    "one queue, three groups": {"groups": ((0,), (1, 2), (3, 4, 5))},
    "a queue each, three groups": {
        "queues": tuple((o,) for o in range(6)),
        "groups": ((0,), (1, 2), (3, 4, 5)),
    },
    "two queues, lockstep": {"queues": ((0, 2, 4), (1, 3, 5))},
}
REAL = ("tknp", "tknp-dual", "dp", "dp-tp4", "tp", "pp", "pp2", "dcp", "attention-dp")


def simulate(
    layout: Layout, requests: list[Arrival], options: Options = AS_SERVED
) -> tuple[Run, Simulation]:
    simulation = Simulation(layout, requests, options)
    return simulation.simulate(), simulation


def check(layout: Layout, requests: list[Arrival], options: Options = AS_SERVED) -> Run:
    """Everything about the run that the oracle says too, and what no run may break."""
    run, simulation = simulate(layout, requests, options)
    oracle = Oracle(layout, requests, options)
    asks = oracle.run()
    assert [bool(r.refused) for r in run.requests] == [ask.refused for ask in asks]
    assert [r.owner for r in run.requests] == [ask.owner for ask in asks]
    for name in ("admit", "first", "finish"):
        expected = [getattr(ask, name) for ask in asks]
        assert [getattr(r, name) for r in run.requests] == pytest.approx(expected, rel=CLOSE), name
    assert run.peak_requests == oracle.peaks
    assert run.peak_waiting == oracle.peak_waiting
    taken = sorted(
        (start + piece.after(step), piece.first + piece.growth * step, rows)
        for start, piece, rows, _ in run.steps
        for step in range(piece.steps)
    )
    assert len(taken) == len(oracle.steps)
    for column in range(3):
        expected = [step[column] for step in sorted(oracle.steps)]
        assert [step[column] for step in taken] == pytest.approx(expected, rel=CLOSE)
    check_invariants(run, simulation)
    return run


def check_invariants(run: Run, simulation: Simulation) -> None:
    done = [r for r in run.requests if not r.refused]
    for r in done:
        assert r.arrival <= r.admit < r.first <= r.finish, "time does not run backwards"
        assert (r.first == r.finish) == (r.output_tokens == 1)
    assert sum(t.piece.steps * t.rows for t in run.steps) == sum(r.output_tokens for r in done)
    assert sum(t.new for t in run.steps) == len(done), "every request has one first token"
    for assigner in simulation._queues:
        assert not assigner.queue
        for account in assigner.ledger.accounts:
            assert account.reserved == 0 and not account.requests, "every reservation is back"
            assert account.current == 0, "and every context"


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("kind", TOYS)
def test_random_traces_on_toys(kind: str, options: Options) -> None:
    for seed in range(8):
        rng = random.Random(f"{kind}{seed}")
        if rng.random() < 0.5:
            capacity = [rng.randint(8, 15) * 16] * 6
        else:  # owners of different sizes: some can never hold some requests
            capacity = [rng.randint(4, 15) * 16 for _ in range(6)]
        layout = Toy(
            capacity,
            **TOYS[kind],
            step=rng.uniform(0.01, 0.1),
            per_row=rng.choice([0.0, 0.01]),
            per_token=rng.choice([0.0, 1e-5, 1e-3]),
        )
        load = rng.choice([0.0, 0.1, 1.0, 30.0])
        requests = random_trace(rng, rng.choice([1, 20, 100]), 250, 30, load)
        check(layout, requests, options)


@pytest.fixture(scope="module")
def setting() -> Setting:
    """Replicas of four ranks would not hold the weights, so their room is a given."""
    found = Pools(hardware.load("h100-sxm")).setting("llama-3.1-405b-fp8", 4)
    return replace(found, measured={"dp-tp4": 60_000})


@pytest.mark.parametrize("name", REAL)
def test_random_traces_on_real_layouts(setting: Setting, name: str) -> None:
    layout = build(name, setting)
    longest = min(layout.capacity)
    for seed in range(4):
        rng = random.Random(f"{name}{seed}")
        requests = random_trace(rng, 40, longest, 60, rng.choice([0.0, 1.0, 20.0]))
        check(layout, requests, OPTIONS[seed])


def test_an_arrival_joins_at_the_next_boundary_and_no_later() -> None:
    """A prototype took 16 steps at once, and let arrivals wait for a second."""
    layout = Toy([10**6], step=0.0625)
    for arrival in (3.0, 3.01, 17.49, 40.0625, 61.9):
        run = check(layout, [Arrival(0.0, 10, 1000), Arrival(arrival, 10, 3)])
        boundary = math.ceil(arrival / 0.0625) * 0.0625
        assert run.requests[1].admit == arrival
        assert run.requests[1].first == boundary + 0.0625
        assert run.requests[0].finish == 62.5, "steps go on as they would have"


def test_a_boundary_takes_who_arrives_at_it_and_nobody_who_comes_later() -> None:
    layout = Toy([100])
    for arrival, boundary in (
        (1.0, 1.0),
        (math.nextafter(1.0, 0), 1.0),
        (math.nextafter(1.0, 2), 1.5),
        (0.0, 0.0),
    ):
        run = check(layout, [Arrival(0.0, 10, 4), Arrival(arrival, 10, 2)])
        assert run.requests[1].first == boundary + 0.5
    # At the very end of the last request: its room is there, the pool has not stopped.
    run = check(layout, [Arrival(0.0, 90, 4), Arrival(2.0, 90, 4)])
    assert (run.requests[0].finish, run.requests[1].admit, run.requests[1].first) == (2.0, 2.0, 2.5)


def test_an_idle_pool_steps_when_somebody_comes() -> None:
    run = check(Toy([100, 100]), [Arrival(5.3, 10, 1), Arrival(5.3, 10, 1), Arrival(9.0, 10, 2)])
    assert [r.owner for r in run.requests] == [0, 1, 0]
    step = 0.5 * math.sqrt(2)
    expected = [5.3 + step, 5.3 + step, 9.0 + 2 * step]
    assert [r.finish for r in run.requests] == pytest.approx(expected)
    assert [t.rows for t in run.steps] == [2, 1]


def test_waves_and_the_drain_of_the_last_one() -> None:
    run = check(Toy([40, 20], per_row=0.125), trace.fixed(7, 8, 2))
    # 10 tokens each: waves of 6 and 1.
    assert [r.owner for r in run.requests] == [0, 1, 0, 1, 0, 0, 0]
    assert [t.rows for t in run.steps] == [6, 1]
    assert [t.piece.steps for t in run.steps] == [2, 2]
    assert run.peak_requests == [4, 2] and run.peak_waiting == 1
    first_wave = 2 * (0.5 * math.sqrt(2) + 6 * 0.125)
    assert run.requests[6].admit == pytest.approx(first_wave)


def test_what_never_fits_is_refused_and_the_others_go_on() -> None:
    requests = [Arrival(0.0, 10, 5), Arrival(0.0, 100, 1), Arrival(1.0, 10, 5), Arrival(1.0, 95, 4)]
    requests.append(Arrival(1.0, 96, 4))  # SGLang wants room for five tokens of output
    run = check(Toy([100, 50], max_overtakes=16), requests)
    assert [bool(r.refused) for r in run.requests] == [False, True, False, False, True]
    assert "needs 105 KV tokens" in run.requests[1].refused
    assert run.requests[3].owner == 0, "it fits the larger owner, once that is empty"
    assert run.requests[1].owner == -1 and run.requests[1].finish == -1


def test_nothing_that_fits_and_nothing_at_all() -> None:
    run = check(Toy([10]), trace.fixed(3, 10, 10))
    assert all(r.refused for r in run.requests) and not run.steps
    assert check(Toy([10]), []).requests == []
    with pytest.raises(ValueError, match="does not fit"):
        Simulation(Toy([10, 0]), [])


def test_overtaking_is_bounded() -> None:
    """A long one waits behind a full pool; short ones pass it so often and no more."""
    requests = [Arrival(0.0, 50, 40), Arrival(0.1, 90, 5)]
    requests += [Arrival(0.2 + i / 10, 5, 5) for i in range(30)]
    passed = {}
    for limit in (0, 3, 16):
        run = check(Toy([100]), requests, Options(max_overtakes=limit))
        long = run.requests[1]
        passed[limit] = sum(r.admit < long.admit for r in run.requests[2:])
    assert passed == {0: 0, 3: 3, 16: 16}


def test_a_lockstep_step_lasts_as_long_as_its_slowest_owner() -> None:
    layout = Toy([1000, 1000, 1000], step=1.0, per_token=0.001)
    run = check(layout, [Arrival(0.0, 100, 3), Arrival(0.0, 700, 3)])
    assert [r.owner for r in run.requests] == [0, 1], "and the third has no row at all"
    base = math.sqrt(3)
    ends = [base + 0.7, 2 * base + 0.7 + 0.701, 3 * base + 0.7 + 0.701 + 0.702]
    assert run.requests[0].first == pytest.approx(ends[0])
    assert [r.finish for r in run.requests] == pytest.approx([ends[2]] * 2)


def test_kv_used_sees_contexts_as_they_are_and_reservations_bound_them() -> None:
    """Owner 0 has promised more, but owner 1 holds more by now, without an end in between."""
    requests = [Arrival(0.0, 10, 400), Arrival(0.0, 60, 50), Arrival(0.0, 9, 100)]
    layout, by_used = Toy([1000, 1000], step=0.1), Options(by_used=True)
    requests.append(Arrival(1.0, 10, 5))
    by_reserved = check(layout, requests)
    assert [r.owner for r in by_reserved.requests] == [0, 1, 1, 1]
    run = check(layout, requests, by_used)
    assert [r.owner for r in run.requests] == [0, 1, 0, 0]
    # Two rows of owner 0 outgrow the one of owner 1 after 41 steps.
    requests[3] = Arrival(0.1 * math.sqrt(2) * 43.5, 10, 5)
    assert check(layout, requests, by_used).requests[3].owner == 1


def test_progress_is_heard_and_ends_at_all() -> None:
    heard: list[int] = []
    Simulation(Toy([100]), trace.fixed(600, 5, 1)).simulate(heard.append)
    assert heard[-1] == 600 and len(heard) > 2 and heard == sorted(heard)
