"""Proves by examples what the ledger does with reservations and reports."""

import pytest

from sglang_tknp.scheduler_ext import messages
from sglang_tknp.scheduler_ext.ledger import (
    LOST,
    MAX_OWNERS,
    NOT_THERE,
    STARTED_ANEW,
    Drift,
    Ledger,
)
from sglang_tknp.scheduler_ext.messages import Header, Live
from tests.reports import ledger_of, orders, report

NUM_OWNERS = 2


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


def test_an_owner_that_counted_one_more_and_has_all_is_followed() -> None:
    ledger = ledger_of(100)
    ledger.reserve(0, "a", 10, 5)
    ledger.apply(report(0, 2, received=2, used=5, live=(Live(1, "a", 5),)))
    assert ledger.reserve(0, "b", 10, 5) == 2
    assert ledger.apply(report(0, 3, received=3, used=5, ended=(1,), live=(Live(2, "b", 5),))) == []


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
