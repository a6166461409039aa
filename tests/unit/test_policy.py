"""Proves who gets a request and who waits, against oracles that are written from the docstrings.

The queue's oracle starts anew after every dispatch, and looks at every window again.
"""

from collections import Counter
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from sglang_tknp.scheduler_ext import waiting
from sglang_tknp.scheduler_ext.ledger import Ledger, whole_pages
from sglang_tknp.scheduler_ext.policy import (
    NONE,
    Policy,
    Request,
    choose,
    expected_output,
)
from sglang_tknp.scheduler_ext.prefixes import BLOCK_TOKENS, PrefixIndex
from sglang_tknp.scheduler_ext.waiting import WINDOW, WaitingQueue
from tests.reports import ledger_of, report

SLOTS = 1 << 20


def request(rid: str, tokens: int, only_owner: int | None = None, **changes: Any) -> Request:
    return Request(rid, tokens, tokens, only_owner=only_owner, **changes)


def queue_of(ledger: Ledger, max_overtakes: int = 16) -> WaitingQueue:
    return WaitingQueue(Policy(ledger), max_overtakes)


def take(queue: WaitingQueue) -> list[tuple[str, int]]:
    """What goes now, reserved as the controller does it."""
    taken = []
    for request, owner in queue.take():
        queue.policy.reserve(request, owner)
        taken.append((request.rid, owner))
    return taken


def end(ledger: Ledger, owner: int, *numbers: int) -> None:
    account = ledger.accounts[owner]
    ledger.apply(
        report(
            owner,
            account.seq + 1,
            capacity=account.capacity,
            max_requests=account.max_requests,
            received=account.next_number,
            ended=numbers,
        )
    )


def load(ledger: Ledger, owner: int) -> int:
    account = ledger.accounts[owner]
    current = account.used + account.unseen
    return current if ledger.by_used else max(account.reserved, current)


def has_room(ledger: Ledger, owner: int, tokens: int) -> bool:
    account = ledger.accounts[owner]
    held = max(account.reserved, account.used + account.unseen)
    open_ = account.alive and account.serving and len(account.requests) < account.max_requests
    return open_ and held + tokens <= account.capacity


def brute_force(
    ledger: Ledger, tokens: int, closed: Collection[int] = (), among: Collection[int] | None = None
) -> int | None:
    owners = range(len(ledger.accounts)) if among is None else among
    able = [o for o in owners if o not in closed and has_room(ledger, o, tokens)]
    best = [(load(ledger, o), len(ledger.accounts[o].requests), o) for o in able]
    return min(best)[2] if best else None


@st.composite
def ledgers(draw: st.DrawFn) -> Ledger:
    """Owners of any size, some dead, some full, with contexts that may exceed reservations."""
    count = draw(st.integers(1, 5))
    ledger = Ledger(count, by_used=draw(st.booleans()))
    small, owners = st.integers(0, 25), st.integers(0, count - 1)
    for owner in draw(st.sets(owners)):
        slots = draw(st.integers(0, 4))
        ledger.apply(report(owner, capacity=draw(st.integers(0, 60)), max_requests=slots))
    for owner, tokens, inputs in draw(st.lists(st.tuples(owners, small, small), max_size=15)):
        if tokens <= ledger.rooms[owner]:
            ledger.reserve(owner, "r", tokens, min(inputs, tokens))
    for owner, used, received in draw(st.lists(st.tuples(owners, small, small), max_size=3)):
        account = ledger.accounts[owner]
        if account.alive:
            seen = min(received, account.next_number)
            ledger.apply(report(owner, account.seq + 1, used=used, received=seen))
    return ledger


@settings(deadline=None, max_examples=500)
@given(ledger=ledgers(), tokens=st.integers(0, 30), closed=st.sets(st.integers(0, 4)))
def test_the_least_loaded_owner_with_room_is_chosen(
    ledger: Ledger, tokens: int, closed: set[int]
) -> None:
    expected = brute_force(ledger, tokens, closed)
    assert choose(ledger, tokens, closed) == expected
    assert choose(ledger, tokens) == brute_force(ledger, tokens)
    assert Policy(ledger).pick(request("r", tokens), closed) == expected
    for only in range(len(ledger.accounts)):
        found = Policy(ledger).pick(request("r", tokens, only), closed)
        assert found == brute_force(ledger, tokens, closed, among=[only])


PATH = (11, 12, 13)  # hashes of a prompt's blocks


@settings(deadline=None, max_examples=500)
@given(
    ledger=ledgers(),
    tokens=st.integers(0, 30),
    closed=st.sets(st.integers(0, 4)),
    depths=st.lists(st.sampled_from([0, 1, 3, 3]), min_size=5, max_size=5),
    slack=st.integers(0, 40),
)
def test_holders_of_the_longest_prefix_win_within_the_slack(
    ledger: Ledger, tokens: int, closed: set[int], depths: list[int], slack: int
) -> None:
    count = len(ledger.accounts)
    index = PrefixIndex(count)
    for owner in range(count):
        index.add(owner, PATH[: depths[owner]], 100 * BLOCK_TOKENS)
    policy = Policy(ledger, index, slack)
    nearest = None
    least = brute_force(ledger, tokens, closed)
    if least is not None:
        limit = load(ledger, least) + slack
        calm = [o for o in range(count) if load(ledger, o) <= limit]
        for depth in sorted({*depths[:count]} - {0}, reverse=True):
            near = {o for o in calm if depths[o] >= depth}
            nearest = brute_force(ledger, tokens, closed, among=near)
            if nearest is not None:
                break
    found = policy.pick(request("r", tokens, prefix=PATH), closed)
    assert found == (least if nearest is None else nearest)
    assert policy.prefix_hits == (nearest is not None)
    assert policy.pick(request("r", tokens), closed) == least
    assert Policy(ledger).pick(request("r", tokens, prefix=PATH), closed) == least


