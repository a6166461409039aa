"""Proves who waits and who goes first, against an oracle that is written from the docstrings.

The oracle starts anew after every dispatch, and looks at every window again.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from sglang_tknp.scheduler_ext import waiting
from sglang_tknp.scheduler_ext.ledger import Ledger
from sglang_tknp.scheduler_ext.policy import (
    NONE,
    Request,
)
from sglang_tknp.scheduler_ext.waiting import WINDOW
from tests.reports import ledger_of
from tests.unit.oracle import SLOTS, a_request, brute_force, end, queue_of, take


def test_waiting_requests_can_be_found_counted_and_removed() -> None:
    queue = queue_of(Ledger(2))
    for rid, owner, level in (("a", None, 1), ("b", 0, 0), ("c", 0, 1), ("d", None, 0)):
        queue.add(a_request(rid, 1, owner, level=level))
    assert [r.rid for r in queue] == ["b", "d", "a", "c"]
    assert (len(queue), queue.waiting_for(0), queue.waiting_for(1)) == (4, 2, 0)
    last, found = queue.last(), queue.get("d")
    assert last.rid == "c" and found is not None
    queue.remove(last)
    queue.remove(found)
    assert queue.get("c") is None
    assert ([r.rid for r in queue], queue.last().rid) == (["b", "a"], "a")
    assert take(queue) == []


def test_all_that_fits_goes_at_once_even_if_more_than_a_window_waits() -> None:
    queue = queue_of(ledger_of(SLOTS, SLOTS, max_requests=SLOTS))
    for number in range(5 * WINDOW):
        queue.add(a_request(f"r{number}", 1))
    assert take(queue) == [(f"r{n}", n % 2) for n in range(5 * WINDOW)]
    assert (len(queue), sum(queue.overtakes)) == (0, 0)


def test_a_request_for_an_owner_passes_nothing_behind_the_window() -> None:
    queue = queue_of(ledger_of(WINDOW + 1, max_requests=SLOTS), max_overtakes=0)
    for number in range(WINDOW + 1):
        queue.add(a_request(f"free{number}", 1))
    queue.add(a_request("chosen", 1, 0))
    assert take(queue)[-1] == (f"free{WINDOW}", 0)


def test_who_goes_opens_the_lines_that_it_kept_closed_before_later_ones_go() -> None:
    ledger = ledger_of(20, 20, 20, max_requests=SLOTS)
    ledger.set_serving(2, False)
    queue = queue_of(ledger, 1)
    ledger.reserve(0, "x", 10, 10)
    ledger.reserve(1, "y", 10, 10)
    for rid, tokens, only in (("wide", 20, None), ("a", 1, 0), ("b", 1, 1)):
        queue.add(a_request(rid, tokens, only))
    assert take(queue) == [("a", 0)], "wide lets nobody pass any more"
    ledger.set_serving(2, True)
    queue.add(a_request("c", 1, 0))
    assert take(queue) == [("wide", 2), ("b", 1), ("c", 0)]


def test_what_its_owner_can_never_hold_does_not_hide_who_closes_it() -> None:
    """An owner's capacity can fall below what already waits for it."""
    queue = queue_of(ledger_of(9, 2, max_requests=SLOTS), 0)
    for rid, tokens, only in (("large", 3, 1), ("first", 1, 1), ("next", 2, 1), ("last", 1, 1)):
        queue.add(a_request(rid, tokens, only))
    assert take(queue) == [("first", 1)], "next keeps its owner from last"
    queue.add(a_request("other", 9, 0))
    assert take(queue) == [("other", 0)]
    queue.add(a_request("any", 1))
    assert take(queue) == [], "any passes next neither"


def test_levels_go_first_then_arrivals() -> None:
    queue = queue_of(ledger_of(100))
    for rid, level in (("a", 5), ("b", -1), ("c", 5), ("d", 0), ("e", -1)):
        queue.add(a_request(rid, 25, level=level))
    assert [rid for rid, _ in take(queue)] == ["b", "e", "d", "a"]
    assert [r.rid for r in queue] == ["c"]


@pytest.mark.parametrize("max_overtakes", [0, 16])
def test_requests_for_a_full_owner_delay_nobody_else(max_overtakes: int) -> None:
    ledger = ledger_of(100, 100, max_requests=SLOTS)
    queue = queue_of(ledger, max_overtakes)
    ledger.reserve(0, "long", 95, 95)
    for number in range(1000):
        queue.add(a_request(f"p{number}", 10, 0))
    assert take(queue) == []
    queue.add(a_request("free", 50))
    queue.add(a_request("other", 50, 1))
    assert take(queue) == [("free", 1), ("other", 1)]
    end(ledger, 0, 0)
    assert take(queue) == [(f"p{n}", 0) for n in range(10)]


@pytest.mark.parametrize("max_overtakes", [0, 1, 16])
def test_an_endless_stream_of_small_requests_starves_no_large_one(max_overtakes: int) -> None:
    ledger = ledger_of(100, 100, max_requests=SLOTS)
    queue = queue_of(ledger, max_overtakes)
    running = [(owner, ledger.reserve(owner, "first", 10, 10)) for owner in (0, 1) * 5]
    large = a_request("large", 100)
    queue.add(large)
    passed = 0
    for number in range(1000):
        queue.add(a_request(f"s{number}", 10))
        gone = take(queue)
        if "large" in dict(gone):
            break
        passed += len(gone)
        running += [(owner, ledger.accounts[owner].next_number - 1) for _, owner in gone]
        end(ledger, *running.pop(0))
    assert "large" in dict(gone)
    assert passed == large.overtaken == sum(queue.overtakes) == max_overtakes


