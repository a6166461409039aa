"""Proves that the ledger tracks real owners, however their reports are lost, late or doubled.

Examples first, then a machine of owners that receive, grow, end and restart while a mailbox hands
their reports to the ledger in any order; a model of the docstrings is recomputed after every step.
"""

import copy
from collections import deque
from dataclasses import dataclass, field
from random import Random

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from sglang_tknp.scheduler_ext import messages
from sglang_tknp.scheduler_ext.ledger import (
    LOST,
    MAX_OWNERS,
    NOT_THERE,
    STARTED_ANEW,
    Drift,
    Ledger,
    Reservation,
)
from sglang_tknp.scheduler_ext.messages import Header, Live, Report
from tests.reports import ledger_of, report

NUM_OWNERS = 2


def orders(ledger: Ledger) -> list[int]:
    return [ledger.owner_of(key) for key in ledger.order]


def test_an_owner_takes_nothing_before_its_first_report_and_then_what_fits() -> None:
    ledger = Ledger(2)
    assert ledger.rooms == [-1, -1]
    with pytest.raises(ValueError, match="a: owner 0 has no room for 0 KV tokens"):
        ledger.reserve(0, "a", 0, 0)
    ledger.apply(report(1))
    assert ledger.rooms == [-1, 100]
    for tokens in (101, -1):
        with pytest.raises(ValueError, match=f"a: owner 1 has no room for {tokens} KV tokens"):
            ledger.reserve(1, "a", tokens, 0)


def test_a_reservation_lasts_until_its_owner_says_that_it_ended() -> None:
    ledger = ledger_of(100, 100)
    assert [ledger.reserve(0, rid, 30, 10) for rid in "ab"] == [0, 1]
    assert (ledger.rooms, ledger.load_of(0), orders(ledger)) == ([40, 100], 60, [1, 0])
    ledger.apply(report(0, 2, received=2, used=20))
    assert ledger.accounts[0].reserved == 60
    ledger.apply(report(0, 3, received=2, used=10, ended=(0,)))
    assert (ledger.rooms, ledger.load_of(0)) == ([70, 100], 30)


def test_an_owner_with_all_its_requests_running_takes_no_more() -> None:
    ledger = ledger_of(100, max_requests=2)
    for rid in "ab":
        ledger.reserve(0, rid, 1, 1)
    assert ledger.rooms == [-1]
    ledger.apply(report(seq=2, max_requests=2, received=2, used=1, ended=(1,)))
    assert ledger.rooms == [99]


def test_an_owner_that_does_not_serve_takes_no_more_and_keeps_its_account() -> None:
    ledger = ledger_of(100, 100)
    ledger.reserve(0, "a", 60, 60)
    ledger.set_serving(0, False)
    ledger.apply(report(0, 2, received=1, used=60))
    assert (ledger.rooms, ledger.load_of(0)) == ([-1, 100], 60)
    ledger.set_serving(0, True)
    assert ledger.rooms == [40, 100]


def test_contexts_that_outgrow_their_reservations_keep_their_room() -> None:
    ledger = ledger_of(100)
    ledger.reserve(0, "capped", 20, 10)
    ledger.apply(report(seq=2, received=1, used=70))
    assert (ledger.load_of(0), ledger.rooms) == (70, [30])
    ledger.apply(report(seq=3, received=1, used=120))
    assert ledger.rooms == [-1]


def test_by_used_counts_contexts_and_what_is_on_its_way() -> None:
    ledger = ledger_of(100, 100, by_used=True)
    ledger.reserve(0, "a", 90, 5)
    ledger.reserve(1, "b", 20, 10)
    assert ([ledger.load_of(o) for o in (0, 1)], orders(ledger)) == ([5, 10], [0, 1])
    ledger.apply(report(0, 2, received=1, used=12))
    assert ([ledger.load_of(o) for o in (0, 1)], orders(ledger)) == ([12, 10], [1, 0])
    assert ledger.rooms == [10, 80]  # room stays a matter of reservations


def test_equal_loads_go_by_requests_then_by_rank() -> None:
    ledger = ledger_of(100, 100, 100)
    for owner, tokens in ((0, 10), (0, 10), (1, 20), (2, 20)):
        ledger.reserve(owner, "r", tokens, tokens)
    assert orders(ledger) == [1, 2, 0]


def test_a_lost_end_is_healed_by_the_next_absolute_report() -> None:
    ledger = ledger_of(100)
    for rid in ("kept", "ended", "on its way"):
        ledger.reserve(0, rid, 10, 5)
    live = (Live(0, "kept", 7),)
    assert ledger.apply(report(seq=3, received=2, used=7)) == []
    said = report(seq=4, received=2, used=7, live=live)
    assert ledger.apply(said) == [Drift(0, "ended", NOT_THERE)]
    account = ledger.accounts[0]
    assert (list(account.requests), account.reserved) == ([0, 2], 20)


