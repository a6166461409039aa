"""Time of nested sections of code, each without the sections inside it."""

import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any


class Sections:
    """Seconds per section. `now` gives seconds: of the wall, or of this thread's processor.

    What the measuring itself takes is measured first, and taken off.
    """

    def __init__(self, now: Callable[[], float] = time.perf_counter) -> None:
        self.now = now
        self.totals: defaultdict[str, float] = defaultdict(float)
        self.open: list[list[Any]] = []  # [name, start of what is not yet counted]
        self.inside = self.outside = 0.0  # of one call, in its own section and in the outer one
        self._calibrate()

    def _calibrate(self, calls: int = 2000) -> None:
        inner = self.wrap("inner", lambda: None)

        def outer() -> None:
            for _ in range(calls):
                inner()

        self.wrap("outer", outer)()
        self.inside, self.outside = self.totals["inner"] / calls, self.totals["outer"] / calls
        self.totals.clear()

    def wrap(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            self.enter(name)
            try:
                return function(*args, **kwargs)
            finally:
                self.leave()

        return timed

    def enter(self, name: str) -> None:
        now = self.now()
        if self.open:
            outer, since = self.open[-1]
            self.totals[outer] += now - since
        self.open.append([name, now])

    def leave(self) -> None:
        now = self.now()
        name, since = self.open.pop()
        self.totals[name] += now - since - self.inside
        if self.open:
            self.totals[self.open[-1][0]] -= self.outside
            self.open[-1][1] = now
