"""Proves who gets a request, against an oracle that is written from the docstrings."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_tknp.scheduler_ext.ledger import Ledger, whole_pages
from sglang_tknp.scheduler_ext.policy import (
    Policy,
    choose,
    expected_output,
)
from sglang_tknp.scheduler_ext.prefixes import BLOCK_TOKENS, PrefixIndex
from tests.reports import ledger_of, report
from tests.unit.oracle import a_request, brute_force, load


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
    assert Policy(ledger).pick(a_request("r", tokens), closed) == expected
    for only in range(len(ledger.accounts)):
        found = Policy(ledger).pick(a_request("r", tokens, only), closed)
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
    found = policy.pick(a_request("r", tokens, prefix=PATH), closed)
    assert found == (least if nearest is None else nearest)
    assert policy.prefix_hits == (nearest is not None)
    assert policy.pick(a_request("r", tokens), closed) == least
    assert Policy(ledger).pick(a_request("r", tokens, prefix=PATH), closed) == least


def test_a_prefix_follows_its_owner_while_that_has_room_and_little_more_load() -> None:
    policy = Policy(ledger_of(1000, 1000, 1000), PrefixIndex(3), prefix_slack=300)
    wanted = a_request("r", 200, prefix=(1, 2))
    policy.reserve(a_request("first", 300, prefix=(1, 2, 3)), 0)
    assert policy.pick(wanted) == 0
    assert policy.pick(a_request("other", 200, prefix=(9, 2))) == 1
    assert policy.pick(a_request("large", 701, prefix=(1, 2))) == 1
    policy.reserve(a_request("one more", 1), 0)
    assert policy.pick(wanted) == 1
    policy.reserve(a_request("holder too", 1, prefix=(1, 2)), 1)
    policy.reserve(a_request("busier", 300), 1)
    policy.reserve(a_request("busiest", 400), 0)
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
