"""Owners' reports for tests, and ledgers of owners that have reported."""

from typing import Any

import msgspec

from sglang_tknp.scheduler_ext.ledger import Ledger
from sglang_tknp.scheduler_ext.messages import Report

BLANK = Report(
    owner=0,
    epoch=1,
    seq=1,
    capacity=100,
    max_requests=10,
    page_size=1,
    context_length=1000,
    received=0,
    used=0,
    waiting=0,
)


def report(owner: int = 0, seq: int = 1, **changes: Any) -> Report:
    return msgspec.structs.replace(BLANK, owner=owner, seq=seq, **changes)


def ledger_of(*capacities: int, by_used: bool = False, max_requests: int = 10) -> Ledger:
    ledger = Ledger(len(capacities), by_used=by_used)
    for owner, capacity in enumerate(capacities):
        ledger.apply(report(owner, capacity=capacity, max_requests=max_requests))
    return ledger


def orders(ledger: Ledger) -> list[int]:
    return [ledger.owner_of(key) for key in ledger.order]