def test_an_owner_that_could_never_take_a_request_stays_open_behind_it() -> None:
    queue = queue_of(ledger_of(100, 50), 0)
    queue.policy.ledger.reserve(0, "running", 10, 10)
    for rid, tokens in (("large", 95), ("a", 30), ("b", 30)):
        queue.add(a_request(rid, tokens))
    assert take(queue) == [("a", 1)]
    assert sum(queue.overtakes) == 0


@dataclass
class NaiveQueue:
    """The docstrings, read slowly. `window`: at how many it looks that chose the same owner."""

    ledger: Ledger
    max_overtakes: int
    window: int
    waiting: list[Request] = field(default_factory=list)
    passes: dict[str, int] = field(default_factory=dict)
    overtakes: int = 0

    def in_order(self) -> list[Request]:
        return sorted(self.waiting, key=lambda r: (r.level, r.arrival))

    def looked_at(self) -> Iterator[Request]:
        seen: Counter[int | None] = Counter()
        for request in self.in_order():
            seen[request.only_owner] += 1
            if seen[request.only_owner] <= self.window:
                yield request

    def could_use(self, request: Request) -> set[int]:
        accounts = enumerate(self.ledger.accounts)
        fits = {o for o, a in accounts if a.alive and a.capacity >= request.tokens}
        return fits if request.only_owner is None else fits & {request.only_owner}

    def take(self) -> Iterator[tuple[str, int]]:
        while found := self.next():
            request, owner = found
            self.waiting.remove(request)
            self.ledger.reserve(owner, request.rid, request.tokens, request.input_tokens)
            yield request.rid, owner

    def next(self) -> tuple[Request, int] | None:
        ahead: list[Request] = []
        for request in self.looked_at():
            patient = [r for r in ahead if self.passes[r.rid] >= self.max_overtakes]
            closed = NONE.union(*map(self.could_use, patient))
            among = None if request.only_owner is None else [request.only_owner]
            owner = brute_force(self.ledger, request.tokens, closed, among)
            if owner is not None:
                passed = [r.rid for r in ahead if owner in self.could_use(r)]
                self.passes.update({rid: self.passes[rid] + 1 for rid in passed})
                self.overtakes += bool(passed)
                return request, owner
            ahead.append(request)
        return None


# (tokens, owner that is asked for, level)
WANTED = st.tuples(st.integers(0, 12), st.integers(-4, 3), st.sampled_from([0, 0, 0, 1]))


class Queues(RuleBasedStateMachine):
    """The queue and its oracle get the same requests and the same reports."""

    @initialize(
        capacities=st.lists(st.integers(0, 12), min_size=1, max_size=4),
        max_overtakes=st.integers(0, 3),
        window=st.sampled_from([1, 3, SLOTS]),
        by_used=st.booleans(),
    )
    def start(self, capacities: list[int], max_overtakes: int, window: int, by_used: bool) -> None:
        self.patch, self.rids = pytest.MonkeyPatch(), 0
        self.patch.setattr(waiting, "WINDOW", window)
        real, naive = (ledger_of(*capacities, by_used=by_used, max_requests=4) for _ in range(2))
        self.ledger, self.queue = real, queue_of(real, max_overtakes)
        self.naive = NaiveQueue(naive, max_overtakes, window)

    def teardown(self) -> None:
        self.patch.undo()

    @rule(wanted=st.lists(WANTED, min_size=1, max_size=5))
    def add(self, wanted: list[tuple[int, int, int]]) -> None:
        for tokens, only, level in wanted:
            owner = only if 0 <= only < len(self.ledger.accounts) else None
            rid, self.rids = f"r{self.rids}", self.rids + 1
            added = a_request(rid, tokens, owner, level=level)
            self.queue.add(added)
            self.naive.waiting.append(added)
            self.naive.passes[rid] = 0

    @precondition(lambda self: self.naive.waiting)
    @rule(pick=st.integers(0, 1 << 16))
    def abort(self, pick: int) -> None:
        gone = self.naive.waiting.pop(pick % len(self.naive.waiting))
        assert self.queue.get(gone.rid) is gone
        self.queue.remove(gone)

    @rule(owner=st.integers(0, 3), count=st.integers(0, 3))
    def some_end(self, owner: int, count: int) -> None:
        owner %= len(self.ledger.accounts)
        ended = list(self.ledger.accounts[owner].requests)[:count]
        for ledger in (self.ledger, self.naive.ledger):
            end(ledger, owner, *ended)

    @rule(owner=st.integers(0, 3), serving=st.sampled_from([True, True, True, False]))
    def die_or_return(self, owner: int, serving: bool) -> None:
        for ledger in (self.ledger, self.naive.ledger):
            ledger.set_serving(owner % len(ledger.accounts), serving)

    @rule()
    def take(self) -> None:
        assert take(self.queue) == list(self.naive.take())

    @invariant()
    def both_are_alike(self) -> None:
        assert list(self.queue) == self.naive.in_order()
        assert len(self.queue) == len(self.naive.waiting)
        assert sum(self.queue.overtakes) == self.naive.overtakes
        for request in self.naive.waiting:
            assert request.overtaken == self.naive.passes[request.rid]
            assert request.overtaken <= self.queue.max_overtakes
        if self.naive.waiting:
            assert self.queue.last() is self.naive.in_order()[-1]


Queues.TestCase.settings = settings(deadline=None, max_examples=300, stateful_step_count=50)
test_the_queue_equals_its_oracle = Queues.TestCase