def test_an_older_report_still_ends_requests_but_says_nothing_else() -> None:
    ledger = ledger_of(100)
    ledger.reserve(0, "a", 60, 60)
    ledger.apply(report(seq=3, received=1, used=30))
    assert ledger.apply(report(seq=2, received=1, used=60, capacity=7, ended=(0,), live=())) == []
    account = ledger.accounts[0]
    assert (account.reserved, account.used, ledger.rooms) == (0, 30, [70])


def test_a_new_ledger_learns_from_an_absolute_report() -> None:
    ledger = Ledger(1)
    live = (Live(3, "old", 40),)
    drifts = ledger.apply(report(seq=9, received=5, used=40, live=live))
    assert drifts == [Drift(0, "old", "there, but not reserved")]
    assert ledger.rooms == [60]
    assert ledger.reserve(0, "new", 10, 10) == 5
    ledger.apply(report(seq=10, received=6, ended=(3, 5)))
    assert ledger.rooms == [100]


def test_another_request_under_a_number_takes_its_place() -> None:
    ledger = ledger_of(100)
    ledger.reserve(0, "ours", 10, 10)
    drifts = ledger.apply(report(seq=2, received=1, used=20, live=(Live(0, "theirs", 20),)))
    assert [d.rid for d in drifts] == ["ours", "theirs"]
    assert (ledger.accounts[0].reserved, ledger.rooms) == (20, [80])


def test_a_new_process_starts_empty_and_the_old_ones_reports_are_void() -> None:
    ledger = ledger_of(100)
    ledger.reserve(0, "a", 60, 60)
    drifts = ledger.apply(report(seq=1, epoch=2, capacity=80))
    assert drifts == [Drift(0, "a", STARTED_ANEW)]
    assert ledger.rooms == [80]
    assert ledger.reserve(0, "b", 30, 30) == 0  # as the new process counts
    assert ledger.apply(report(seq=7, epoch=1, received=1, ended=(0,))) == []
    assert (ledger.rooms, ledger.load_of(0)) == ([50], 30)


def test_owners_that_there_cannot_be_are_refused() -> None:
    for owner in (-1, 2):
        with pytest.raises(ValueError, match=f"a report of owner {owner}, of 2 owners"):
            Ledger(2).apply(report(owner))
    for count in (0, -1, MAX_OWNERS + 1):
        with pytest.raises(ValueError, match=f"1 to {MAX_OWNERS} owners, not {count}"):
            Ledger(count)


def test_headers_and_reports_survive_the_socket() -> None:
    header = Header("rid", 5, None, -3, 2, "ipc://x", (-1, 1 << 62))
    said = report(7, 2, ended=(1, 2), live=(Live(3, "c", 4),))
    assert messages.decode_header(messages.encode(header)) == header
    assert messages.decode_report(messages.encode(said)) == said
    assert messages.decode_report(messages.encode(report())).live is None


@dataclass
class Process:
    """An owner as it really is; its inbox is the ordered way from the controller."""

    rank: int
    capacity: int
    max_requests: int
    epoch: int = 1
    seq: int = 0
    received: int = 0
    inbox: deque[Reservation] = field(default_factory=deque)
    held: dict[int, Reservation] = field(default_factory=dict)
    contexts: dict[int, int] = field(default_factory=dict)
    ended: list[int] = field(default_factory=list)  # since the last report

    def receive(self) -> None:
        request = self.inbox.popleft()
        self.held[self.received] = request
        self.contexts[self.received] = request.input_tokens
        self.received += 1

    def end(self, number: int) -> None:
        del self.held[number], self.contexts[number]
        self.ended.append(number)

    def report(self, absolute: bool) -> Report:
        self.seq += 1
        ended, self.ended = tuple(self.ended), []
        live = tuple(Live(n, self.held[n].rid, context) for n, context in self.contexts.items())
        return report(
            self.rank,
            self.seq,
            epoch=self.epoch,
            capacity=self.capacity,
            max_requests=self.max_requests,
            received=self.received,
            used=sum(self.contexts.values()),
            ended=ended,
            live=live if absolute else None,
        )


def test_a_request_that_was_lost_on_its_way_is_named_and_the_numbers_follow() -> None:
    """A broken connection can lose what was sent; the owner then counts one less."""
    ledger = ledger_of(100)
    assert [ledger.reserve(0, rid, 10, 5) for rid in "abcd"] == [0, 1, 2, 3]
    live = (Live(0, "b", 5), Live(1, "c", 5))  # a was lost, d is on its way
    drifts = ledger.apply(report(0, 2, received=2, used=10, live=live))
    assert drifts == [Drift(0, "a", LOST)]
    account = ledger.accounts[0]
    assert {n: r.rid for n, r in account.requests.items()} == {0: "b", 1: "c", 2: "d"}
    assert (account.reserved, account.unseen) == (30, 5)
    assert ledger.reserve(0, "e", 10, 5) == 3
    assert ledger.apply(report(0, 3, received=4, used=15, ended=(1,))) == []
    assert [r.rid for r in account.requests.values()] == ["b", "d", "e"]