def test_a_prefix_follows_its_owner_while_that_has_room_and_little_more_load() -> None:
    policy = Policy(ledger_of(1000, 1000, 1000), PrefixIndex(3), prefix_slack=300)
    wanted = request("r", 200, prefix=(1, 2))
    policy.reserve(request("first", 300, prefix=(1, 2, 3)), 0)
    assert policy.pick(wanted) == 0
    assert policy.pick(request("other", 200, prefix=(9, 2))) == 1
    assert policy.pick(request("large", 701, prefix=(1, 2))) == 1
    policy.reserve(request("one more", 1), 0)
    assert policy.pick(wanted) == 1
    policy.reserve(request("holder too", 1, prefix=(1, 2)), 1)
    policy.reserve(request("busier", 300), 1)
    policy.reserve(request("busiest", 400), 0)
    policy.prefix_slack = 1000
    assert policy.pick(wanted) == 1
    assert policy.prefix_hits == 2


@pytest.mark.parametrize(
    ("named", "cap", "limit", "expected"),
    [
        (None, None, 5000, 1024),
        (None, 300, 5000, 300),
        (None, 300, 200, 200),
        (700, None, 5000, 700),
        (9000, None, 5000, 5000),
        (700, 300, 5000, 300),
        (200, 300, 5000, 200),
        (0, 300, 5000, 0),
        (700, None, -5, 0),
    ],
)
def test_expected_output(named: int | None, cap: int | None, limit: int, expected: int) -> None:
    assert expected_output(named, cap, limit) == expected
    shorter = expected_output(named, cap, limit, default=7)  # counts only where nothing is named
    assert shorter == (7 if (named, cap) == (None, None) else expected)


@settings(deadline=None, max_examples=200)
@given(tokens=st.integers(0, 1 << 40), page_size=st.integers(1, 300))
def test_whole_pages_are_the_fewest_that_hold_the_tokens(tokens: int, page_size: int) -> None:
    found = whole_pages(tokens, page_size)
    assert found % page_size == 0
    assert tokens <= found < tokens + page_size


def test_waiting_requests_can_be_found_counted_and_removed() -> None:
    queue = queue_of(Ledger(2))
    for rid, owner, level in (("a", None, 1), ("b", 0, 0), ("c", 0, 1), ("d", None, 0)):
        queue.add(request(rid, 1, owner, level=level))
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
        queue.add(request(f"r{number}", 1))
    assert take(queue) == [(f"r{n}", n % 2) for n in range(5 * WINDOW)]
    assert (len(queue), sum(queue.overtakes)) == (0, 0)


def test_a_request_for_an_owner_passes_nothing_behind_the_window() -> None:
    queue = queue_of(ledger_of(WINDOW + 1, max_requests=SLOTS), max_overtakes=0)
    for number in range(WINDOW + 1):
        queue.add(request(f"free{number}", 1))
    queue.add(request("chosen", 1, 0))
    assert take(queue)[-1] == (f"free{WINDOW}", 0)


def test_levels_go_first_then_arrivals() -> None:
    queue = queue_of(ledger_of(100))
    for rid, level in (("a", 5), ("b", -1), ("c", 5), ("d", 0), ("e", -1)):
        queue.add(request(rid, 25, level=level))
    assert [rid for rid, _ in take(queue)] == ["b", "e", "d", "a"]
    assert [r.rid for r in queue] == ["c"]


@pytest.mark.parametrize("max_overtakes", [0, 16])
def test_requests_for_a_full_owner_delay_nobody_else(max_overtakes: int) -> None:
    ledger = ledger_of(100, 100, max_requests=SLOTS)
    queue = queue_of(ledger, max_overtakes)
    ledger.reserve(0, "long", 95, 95)
    for number in range(1000):
        queue.add(request(f"p{number}", 10, 0))
    assert take(queue) == []
    queue.add(request("free", 50))
    queue.add(request("other", 50, 1))
    assert take(queue) == [("free", 1), ("other", 1)]
    end(ledger, 0, 0)
    assert take(queue) == [(f"p{n}", 0) for n in range(10)]


@pytest.mark.parametrize("max_overtakes", [0, 1, 16])
def test_an_endless_stream_of_small_requests_starves_no_large_one(max_overtakes: int) -> None:
    ledger = ledger_of(100, 100, max_requests=SLOTS)
    queue = queue_of(ledger, max_overtakes)
    running = [(owner, ledger.reserve(owner, "first", 10, 10)) for owner in (0, 1) * 5]
    large = request("large", 100)
    queue.add(large)
    passed = 0
    for number in range(1000):
        queue.add(request(f"s{number}", 10))
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
        queue.add(request(rid, tokens))
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
            added = request(rid, tokens, owner, level=level)
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
