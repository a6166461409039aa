"""Requests, and the choice of an owner the slow way, written from the docstrings."""

from collections.abc import Collection
from typing import Any

from sglang_tknp.scheduler_ext.ledger import Ledger
from sglang_tknp.scheduler_ext.policy import (
    Policy,
    Request,
)
from sglang_tknp.scheduler_ext.waiting import WaitingQueue
from tests.reports import report

SLOTS = 1 << 20


def a_request(rid: str, tokens: int, only_owner: int | None = None, **changes: Any) -> Request:
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
