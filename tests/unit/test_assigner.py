"""The controller's decisions: what a request needs, who is refused, who waits, who expires."""

from http import HTTPStatus
from typing import Any

import pytest

from sglang_tknp.config import TknpConfig
from sglang_tknp.scheduler_ext.admission import AdmissionSettings, RefusedError, admit
from sglang_tknp.scheduler_ext.assigner import Assigner, AssignerSettings
from sglang_tknp.scheduler_ext.ledger import Ledger
from sglang_tknp.scheduler_ext.messages import Header, Live, Report
from sglang_tknp.scheduler_ext.view import pool_state, waiting_line
from tests import reports

CAPACITY = 1000


def report(owner: int, seq: int = 1, **state: Any) -> Report:
    whole = {"capacity": CAPACITY, "max_requests": 100, "context_length": 4096, **state}
    return reports.report(owner, seq, **whole)


class Pool:
    """An Assigner, and what it sent and refused."""

    def __init__(self, num_owners: int = 2, **settings: Any) -> None:
        self.sent: list[tuple[str, int, float]] = []
        self.refused: list[tuple[str, HTTPStatus, str]] = []
        self.assigner = Assigner(
            num_owners,
            AssignerSettings(**settings),
            lambda request, owner, waited: self.sent.append((request.rid, owner, waited)),
            lambda rid, _, status, message: self.refused.append((rid, status, message)),
        )
        self.seqs = [0] * num_owners
        for owner in range(num_owners):
            self.report(owner)

    def report(self, owner: int, now: float = 0.0, **state: Any) -> None:
        self.seqs[owner] += 1
        self.assigner.on_report(report(owner, self.seqs[owner], **state), now)

    def ask(
        self, rid: str, tokens: int, output: int | None = 0, now: float = 0.0, **f: Any
    ) -> None:
        self.assigner.on_request(Header(rid, tokens, output, **f), None, now)

    def fill_and_empty(self, count: int) -> None:
        for number in range(count):
            self.ask(f"small{number}", 1)
            self.report(0, received=number + 2, ended=(number + 1,))

    def fill(self) -> None:
        for owner in range(len(self.seqs)):
            self.ask(f"full{owner}", CAPACITY - 10, 10)
        self.sent.clear()


def need(
    header: Header, settings: AdmissionSettings | None = None, **state: Any
) -> tuple[int, int]:
    """(whole life, input) in KV tokens."""
    ledger = Ledger(2)
    for owner in (0, 1):
        ledger.apply(report(owner, **state))
    request = admit(header, None, 0.0, ledger, settings or AdmissionSettings())
    return request.tokens, request.input_tokens


def test_a_request_needs_its_input_and_its_expected_output() -> None:
    assert need(Header("a", 100, 50)) == (150, 100)
    assert need(Header("a", 100, 50), page_size=64, capacity=960) == (192, 128)
    capped = AdmissionSettings(expected_output_tokens=20)
    assert need(Header("a", 100, 50), capped) == (120, 100)
    assert need(Header("a", 100, 5), capped) == (105, 100)
    assert need(Header("a", 100, None), capped) == (120, 100)


def test_a_request_that_names_no_length_gets_the_stated_default() -> None:
    assert need(Header("a", 100, None), capacity=10_000) == (100 + 1024, 100)
    assert need(Header("a", 100, None)) == (CAPACITY, 100), "less, where that would not fit"
    assert need(Header("a", CAPACITY - 5, None)) == (CAPACITY, CAPACITY - 5)


def test_sglangs_own_limits_bound_the_output() -> None:
    assert need(Header("a", 100, 500), context_length=150) == (100 + 48, 100)
    limited = AdmissionSettings(max_new_tokens=30)
    assert need(Header("a", 100, 500), limited) == (130, 100)
    assert need(Header("a", 100, None), limited) == (130, 100)


