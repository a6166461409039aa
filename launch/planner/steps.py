"""Many decode steps at once, exactly: while a batch stays, its step time is convex in the steps.

A step lasts `fixed` plus the largest of some lines, each growing as contexts grow by a token per
step. So the steps of an unchanged batch fall into pieces in which one line is the largest.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

from sglang_tknp.launch.planner.layouts import Line


class Piece(NamedTuple):
    """Steps of which each is `growth` seconds longer than the one before."""

    steps: int
    first: float  # seconds of its first step
    growth: float

    @property
    def seconds(self) -> float:
        return self.after(self.steps)

    def after(self, steps: int) -> float:
        return steps * self.first + self.growth * steps * (steps - 1) / 2

    def steps_until(self, seconds: float) -> int:
        """The fewest steps that last at least so long; at most `steps`."""
        # The root of after(steps) = seconds, in the form that a tiny growth does not spoil.
        half = self.first - self.growth / 2
        root = 2 * seconds / (half + math.sqrt(half * half + 2 * self.growth * seconds))
        steps = max(0, math.ceil(root) - 1)  # rounding may have carried it up or down
        while steps < self.steps and self.after(steps) < seconds:
            steps += 1
        return min(steps, self.steps)


def pieces(fixed: float, lines: Sequence[Line], steps: int) -> list[Piece]:
    """The next `steps` steps of a batch, in order."""
    found = []
    done = 0
    while done < steps:
        start, growth = max((a + g * done, g) for a, g in lines)
        until = steps
        for a, g in lines:
            if g > growth:  # it will be the largest one day
                met = (start - a - g * done) / (g - growth)
                until = min(until, done + math.floor(min(met, steps)) + 1)
        found.append(Piece(until - done, fixed + start, growth))
        done = until
    return found


def seconds_of(parts: Sequence[Piece]) -> float:
    return sum(part.seconds for part in parts)


def steps_until(parts: Sequence[Piece], seconds: float) -> int:
    """The fewest steps that last at least `seconds`; at most all of them."""
    steps = 0
    for part in parts:
        if part.seconds >= seconds:
            return steps + part.steps_until(seconds)
        seconds -= part.seconds
        steps += part.steps
    return steps


def first_steps(parts: Sequence[Piece], steps: int) -> list[Piece]:
    """The pieces of the first `steps` steps."""
    found = []
    for part in parts:
        if steps <= 0:
            break
        found.append(part._replace(steps=min(part.steps, steps)))
        steps -= part.steps
    return found