def test_an_owner_that_counted_one_more_is_followed() -> None:
    ledger = ledger_of(100)
    ledger.reserve(0, "a", 10, 5)
    ledger.reserve(0, "b", 10, 5)
    live = (Live(1, "a", 5),)  # 0 was none of ours, and has ended; b is on its way
    assert ledger.apply(report(0, 2, received=2, used=5, live=live)) == []
    assert {n: r.rid for n, r in ledger.accounts[0].requests.items()} == {1: "a", 2: "b"}
    assert (ledger.accounts[0].unseen, ledger.reserve(0, "c", 10, 5)) == (5, 3)


def test_contexts_beyond_their_reservations_are_not_promised_again() -> None:
    """Two of 100 reserved tokens each, one of which has grown to 500: 600 are taken or promised."""
    ledger = ledger_of(1000)
    ledger.reserve(0, "grown", 100, 10)
    ledger.reserve(0, "young", 100, 10)
    live = (Live(0, "grown", 500), Live(1, "young", 10))
    ledger.apply(report(0, 2, capacity=1000, received=2, used=510, live=live))
    assert (ledger.accounts[0].reserved, ledger.rooms) == (200, [400])
    ledger.apply(report(0, 3, capacity=1000, received=2, used=10, ended=(0,), live=(live[1],)))
    assert (ledger.accounts[0].reserved, ledger.rooms) == (100, [900])


@dataclass
class Book:
    """What the ledger should know of one owner, from all that it was told."""

    newest: Report
    sent: list[Reservation] = field(default_factory=list)  # to this process
    gone: set[int] = field(default_factory=set)
    outgrown: int = 0  # at the last absolute report

    def open(self) -> dict[int, Reservation]:
        return {n: r for n, r in enumerate(self.sent) if n not in self.gone}

    def unseen(self) -> int:
        return sum(r.input_tokens for r in self.sent[self.newest.received :])

    def take(self, said: Report) -> tuple["Book", set[tuple[str, str]]]:
        """The next book, and the drifts as (rid, what)."""
        if said.epoch < self.newest.epoch:
            return self, set()
        if said.epoch > self.newest.epoch:
            return Book(said), {(r.rid, STARTED_ANEW) for r in self.open().values()}
        self.gone.update(said.ended)
        missing: set[int] = set()
        if said.seq > self.newest.seq:
            self.newest = said
            if said.live is not None:
                there = {request.number for request in said.live}
                missing = set(range(said.received)) - there - self.gone
                self.outgrown = sum(
                    max(0, r.context_tokens - self.sent[r.number].tokens) for r in said.live
                )
        self.gone |= missing
        return self, {(self.sent[n].rid, NOT_THERE) for n in missing}


OWNERS = st.integers(0, NUM_OWNERS - 1)
PICKS = st.integers(0, 1 << 16)  # of a list, by remainder


def rarely(self: "Owners") -> bool:
    """For what makes the past irrelevant: more often, there would be no past."""
    return self.rids % 8 == 7


