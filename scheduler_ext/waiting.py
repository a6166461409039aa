"""Who waits for an owner, and in which order they go. Pure."""

import heapq
import itertools
import math
from bisect import insort
from collections import OrderedDict
from collections.abc import Iterator, Sequence

from sglang_tknp.config import DEFAULT_MAX_OVERTAKES
from sglang_tknp.scheduler_ext.policy import Policy, Request

# So many requests of one line are looked at; bounds the cost of one look.
WINDOW = 64


class Line:
    """Requests in order of level, then arrival; any of them can leave."""

    def __init__(self) -> None:
        self._levels: list[int] = []
        self._requests: dict[int, OrderedDict[int, Request]] = {}
        self.closer: Request | None = None  # the first that lets nobody pass any more

    def __bool__(self) -> bool:
        return bool(self._levels)

    def __iter__(self) -> Iterator[Request]:
        for level in self._levels:
            yield from self._requests[level].values()

    def window(self) -> list[Request]:
        return list(itertools.islice(self, WINDOW))

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

    Requests that any owner may take form one line, those for one owner a line each. A look costs
    what has changed: a line is looked at when it is new, when its owner's room has grown, or when
    a request that let nobody pass has left; the common line always.
    """

    def __init__(self, policy: Policy, max_overtakes: int = DEFAULT_MAX_OVERTAKES) -> None:
        self.policy = policy
        self.max_overtakes = max_overtakes
        self.overtakes = [0] * len(policy.ledger.accounts)  # by the owner that was reached
        self._arrivals = itertools.count()
        self._by_rid: dict[str, Request] = {}
        self._lines: dict[int | None, Line] = {}  # by Request.only_owner
        self._stale: set[int | None] = set()  # lines to look at
        self._rooms: list[int] = []  # of the last look

    def __len__(self) -> int:
        return len(self._by_rid)

    def __iter__(self) -> Iterator[Request]:
        """In the order in which they may go."""
        return heapq.merge(*self._lines.values(), key=_place)

    def add(self, request: Request) -> None:
        request.arrival = next(self._arrivals)
        self._by_rid[request.rid] = request
        self._lines.setdefault(request.only_owner, Line()).add(request)
        self._stale.add(request.only_owner)

    def remove(self, request: Request) -> None:
        del self._by_rid[request.rid]
        line = self._lines[request.only_owner]
        line.remove(request)
        self._stale.add(request.only_owner)  # another one may be looked at now
        if not line:
            del self._lines[request.only_owner]
        if self._lets_nobody_pass(request):
            opened = self._lines if request.only_owner is None else (request.only_owner, None)
            self._stale.update(opened)
            line.closer = next((r for r in line.window() if self._closed_by(r)), None)

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
        if self._by_rid and self._find_stale():
            before = None
            while before != len(self._by_rid):
                before = len(self._by_rid)
                yield from self._take_from_window()
            self._stale.clear()
            self._rooms = list(self.policy.ledger.rooms)

    def _find_stale(self) -> bool:
        rooms = self.policy.ledger.rooms
        if rooms != self._rooms:
            before = self._rooms or [-1] * len(rooms)
            grown = [owner for owner, room in enumerate(rooms) if room > before[owner]]
            self._stale.update(grown, (None,) if grown else ())
            self._rooms = list(rooms)
        return bool(self._stale)

    def _take_from_window(self) -> Iterator[tuple[Request, int]]:
        ledger = self.policy.ledger
        stayed: list[Request] = []
        closed: set[int] = set()
        window, horizon = self._window()
        taken = 0
        for request in window:
            if taken and _place(request) > horizon:
                return  # those between must be looked at first
            owner = self._owner_for(request, closed)
            if owner is None:
                stayed.append(request)
                self._close_if_overtaken(request, closed)
            else:
                self.remove(request)
                taken += 1
                yield request, owner
                self._count_overtakes(request, owner, stayed, closed)
                if self._lets_nobody_pass(request):
                    return  # what it kept closed is open now, also lines outside this window
            if len(closed) == len(ledger.accounts):
                return

    def _owner_for(self, request: Request, closed: set[int]) -> int | None:
        if request.only_owner is not None and request.only_owner not in self._stale:
            return None  # it is here to close its owner, and its room has not grown
        if request.tokens > self.policy.ledger.most_room():
            return None
        return self.policy.pick(request, closed)

    def _window(self) -> tuple[list[Request], tuple[float, float]]:
        """Whom to look at, in order, and the place up to which nobody is missing.

        Of lines that need no look, only who keeps their owner from all behind.
        """
        looked_at = {owner for owner in self._stale if owner in self._lines} | {None}
        lines = [self._lines[owner].window() for owner in looked_at if owner in self._lines]
        ends = [_place(line[-1]) for line in lines if len(line) == WINDOW]
        for owner, line in self._lines.items():
            if owner not in looked_at and line.closer is not None:
                lines.append([line.closer])
        window = lines[0] if len(lines) == 1 else list(heapq.merge(*lines, key=_place))
        return window, min(ends, default=(math.inf, math.inf))

    def _count_overtakes(
        self, request: Request, owner: int, stayed: list[Request], closed: set[int]
    ) -> None:
        """`request` went to `owner`: who stayed before it, and could have used that owner?"""
        before = stayed
        if owner not in self._stale and owner in self._lines:
            line = [r for r in self._lines[owner].window() if _place(r) < _place(request)]
            before = [r for r in stayed if r.only_owner is None] + line
        capacity = self.policy.ledger.accounts[owner].capacity
        passed = [r for r in before if r.only_owner in (None, owner) and r.tokens <= capacity]
        for earlier in passed:
            earlier.overtaken += 1
            self._close_if_overtaken(earlier, closed)
        self.overtakes[owner] += bool(passed)

    def _lets_nobody_pass(self, request: Request) -> bool:
        return request.overtaken >= self.max_overtakes

    def _close_if_overtaken(self, request: Request, closed: set[int]) -> None:
        owners = self._closed_by(request)
        closed.update(owners)
        line = self._lines[request.only_owner]
        if owners and (line.closer is None or _place(request) < _place(line.closer)):
            line.closer = request

    def _closed_by(self, request: Request) -> Sequence[int]:
        """The owners that a request keeps from all behind it: none while it could use none."""
        return self.policy.could_take(request) if self._lets_nobody_pass(request) else ()


def _place(request: Request) -> tuple[int, int]:
    return request.level, request.arrival
