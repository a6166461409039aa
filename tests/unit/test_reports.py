"""Proves that an owner's reports tell the ledger all, also when one gets lost on the way."""

from types import SimpleNamespace
from typing import Any

import pytest
import zmq

from sglang_tknp.scheduler_ext import reports
from sglang_tknp.scheduler_ext.ledger import NOT_THERE, Drift, Ledger
from sglang_tknp.scheduler_ext.messages import Report, decode_report
from sglang_tknp.scheduler_ext.reports import OwnerReporter


class Wire:
    """The socket of a reporter. What is sent reaches the ledger, unless `broken` or `full`."""

    def __init__(self) -> None:
        self.ledger = Ledger(1)
        self.sent: list[Report] = []
        self.drifts: list[Drift] = []
        self.broken = self.full = False

    def send(self, frame: bytes, flags: int) -> None:
        assert flags == zmq.NOBLOCK, "a step must never wait for the controller"
        if self.full:
            raise zmq.Again
        self.sent.append(decode_report(frame))
        if not self.broken:
            self.drifts += self.ledger.apply(self.sent[-1])


def request(rid: str, context: int = 5) -> Any:
    return SimpleNamespace(rid=rid, seqlen=context, retraction_count=0)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Any:
    clock = SimpleNamespace(now=100.0)
    times = SimpleNamespace(monotonic=lambda: clock.now, time_ns=lambda: 1)
    monkeypatch.setattr(reports, "time", times)
    return clock


@pytest.fixture
def wire() -> Wire:
    return Wire()


@pytest.fixture
def reporter(wire: Wire, clock: Any) -> OwnerReporter:
    scheduler = SimpleNamespace(
        page_size=4,
        max_total_num_tokens=105,
        max_running_requests=8,
        model_config=SimpleNamespace(context_len=1000),
        waiting_queue=[],
    )
    return OwnerReporter(scheduler, 0, wire)


def receive(wire: Wire, reporter: OwnerReporter, *rids: str) -> list[Any]:
    made = [request(rid) for rid in rids]
    for one in made:
        wire.ledger.reserve(0, one.rid, 20, 8)
        reporter.on_created(one)
    return made


def test_the_first_report_says_what_the_owner_can_hold(wire: Wire, reporter: OwnerReporter) -> None:
    account = wire.ledger.accounts[0]
    assert account.capacity == 100, "whole pages of what SGLang leaves to requests"
    assert (account.max_requests, account.page_size, account.context_length) == (8, 4, 1000)


def test_ends_are_told_at_once_whatever_the_order(wire: Wire, reporter: OwnerReporter) -> None:
    receive(wire, reporter, "a", "b", "c")
    reporter.on_ended(["b", "unknown"])
    assert [r.rid for r in wire.ledger.accounts[0].requests.values()] == ["a", "c"]
    assert wire.ledger.accounts[0].used == 16, "five tokens are two pages"
    reporter.on_ended(["c", "a"])
    assert wire.ledger.accounts[0].reserved == wire.ledger.accounts[0].used == 0
    before = len(wire.sent)
    reporter.on_ended(["a"])
    assert len(wire.sent) == before, "nobody is told twice"


def test_a_rid_that_is_used_again_ends_twice(wire: Wire, reporter: OwnerReporter) -> None:
    """A client may abort a request and send it anew before its owner has let go of the first."""
    receive(wire, reporter, "same", "same")
    reporter.on_ended(["same"])
    assert list(wire.ledger.accounts[0].requests) == [1]
    reporter.on_ended(["same"])
    assert not wire.ledger.accounts[0].requests and not reporter.requests
    assert not reporter.numbers


def test_steps_report_now_and_then(wire: Wire, reporter: OwnerReporter, clock: Any) -> None:
    (one,) = receive(wire, reporter, "a")
    before = len(wire.sent)
    for _ in range(100):  # ten seconds of steps
        clock.now += 0.1001
        one.seqlen += 1
        reporter.report_when_due()
        reporter.report_when_due()
    told = wire.sent[before:]
    assert len(told) == 100
    assert not wire.drifts
    assert 9 <= sum(report.live is not None for report in told) <= 11
    assert wire.ledger.accounts[0].used == 108


@pytest.mark.parametrize("how", ["broken", "full"])
def test_a_lost_last_report_is_made_up_for(
    wire: Wire, reporter: OwnerReporter, clock: Any, how: str
) -> None:
    """Nothing runs afterwards, so nothing else would ever be said."""
    receive(wire, reporter, "a")
    reporter.report_before_sleep()
    setattr(wire, how, True)
    reporter.on_ended(["a"])
    reporter.report_before_sleep()
    setattr(wire, how, False)
    assert wire.ledger.accounts[0].reserved == 20
    for _ in range(12):
        clock.now += 1
        reporter.report_before_sleep()
    assert wire.ledger.accounts[0].reserved == 0
    assert wire.drifts == [Drift(0, "a", NOT_THERE)], "and the ledger says whom it had missed"


def test_an_idle_owner_says_little(wire: Wire, reporter: OwnerReporter, clock: Any) -> None:
    before = len(wire.sent)
    for _ in range(60):
        clock.now += 1
        reporter.report_before_sleep()
    assert len(wire.sent) - before == 6


def test_retractions_count_for_requests_that_run_and_that_ended(
    wire: Wire, reporter: OwnerReporter
) -> None:
    first, second = receive(wire, reporter, "a", "b")
    first.retraction_count, second.retraction_count = 2, 1
    reporter.on_ended(["a"])
    assert wire.ledger.accounts[0].retractions == 3
    reporter.on_ended(["b"])
    assert wire.ledger.accounts[0].retractions == 3