class Owners(RuleBasedStateMachine):
    """Every report goes to `mail`; from there it is delivered in any order, doubled or lost."""

    @initialize(by_used=st.booleans(), capacity=st.integers(0, 100), slots=st.integers(1, 6))
    def start(self, by_used: bool, capacity: int, slots: int) -> None:
        self.ledger = Ledger(NUM_OWNERS, by_used=by_used)
        self.owners = [Process(o, capacity + 30 * o, slots) for o in range(NUM_OWNERS)]
        self.mail: list[Report] = []
        self.delivered: list[Report] = []
        self.rids = 0
        self.books = [Book(owner.report(absolute=True)) for owner in self.owners]
        for book in self.books:
            assert self.ledger.apply(book.newest) == []

    @rule(owner=OWNERS, tokens=st.integers(0, 30), input_part=st.integers(0, 30))
    def dispatch(self, owner: int, tokens: int, input_part: int) -> None:
        rid, self.rids = f"r{self.rids}", self.rids + 1
        request = Reservation(rid, tokens, min(tokens, input_part))
        if tokens > self.ledger.rooms[owner]:
            before = copy.deepcopy(vars(self.ledger))
            with pytest.raises(ValueError, match=f"{rid}: owner {owner} has no room"):
                self.ledger.reserve(owner, *request)
            assert vars(self.ledger) == before
            return
        book, process = self.books[owner], self.owners[owner]
        assert self.ledger.reserve(owner, *request) == len(book.sent)
        book.sent.append(request)
        assert self.ledger.accounts[owner].reserved <= book.newest.capacity
        if process.epoch == book.newest.epoch:  # else it goes to a process that is no more
            process.inbox.append(request)

    @precondition(lambda self: any(owner.inbox for owner in self.owners))
    @rule(count=st.integers(1, 5))
    def receive(self, count: int) -> None:
        for owner in self.owners:
            for _ in range(min(count, len(owner.inbox))):
                owner.receive()

    @precondition(lambda self: any(owner.held for owner in self.owners))
    @rule(pick=PICKS, tokens=st.integers(1, 30))
    def grow(self, pick: int, tokens: int) -> None:
        owner, number = self.one_held(pick)
        owner.contexts[number] += tokens

    @precondition(lambda self: any(owner.held for owner in self.owners))
    @rule(pick=PICKS)
    def finish_or_abort(self, pick: int) -> None:
        owner, number = self.one_held(pick)
        owner.end(number)
        self.mail.append(owner.report(absolute=False))

    def one_held(self, pick: int) -> tuple[Process, int]:
        held = [(owner, number) for owner in self.owners for number in owner.held]
        return held[pick % len(held)]

    @precondition(lambda self: len(self.mail) < 5)
    @rule(owner=OWNERS, absolute=st.booleans())
    def send_report(self, owner: int, absolute: bool) -> None:
        self.mail.append(self.owners[owner].report(absolute))

    @precondition(rarely)
    @rule(owner=OWNERS, capacity=st.integers(0, 120))
    def restart(self, owner: int, capacity: int) -> None:
        old = self.owners[owner]
        self.owners[owner] = Process(owner, capacity, old.max_requests, old.epoch + 1)

    @precondition(lambda self: self.mail)
    @rule(pick=PICKS, again=st.booleans())
    def deliver(self, pick: int, again: bool) -> None:
        said = self.mail.pop(pick % len(self.mail))
        self.books[said.owner], drifts = self.books[said.owner].take(said)
        found = self.ledger.apply(messages.decode_report(messages.encode(said)))
        assert len(found) == len(drifts) and {(d.rid, d.what) for d in found} == drifts
        self.delivered.append(said)
        if again:
            before = copy.deepcopy(vars(self.ledger))
            assert self.ledger.apply(self.delivered[pick % len(self.delivered)]) == []
            assert vars(self.ledger) == before

    @precondition(lambda self: self.mail and rarely(self))
    @rule(pick=PICKS)
    def lose(self, pick: int) -> None:
        self.mail.pop(pick % len(self.mail))

    @precondition(rarely)
    @rule(order=st.randoms(use_true_random=False), all_end=st.booleans())
    def settle(self, order: Random, all_end: bool) -> None:
        """Everything arrives, in any order, and nothing has leaked."""
        for owner in self.owners:
            while owner.inbox:
                owner.receive()
            for number in list(owner.held) if all_end else ():
                owner.end(number)
            self.mail.append(owner.report(absolute=True))
        while self.mail:
            self.deliver(order.randrange(len(self.mail)), again=False)
        for owner, account in zip(self.owners, self.ledger.accounts, strict=True):
            assert account.requests == owner.held
            assert account.reserved == sum(r.tokens for r in owner.held.values())
            assert (account.used, account.unseen) == (sum(owner.contexts.values()), 0)
            assert account.reserved == account.current == 0 or not all_end

    @invariant()
    def the_ledger_is_what_it_was_told(self) -> None:
        keys = []
        for owner, (book, account) in enumerate(zip(self.books, self.ledger.accounts, strict=True)):
            assert account.requests == book.open()
            reserved = sum(r.tokens for r in account.requests.values())
            current = book.newest.used + book.unseen()
            held = max(reserved + book.outgrown, current)
            assert (account.reserved, account.current, account.held) == (reserved, current, held)
            load = current if self.ledger.by_used else held
            assert self.ledger.load_of(owner) == load
            takes = len(account.requests) < book.newest.max_requests
            room = max(-1, book.newest.capacity - held)
            assert self.ledger.rooms[owner] == (room if takes else -1)
            keys.append((load, len(account.requests), owner))
        assert orders(self.ledger) == [owner for *_, owner in sorted(keys)]

    @invariant()
    def what_an_owner_holds_stays_reserved(self) -> None:
        for owner, account in zip(self.owners, self.ledger.accounts, strict=True):
            if owner.epoch == account.epoch:
                on_its_way = enumerate(owner.inbox, start=owner.received)
                assert account.requests.items() >= {**owner.held, **dict(on_its_way)}.items()


Owners.TestCase.settings = settings(deadline=None, max_examples=300, stateful_step_count=60)
test_the_ledger_follows_real_owners = Owners.TestCase