@pytest.mark.parametrize("output", [901, None])
def test_what_no_owner_could_hold_is_refused_with_the_numbers(output: int | None) -> None:
    tokens = 100 if output else CAPACITY - 4
    with pytest.raises(RefusedError, match=rf"needs {CAPACITY + 1} KV .*holds {CAPACITY}") as error:
        need(Header("a", tokens, output))
    assert error.value.status == HTTPStatus.BAD_REQUEST
    assert need(Header("a", 100, 900)) == (CAPACITY, 100), "to the last token it fits"


def test_the_largest_owner_decides_what_fits() -> None:
    pool = Pool()
    pool.report(1, capacity=3 * CAPACITY)
    pool.ask("large", 2 * CAPACITY)
    pool.ask("here", CAPACITY + 1, routed_dp_rank=0)
    assert pool.sent == [("large", 1, 0.0)]
    rid, status, message = pool.refused[0]
    assert (rid, status) == ("here", HTTPStatus.BAD_REQUEST) and "node 0 of this pool" in message


def test_explicit_owners() -> None:
    pool = Pool()
    pool.ask("second", 10, routed_dp_rank=1)
    pool.ask("nobody", 10, routed_dp_rank=2)
    pool.ask("negative", 10, routed_dp_rank=-1)
    assert pool.sent == [("second", 1, 0.0)]
    assert [status for _, status, _ in pool.refused] == [HTTPStatus.BAD_REQUEST] * 2
    assert pool.assigner.refusals == {("unknown_owner", "any"): 2}


def test_an_owner_that_stops_serving_takes_nothing_new() -> None:
    pool = Pool()
    pool.ask("full", CAPACITY - 10, 10, routed_dp_rank=1)
    pool.ask("waits", 10, routed_dp_rank=1)
    pool.assigner.on_status([True, False], 0.0)
    pool.ask("dead", 10, routed_dp_rank=1)
    pool.ask("free", 10)
    assert pool.sent == [("full", 1, 0.0), ("free", 0, 0.0)]
    assert [(rid, status.value) for rid, status, _ in pool.refused] == [
        ("waits", 503),
        ("dead", 503),
    ]
    pool.assigner.on_status([True, True], 0.0)
    pool.report(1, received=1, ended=(0,))
    pool.ask("again", 10, routed_dp_rank=1)
    assert pool.sent[-1] == ("again", 1, 0.0)


def test_who_waits_is_sent_when_an_owner_reports_an_end() -> None:
    pool = Pool()
    pool.fill()
    pool.ask("waits", 100, now=1.0)
    assert pool.sent == []
    pool.report(1, now=3.5, received=1, ended=(0,))
    assert pool.sent == [("waits", 1, 2.5)]


