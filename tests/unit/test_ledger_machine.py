"""Proves that the ledger tracks real owners, however their reports are lost, late or doubled.

A machine of owners that receive, grow, end and restart, while a mailbox hands their reports to the
ledger in any order; a model of the docstrings is recomputed after every step.
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
    NOT_THERE,
    STARTED_ANEW,
    Ledger,
    Reservation,
)
from sglang_tknp.scheduler_ext.messages import Live, Report
from tests.reports import orders, report

NUM_OWNERS = 2


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
