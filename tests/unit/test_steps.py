"""Proves many steps at once against a loop that takes them one by one."""

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_tknp.launch.planner.layouts import Line
from sglang_tknp.launch.planner.steps import (
    Piece,
    first_steps,
    pieces,
    seconds_of,
    steps_until,
)

CLOSE = 1e-9  # relative
# A line starts at what it grows by or more: a context has a token at least for each row.
growths = st.floats(0, 1e-2)
lines_of_owners = st.lists(
    st.tuples(st.floats(0, 0.5), growths).map(lambda line: (line[0] + line[1], line[1])),
    min_size=1,
    max_size=6,
)


def one_by_one(fixed: float, lines: list[Line], steps: int) -> list[float]:
    """Seconds of each step."""
    return [fixed + max(a + g * step for a, g in lines) for step in range(steps)]


def expanded(parts: list[Piece]) -> list[float]:
    return [part.first + part.growth * step for part in parts for step in range(part.steps)]


@given(lines_of_owners, st.floats(1e-4, 0.1), st.integers(1, 300))
def test_pieces_are_the_steps(lines: list[Line], fixed: float, steps: int) -> None:
    parts = pieces(fixed, lines, steps)
    assert expanded(parts) == pytest.approx(one_by_one(fixed, lines, steps), rel=CLOSE)
    assert seconds_of(parts) == pytest.approx(math.fsum(expanded(parts)), rel=CLOSE)
    assert all(part.steps > 0 for part in parts)
    growth = [part.growth for part in parts]
    assert growth == sorted(set(growth)), "a line is the largest once: their maximum is convex"


@given(
    lines_of_owners, st.floats(1e-4, 0.1), st.integers(1, 200), st.integers(0, 2**32), st.booleans()
)
def test_the_step_at_an_instant(
    lines: list[Line], fixed: float, steps: int, seed: int, at_boundary: bool
) -> None:
    parts, rng = pieces(fixed, lines, steps), random.Random(seed)
    ends = [0.0]
    for seconds in one_by_one(fixed, lines, steps):
        ends.append(ends[-1] + seconds)
    for _ in range(10):
        step = rng.randrange(steps)
        if at_boundary:  # a hair before the end of a step, which rounding may not cross
            instant = ends[step + 1] - 1e-6 * (ends[step + 1] - ends[step])
        else:
            instant = rng.uniform(ends[step], ends[step + 1])
            if min(instant - ends[step], ends[step + 1] - instant) < 1e-8 * ends[-1]:
                continue
        assert steps_until(parts, instant) == step + 1
    assert steps_until(parts, 0.0) == 0
    assert steps_until(parts, 2 * ends[-1]) == steps


@given(lines_of_owners, st.floats(1e-4, 0.1), st.integers(1, 100), st.integers(0, 120))
def test_first_steps(lines: list[Line], fixed: float, steps: int, wanted: int) -> None:
    parts = pieces(fixed, lines, steps)
    first = first_steps(parts, wanted)
    assert expanded(first) == expanded(parts)[:wanted]
    assert all(part.steps > 0 for part in first)


def test_a_boundary_is_that_steps_end() -> None:
    """Numbers that floats hold exactly: neither one step early nor one late."""
    parts = pieces(0.5, [(0.25, 0.0), (0.0, 0.125)], 20)
    ends = 0.0
    for step, seconds in enumerate(expanded(parts), 1):
        ends += seconds
        assert steps_until(parts, ends) == step
        assert steps_until(parts, math.nextafter(ends, math.inf)) == min(step + 1, 20)
        assert steps_until(parts, math.nextafter(ends, 0)) == step


@pytest.mark.parametrize("growth", [0.0, 1e-30, 1e-18, 1e-15, 1e-12, 1e-9, 1e-6, 1e-3])
def test_a_growth_that_rounding_swallows_moves_no_step(growth: float) -> None:
    """The root of the quadratic equation loses its digits where growth is tiny."""
    piece = Piece(5000, 0.05, growth)
    for step in (1, 2, 3, 100, 1234, 4999, 5000):
        middle = (piece.after(step - 1) + piece.after(step)) / 2
        assert piece.steps_until(middle) == step


def test_lines_that_are_equal_or_meet_at_a_step() -> None:
    assert pieces(1.0, [(0.5, 0.25)] * 3, 7) == [Piece(7, 1.5, 0.25)]
    # The steeper of two that are equal now is the largest from the next step on.
    assert pieces(1.0, [(0.5, 0.0), (0.5, 0.25)], 7) == [Piece(7, 1.5, 0.25)]
    # They meet exactly at the fifth step, which may count to either.
    met = pieces(0.0, [(1.0, 0.0), (0.0, 0.25)], 10)
    assert expanded(met) == [1.0, 1.0, 1.0, 1.0, 1.0, 1.25, 1.5, 1.75, 2.0, 2.25]


def test_lines_that_never_meet_in_time() -> None:
    assert pieces(0.0, [(1.0, 0.0), (0.0, 1e-5)], 1000) == [Piece(1000, 1.0, 0.0)]
    assert pieces(0.0, [(1.0, 1e-5), (0.0, 0.0)], 1) == [Piece(1, 1.0, 1e-5)]
    assert pieces(0.0, [(1.0, 0.0)], 0) == []


def test_thousands_of_steps_of_many_owners() -> None:
    rng = random.Random(1)
    growths = [rng.uniform(1e-7, 1e-5) for _ in range(64)]
    lines = [(0.2 - 15_000 * growth + rng.uniform(0, 1e-3), growth) for growth in growths]
    parts = pieces(0.003, lines, 20_000)
    assert len(parts) > 3
    assert expanded(parts) == pytest.approx(one_by_one(0.003, lines, 20_000), rel=CLOSE)
