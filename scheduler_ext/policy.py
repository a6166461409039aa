"""Which owner a request gets, and who waits: the paper's section 4.2. Pure.

A request goes to the least loaded owner that has room for its input and its expected output; ties
go to the fewest requests, then to the lowest rank (Ledger.order). If nobody has room it waits.
"""

import heapq
import itertools
from bisect import insort
from collections import OrderedDict
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Any

from sglang_tknp.config import DEFAULT_EXPECTED_OUTPUT, DEFAULT_MAX_OVERTAKES
from sglang_tknp.scheduler_ext.ledger import Ledger
from sglang_tknp.scheduler_ext.prefixes import PrefixIndex

# So many waiting requests are looked at behind each other; bounds the cost of one look.
WINDOW = 64

NONE: frozenset[int] = frozenset()


@dataclass(slots=True, eq=False)
class Request:
    """A request that has no owner yet."""

    rid: str
    tokens: int  # KV of its whole life, whole pages
    input_tokens: int  # KV of its input, whole pages
    only_owner: int | None = None  # the client's choice
    level: int = 0  # of its priority: lower goes first
    prefix: tuple[int, ...] = ()
    arrived: float = 0.0  # seconds, the controller's clock
    payload: Any = None  # what is sent to the owner
    reply_to: str | None = None  # SGLang's return route
    arrival: int = 0  # its place among all requests, set by the queue
    overtaken: int = 0


def expected_output(
    max_new_tokens: int | None, cap: int | None, limit: int, default: int = DEFAULT_EXPECTED_OUTPUT
) -> int:
    """Output tokens to reserve for.

    Args:
        max_new_tokens: what the request names, or None.
        cap: --tknp-expected-output-tokens, or None for none.
        limit: what the model's context leaves behind the input.
        default: for a request that names no length, where there is no cap.
    """
    if max_new_tokens is None:
        max_new_tokens = default if cap is None else cap
    elif cap is not None:
        max_new_tokens = min(max_new_tokens, cap)
    return max(0, min(max_new_tokens, limit))


def choose(ledger: Ledger, tokens: int, closed: Collection[int] = NONE) -> int | None:
    """The least loaded owner with room for `tokens`, none of `closed`; None if there is none."""
    rooms, owner_of = ledger.rooms, ledger.owner_of
    for key in ledger.order:
        owner = owner_of(key)
        if rooms[owner] >= tokens and owner not in closed:
            return owner
    return None


class Policy:
    """Picks owners; with `prefixes`, one that has seen the prompt's beginning may win."""

    def __init__(
        self, ledger: Ledger, prefixes: PrefixIndex | None = None, prefix_slack: int = 0
    ) -> None:
        """`prefix_slack`: KV tokens that a holder's load may lie above the least loaded's."""
        self.ledger = ledger
        self.prefixes = prefixes
        self.prefix_slack = prefix_slack
        self.prefix_hits = 0

    def pick(self, request: Request, closed: Collection[int] = NONE) -> int | None:
        if request.only_owner is not None:
            has_room = self.ledger.rooms[request.only_owner] >= request.tokens
            return request.only_owner if has_room and request.only_owner not in closed else None
        owner = choose(self.ledger, request.tokens, closed)
        if owner is None or self.prefixes is None or not request.prefix:
            return owner
        return self._nearest(request, owner, closed)

    def _nearest(self, request: Request, least: int, closed: Collection[int]) -> int:
        """The least loaded owner that holds the longest prefix, or `least` if all are too busy."""
        assert self.prefixes is not None
        ledger, limit = self.ledger, self.ledger.load_of(least) + self.prefix_slack
        holders, _ = self.prefixes.holders(request.prefix)
        near = [
            (ledger.accounts[owner].key, owner)
            for owner in holders
            if ledger.load_of(owner) <= limit
            and ledger.rooms[owner] >= request.tokens
            and owner not in closed
        ]
        if not near:
            return least
        self.prefix_hits += 1
        return min(near)[1]

    def reserve(self, request: Request, owner: int) -> int:
        """Reserve for a request that is now sent to `owner`; returns its number there."""
        if self.prefixes is not None and request.prefix:
            capacity = self.ledger.accounts[owner].capacity
            self.prefixes.add(owner, request.prefix, capacity)
        return self.ledger.reserve(owner, request.rid, request.tokens, request.input_tokens)

    def could_take(self, request: Request) -> list[int]:
        """The owners that could hold a request if they were empty."""
        accounts = self.ledger.accounts
        owners = range(len(accounts)) if request.only_owner is None else [request.only_owner]
        return [o for o in owners if accounts[o].alive and accounts[o].capacity >= request.tokens]


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

        The caller reserves for each before it asks for the next.
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
        for request in self._window():
            if request.tokens > largest or (owner := self.policy.pick(request, closed)) is None:
                stayed.append(request)
                self._close_if_overtaken(request, closed)
            else:
                self.remove(request)
                yield request, owner
                self._count_overtakes(stayed, owner, closed)
                largest = max(ledger.rooms)
            if len(closed) == len(ledger.accounts):
                return

    def _window(self) -> list[Request]:
        """The first of every line, together in order."""
        lines = [list(itertools.islice(line, WINDOW)) for line in self._lines.values()]
        return lines[0] if len(lines) == 1 else list(heapq.merge(*lines, key=_place))

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