def test_a_newcomer_does_not_jump_an_exhausted_queue() -> None:
    pool = Pool(num_owners=1, max_overtakes=0)
    pool.ask("half", CAPACITY // 2)
    pool.ask("large", CAPACITY - 10, 10)
    pool.ask("small", 1)
    assert [rid for rid, *_ in pool.sent] == ["half"], "small would pass large"


def test_waiting_times_out_by_the_controllers_clock() -> None:
    pool = Pool(waiting_timeout=5.0)
    pool.fill()
    assert pool.assigner.next_expiry() is None
    pool.ask("first", 100, now=1.0)
    pool.ask("second", 100, now=2.0)
    assert pool.assigner.next_expiry() == 6.0
    pool.assigner.expire(5.9)
    assert pool.refused == []
    pool.assigner.expire(6.0)
    assert pool.refused == [("first", 503, "Request waiting timeout reached.")]
    assert pool.assigner.next_expiry() == 7.0
    assert pool.assigner.on_abort("second", 7.0, everything=False)[0].rid == "second"
    pool.assigner.expire(100.0)
    assert len(pool.refused) == 1 and pool.assigner.next_expiry() is None


def test_a_full_queue_lets_through_whom_an_owner_has_room_for() -> None:
    pool = Pool(num_owners=1, max_queued=1)
    pool.ask("half", CAPACITY // 2)
    pool.ask("large", CAPACITY - 10, 10)
    pool.ask("small", 1)
    pool.ask("large too", CAPACITY - 10, 10)
    assert [rid for rid, *_ in pool.sent] == ["half", "small"]
    assert [rid for rid, *_ in pool.refused] == ["large too"]


def test_sent_requests_are_not_kept_for_their_time_out() -> None:
    """Behind one that waits long, the frames of all that passed would pile up."""
    pool = Pool(num_owners=1, waiting_timeout=100.0, max_overtakes=1000)
    pool.ask("half", CAPACITY // 2)
    pool.ask("large", CAPACITY - 10, 10, now=1.0)
    pool.fill_and_empty(50)
    assert len(pool.assigner.queue) == 1
    assert not [r for entry in pool.assigner._by_age for r in entry if hasattr(r, "payload")]


def test_a_full_queue_refuses_the_newest() -> None:
    pool = Pool(max_queued=2)
    pool.fill()
    for rid in ("a", "b", "c"):
        pool.ask(rid, 10)
    assert pool.refused == [("c", 503, "The request queue is full.")]
    none_may_wait = Pool(max_queued=0)
    none_may_wait.fill()
    none_may_wait.ask("a", 10)
    assert none_may_wait.refused == [("a", 503, "The request queue is full.")]


@pytest.mark.parametrize("low_first", [False, True])
def test_a_full_queue_makes_way_for_priority(low_first: bool) -> None:
    sign = -1 if low_first else 1
    admission = AdmissionSettings(priorities=True, low_values_first=low_first)
    pool = Pool(max_queued=2, admission=admission)
    pool.fill()
    pool.ask("none", 10)
    pool.ask("low", 10, priority=1 * sign)
    pool.ask("high", 10, priority=9 * sign)
    assert [rid for rid, *_ in pool.refused] == ["none"]
    pool.ask("equal", 10, priority=1 * sign)
    assert [rid for rid, *_ in pool.refused] == ["none", "equal"]
    pool.report(0, received=1, ended=(0,))
    assert [rid for rid, *_ in pool.sent] == ["high", "low"]


def test_aborts_take_waiting_requests_by_prefix_or_all() -> None:
    pool = Pool()
    pool.fill()
    for rid in ("a-1", "a-2", "b"):
        pool.ask(rid, 10)
    assert [r.rid for r in pool.assigner.on_abort("a-", 0.0, everything=False)] == ["a-1", "a-2"]
    assert [r.rid for r in pool.assigner.on_abort("", 0.0, everything=True)] == ["b"]
    assert not pool.assigner.queue


def test_what_is_seen_from_outside() -> None:
    pool = Pool()
    pool.fill()
    pool.ask("huge", 2 * CAPACITY)
    pool.ask("waits", 100, now=1.0)
    pool.ask("pinned", 100, now=1.0, routed_dp_rank=1)
    pool.report(0, received=1, used=900, waiting=1, retractions=3, live=())
    state = pool_state(pool.assigner, TknpConfig())
    assert state["waiting"] == 1 and state["refusals"] == {"too_large": 1}
    assert state["owners"][1]["waiting"] == 1 and state["owners"][1]["reserved"] == CAPACITY
    first = state["owners"][0]
    assert (first["drifts"], first["retractions"], first["queued"]) == (1, 3, 1)
    line = waiting_line(pool.assigner, 3.0)
    assert "wait for an owner: 1;" in line and "2.0 s for 100 KV tokens" in line


def test_a_request_that_only_the_owner_knows_is_taken_over() -> None:
    pool = Pool()
    pool.report(0, received=1, live=(Live(0, "stray", 40),))
    assert pool.assigner.ledger.accounts[0].reserved == 40
    assert pool.assigner.drifts == [1, 0]
