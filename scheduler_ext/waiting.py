"""Who waits for an owner, and in which order they go. Pure."""

import heapq
import itertools
import math
from bisect import insort
from collections import OrderedDict
from collections.abc import Iterator

from sglang_tknp.config import DEFAULT_MAX_OVERTAKES
from sglang_tknp.scheduler_ext.policy import Policy, Request

# So many requests of one line are looked at; bounds the cost of one look.
WINDOW = 64


class Line:
    """Requests in order of level, then arrival; any of them can leave."""

    def __init__(self) -> None:
        self._levels: list[int] = []
        self._requests: dict[int, OrderedDict[int, Request]] = {}

    def __bool__(self) -> bool:
        return bool(self._levels)

    def __iter__(self) -> Iterator[Request]:
        for level in self._levels:
            yield from self._requests[level].values()

    def last(self) -> Request:
        return next(reversed(self._requests[self._levels[-1]].values()))

    def add(self, request: Request) -> None:
        if request.level not in self._requests:
            insort(self._levels, request.level)
            self._requests[request.level] = OrderedDict()
        self._requests[request.level][request.arrival] = request

    def remove(self, request: Request) -> None:
        at_level = self._requests[request.level]
        del at_level[request.arrival]
        if not at_level:
            del self._requests[request.level]
            self._levels.remove(request.level)


class WaitingQueue:
    """Requests without an owner: by priority, then arrival, with bounded overtaking.

    A request may be passed by at most `max_overtakes` later ones that go to an owner it could
    have used. After that these owners are closed to all behind it, so they drain until it fits.
    Only the first WINDOW requests of a line are looked at, and counted; those behind wait.
    """

    def __init__(self, policy: Policy, max_overtakes: int = DEFAULT_MAX_OVERTAKES) -> None:
        self.policy = policy
        self.max_overtakes = max_overtakes
        self.overtakes = 0
        self._arrivals = itertools.count()
        self._by_rid: dict[str, Request] = {}
        # Requests with an owner of their own must not keep those behind them from being looked at.
        self._lines: dict[int | None, Line] = {}

    def __len__(self) -> int:
        return len(self._by_rid)

    def __iter__(self) -> Iterator[Request]:
        """In the order in which they may go."""
        return heapq.merge(*self._lines.values(), key=_place)

    def add(self, request: Request) -> None:
        request.arrival = next(self._arrivals)
        self._by_rid[request.rid] = request
        self._lines.setdefault(request.only_owner, Line()).add(request)

    def remove(self, request: Request) -> None:
        del self._by_rid[request.rid]
        line = self._lines[request.only_owner]
        line.remove(request)
        if not line:
            del self._lines[request.only_owner]

    def get(self, rid: str) -> Request | None:
        return self._by_rid.get(rid)

    def matching(self, prefix: str) -> list[Request]:
        """The requests whose rid begins so: SGLang's rule for aborts."""
        return [r for rid, r in self._by_rid.items() if rid.startswith(prefix)]

    def last(self) -> Request:
        """The one that is served last: of the least important level, the newest."""
        return max((line.last() for line in self._lines.values()), key=_place)

    def waiting_for(self, owner: int) -> int:
        """Requests whose client chose this owner. For a look from outside: not cheap."""
        return sum(1 for _ in self._lines.get(owner, ()))

    def take(self) -> Iterator[tuple[Request, int]]:
        """Every waiting request that may go now, with its owner, in order.

        The caller reserves for each before it asks for the next, and leaves the queue alone.
        """
        while self._by_rid:
            before = len(self._by_rid)
            yield from self._take_from_window()
            if len(self._by_rid) == before:
                return

    def _take_from_window(self) -> Iterator[tuple[Request, int]]:
        ledger = self.policy.ledger
        largest = max(ledger.rooms)
        stayed: list[Request] = []
        closed: set[int] = set()
        window, horizon = self._window()
        taken = 0
        for request in window:
            if taken and _place(request) > horizon:
                return  # those between must be looked at first
            if request.tokens > largest or (owner := self.policy.pick(request, closed)) is None:
                stayed.append(request)
                self._close_if_overtaken(request, closed)
            else:
                self.remove(request)
                taken += 1
                yield request, owner
                self._count_overtakes(stayed, owner, closed)
                largest = max(ledger.rooms)
            if len(closed) == len(ledger.accounts):
                return

    def _window(self) -> tuple[list[Request], tuple[float, float]]:
        """The first of every line, in order, and the place up to which nobody is missing."""
        lines = [list(itertools.islice(line, WINDOW)) for line in self._lines.values()]
        ends = [_place(line[-1]) for line in lines if len(line) == WINDOW]
        window = lines[0] if len(lines) == 1 else list(heapq.merge(*lines, key=_place))
        return window, min(ends, default=(math.inf, math.inf))

    def _count_overtakes(self, stayed: list[Request], owner: int, closed: set[int]) -> None:
        capacity = self.policy.ledger.accounts[owner].capacity
        passed = False
        for earlier in stayed:
            if earlier.only_owner in (None, owner) and capacity >= earlier.tokens:
                earlier.overtaken += 1
                passed = True
                self._close_if_overtaken(earlier, closed)
        self.overtakes += passed

    def _close_if_overtaken(self, request: Request, closed: set[int]) -> None:
        if request.overtaken >= self.max_overtakes:
            closed.update(self.policy.could_take(request))


def _place(request: Request) -> tuple[int, int]:
    return request.level, request.arrival
