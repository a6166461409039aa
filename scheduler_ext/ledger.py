"""The ledger: what every owner has promised to hold, exact to the token. Pure.

Requests are reserved when they are sent and released when their owner says that they ended. A
request is known by its owner and its number there (messages.Report), which is never used again:
reports may come late, twice or out of order, and change nothing the second time.
"""

from bisect import bisect_left, insort
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from sglang_tknp.scheduler_ext.messages import Live, Report

# A key of `Ledger.order` is load, running requests and owner in one integer: it sorts by them.
_OWNER_BITS = 16
_REQUEST_BITS = 24
_OWNER_MASK = (1 << _OWNER_BITS) - 1
MAX_OWNERS = 1 << _OWNER_BITS


def whole_pages(tokens: int, page_size: int) -> int:
    """Tokens rounded up to pages, as a KV pool holds them."""
    return -(-tokens // page_size) * page_size


class Reservation(NamedTuple):
    rid: str
    tokens: int  # KV of the request's whole life, whole pages
    input_tokens: int  # KV of its input, whole pages


# Kinds of drift.
NOT_THERE = "reserved, but not there"
NOT_RESERVED = "there, but not reserved"
LOST = "it never reached its owner"
STARTED_ANEW = "its owner started anew"


class Drift(NamedTuple):
    """A difference between the ledger and an owner's absolute report, now healed."""

    owner: int
    rid: str
    what: str


@dataclass(slots=True)
class Account:
    """One owner: what it can hold, what it has promised, and what it said last."""

    capacity: int = 0
    max_requests: int = 0
    page_size: int = 1
    alive: bool = False  # it has reported
    serving: bool = True  # SGLang has not declared it dead
    requests: dict[int, Reservation] = field(default_factory=dict)  # by number
    next_number: int = 0
    reserved: int = 0
    used: int = 0  # context tokens of what it had received when it last reported
    unseen: int = 0  # input tokens of what it had not
    outgrown: int = 0  # what contexts had beyond their reservations, at its last absolute report
    in_flight: deque[tuple[int, int]] = field(default_factory=deque)  # (number, input tokens)
    waiting: int = 0
    retractions: int = 0
    context_length: int = 0
    epoch: int = 0
    seq: int = 0
    key: int = 0  # its place in Ledger.order

    @property
    def current(self) -> int:
        """Context tokens by now, counting what is on its way."""
        return self.used + self.unseen

    @property
    def held(self) -> int:
        """What no other request may take. Contexts can outgrow capped reservations."""
        return max(self.reserved + self.outgrown, self.used + self.unseen)


class Ledger:
    """Accounts of all owners, in the order in which a new request would choose.

    `rooms[owner]` is the KV that a further request may reserve there, or -1 for an owner that
    takes none. `order` holds one key per owner, least loaded first; `owner_of` reads a key.
    """

    def __init__(self, num_owners: int, *, by_used: bool = False) -> None:
        """`by_used` orders owners by current context instead of reserved context.

        Raises:
            ValueError: more owners than a key has room for.
        """
        if not 0 < num_owners <= MAX_OWNERS:
            raise ValueError(f"a ledger has 1 to {MAX_OWNERS} owners, not {num_owners}")
        self.by_used = by_used
        self.accounts = [Account(key=owner) for owner in range(num_owners)]
        self.rooms = [-1] * num_owners
        self.order = list(range(num_owners))
        self._most_room: int | None = None
        self._measure()

    @staticmethod
    def owner_of(key: int) -> int:
        return key & _OWNER_MASK

    def load_of(self, owner: int) -> int:
        account = self.accounts[owner]
        return account.current if self.by_used else account.held

    def most_room(self) -> int:
        """The largest of `rooms`."""
        if self._most_room is None:
            self._most_room = max(self.rooms)
        return self._most_room

    def _measure(self) -> None:
        """Of the owners that serve: what a request may ask of any of them."""
        accounts = [a for a in self.accounts if a.serving] or self.accounts
        self.largest = max(a.capacity for a in accounts)
        self.smallest = min(a.capacity if a.alive else 0 for a in accounts)
        self.page_size = max(a.page_size for a in accounts)
        self.context_length = max(a.context_length for a in accounts)

    def reserve(self, owner: int, rid: str, tokens: int, input_tokens: int) -> int:
        """Reserve `tokens` for a request that is now sent to `owner`; returns its number.

        Raises:
            ValueError: there is no room; nothing has changed.
        """
        if not 0 <= tokens <= self.rooms[owner]:
            raise ValueError(f"{rid}: owner {owner} has no room for {tokens} KV tokens")
        account = self.accounts[owner]
        number = account.next_number
        account.next_number = number + 1
        account.requests[number] = Reservation(rid, tokens, input_tokens)
        account.reserved += tokens
        account.unseen += input_tokens
        account.in_flight.append((number, input_tokens))
        self._reorder(owner, account)
        return number

    def set_serving(self, owner: int, serving: bool) -> None:
        """What SGLang says of an owner; one that does not serve takes nothing new."""
        self.accounts[owner].serving = serving
        self._measure()
        self._reorder(owner, self.accounts[owner])

    def apply(self, report: Report) -> list[Drift]:
        """Take an owner's report; returns what an absolute report had to heal.

        Of an older process nothing is taken, of an older report only what ended.

        Raises:
            ValueError: there is no such owner.
        """
        if not 0 <= report.owner < len(self.accounts):
            raise ValueError(f"a report of owner {report.owner}, of {len(self.accounts)} owners")
        account = self.accounts[report.owner]
        if report.epoch < account.epoch:
            return []
        drifts = []
        if report.epoch > account.epoch:
            drifts = self._restart(report, account)
        for number in report.ended:
            self._release(account, number)
        if report.seq > account.seq:
            self._take_state(report, account)
            if report.live is not None:
                drifts += self._heal(report, account)
        self._reorder(report.owner, account)
        return drifts

    def _restart(self, report: Report, account: Account) -> list[Drift]:
        """A new process of an owner knows nothing of what the old one held."""
        lost = [
            Drift(report.owner, reservation.rid, STARTED_ANEW)
            for reservation in account.requests.values()
        ]
        account.requests.clear()
        account.in_flight.clear()
        account.reserved = account.unseen = account.outgrown = 0
        account.next_number = account.seq = 0
        account.epoch = report.epoch
        return lost

    def _take_state(self, report: Report, account: Account) -> None:
        account.seq = report.seq
        account.alive = True
        account.max_requests = report.max_requests
        size = (report.capacity, report.page_size, report.context_length)
        if size != (account.capacity, account.page_size, account.context_length):
            account.capacity, account.page_size, account.context_length = size
            self._measure()
        account.used = report.used
        account.waiting = report.waiting
        account.retractions = report.retractions
        account.next_number = max(account.next_number, report.received)
        in_flight = account.in_flight
        while in_flight and in_flight[0][0] < report.received:
            account.unseen -= in_flight.popleft()[1]

    def _heal(self, report: Report, account: Account) -> list[Drift]:
        """Make the ledger what the owner says of the requests that it had received."""
        owner, live = report.owner, {request.number: request for request in report.live or ()}
        drifts = self._renumber(report, account, live.values())
        for number, reservation in list(account.requests.items()):
            if number < report.received and number not in live:
                self._release(account, number)
                drifts.append(Drift(owner, reservation.rid, NOT_THERE))
        account.outgrown = 0
        for number, request in live.items():
            tokens = request.context_tokens
            if number not in account.requests:
                account.requests[number] = Reservation(request.rid, tokens, tokens)
                account.reserved += tokens
                drifts.append(Drift(owner, request.rid, NOT_RESERVED))
            account.outgrown += max(0, tokens - account.requests[number].tokens)
        return drifts

    def _renumber(self, report: Report, account: Account, live: Iterable[Live]) -> list[Drift]:
        """Count as the owner counts, after a request was lost on its way there, or counted twice.

        A request under another number than here tells by how much all from it on are off.
        """
        drifts = []
        for request in sorted(live, key=lambda r: r.number):
            here = account.requests.get(request.number)
            if here is not None and here.rid == request.rid:
                continue
            number = next((n for n, r in account.requests.items() if r.rid == request.rid), None)
            if number is not None:
                drifts += self._shift(report.owner, account, number, request.number - number)
                self._recount_in_flight(account, report.received)
            elif here is not None:
                self._release(account, request.number)
                drifts.append(Drift(report.owner, here.rid, NOT_THERE))
        return drifts

    @staticmethod
    def _recount_in_flight(account: Account, received: int) -> None:
        unseen = [(n, r.input_tokens) for n, r in account.requests.items() if n >= received]
        account.in_flight = deque(unseen)
        account.unseen = sum(tokens for _, tokens in unseen)
        account.next_number = received + len(unseen)

    def _shift(self, owner: int, account: Account, first: int, by: int) -> list[Drift]:
        """Move all numbers from `first` on; requests whose numbers they take never arrived."""
        lost = [n for n in account.requests if first + by <= n < first]
        drifts = [Drift(owner, account.requests[n].rid, LOST) for n in lost]
        for number in lost:
            self._release(account, number)
        account.requests = {n + by * (n >= first): r for n, r in account.requests.items()}
        return drifts

    @staticmethod
    def _release(account: Account, number: int) -> None:
        reservation = account.requests.pop(number, None)
        if reservation is not None:
            account.reserved -= reservation.tokens

    def _reorder(self, owner: int, account: Account) -> None:
        """Put an owner at its new place; the hottest code of the controller."""
        current = account.used + account.unseen
        reserved = account.reserved
        promised = reserved + account.outgrown
        held = promised if promised > current else current
        num_requests = len(account.requests)
        load = current if self.by_used else held
        key = (load << _REQUEST_BITS | num_requests) << _OWNER_BITS | owner
        order = self.order
        del order[bisect_left(order, account.key)]
        insort(order, key)
        account.key = key
        takes = account.alive and account.serving and num_requests < account.max_requests
        self.rooms[owner] = account.capacity - held if takes and held <= account.capacity else -1
        self._most_room = None


def imbalance(loads: Sequence[int]) -> float:
    """Largest load over mean load; 1 is perfect, and no load is perfect."""
    total = sum(loads)
    return max(loads) * len(loads) / total if total else 1.0
