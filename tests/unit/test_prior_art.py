"""What went wrong with SGLang's data-parallel controller, case by case, must not happen here.

A test's number and its threads (SGL is sgl-project/sglang) are those of our list of prior art.
Only the cases that pure code can show are here; those with real servers are elsewhere.
"""

from random import Random
from typing import Any

import pytest

from sglang_tknp.scheduler_ext.ledger import Ledger, imbalance
from sglang_tknp.scheduler_ext.messages import Live, Report
from sglang_tknp.scheduler_ext.policy import Policy, Request
from sglang_tknp.scheduler_ext.waiting import WaitingQueue
from tests.reports import ledger_of, report
from tests.unit.test_pool_simulation import HUGE, SLOTS, paper_lengths

OWNERS = 8


def pool(owners: int = OWNERS, capacity: int = HUGE, *, by_used: bool = False) -> Ledger:
    return ledger_of(*[capacity] * owners, by_used=by_used, max_requests=SLOTS)


def loads(ledger: Ledger) -> list[int]:
    return [ledger.load_of(owner) for owner in range(len(ledger.accounts))]


def tell(ledger: Ledger, owner: int, **changes: Any) -> None:
    """The owner's next report; it has received everything."""
    account = ledger.accounts[owner]
    kept = {"capacity": account.capacity, "received": account.next_number}
    ledger.apply(report(owner, account.seq + 1, max_requests=SLOTS, **{**kept, **changes}))


def place(policy: Policy, rid: str, tokens: int, only: int | None = None) -> int | None:
    """Send a request at once, or not at all; returns its owner."""
    request = Request(rid, tokens, tokens, only_owner=only)
    owner = policy.pick(request)
    if owner is not None:
        policy.reserve(request, owner)
    return owner


@pytest.mark.parametrize("by_used", [False, True])
def test_case_01_skewed_lengths_load_all_owners_alike(by_used: bool) -> None:
    """SGL#6872, #7379, #8024, #11469: ranks were unbalanced.

    Round robin puts every long prompt of this order on one owner.
    """
    ledger = pool(by_used=by_used)
    policy = Policy(ledger)
    for number in range(800):
        assert place(policy, f"r{number}", 100_000 if number % OWNERS == 0 else 1000) is not None
    # The most loaded owner was the least loaded one before it got its last request.
    assert max(loads(ledger)) - min(loads(ledger)) <= 100_000
    assert imbalance(loads(ledger)) <= 1.05


def test_case_01_the_papers_lengths_stay_even_as_they_come_and_go() -> None:
    """SGL#6872, #11469: loads are compared again and again, not only after a burst."""
    ledger, draw = pool(), Random(0)
    policy = Policy(ledger)
    running: list[tuple[int, int]] = []
    for number, tokens in enumerate(paper_lengths(4000)):
        owner = place(policy, f"r{number}", tokens)
        assert owner is not None
        running.append((owner, ledger.accounts[owner].next_number - 1))
        if len(running) > 400:
            owner, ended = running.pop(draw.randrange(len(running)))
            tell(ledger, owner, ended=(ended,))
            assert imbalance(loads(ledger)) <= 1.15


@pytest.mark.parametrize(("by_used", "expected"), [(False, 1), (True, 0)])
def test_case_02_a_policy_does_what_its_name_says(by_used: bool, expected: int) -> None:
    """SGL#16080, #16968, #19168: "round_robin" was not round robin.

    Owner 0 has the smaller contexts, owner 1 the smaller reservations.
    """
    ledger = pool(2, by_used=by_used)
    ledger.reserve(0, "short with much to say", 5000, 10)
    ledger.reserve(1, "long with little to say", 1000, 900)
    assert loads(ledger) == ([10, 900] if by_used else [5000, 1000])
    assert place(Policy(ledger), "next", 100) == expected


def test_case_02_an_explicit_owner_is_honoured() -> None:
    """SGL#16080, #19168: a rank that was chosen outside was not supported."""
    policy = Policy(pool())
    chosen = [Random(number).randrange(OWNERS) for number in range(200)]
    assert [place(policy, f"r{n}", 500, owner) for n, owner in enumerate(chosen)] == chosen
    full = Policy(pool(2, capacity=100))
    assert place(full, "a", 80, 0) == 0
    assert place(full, "b", 80, 0) is None  # it waits for its owner, though another is free


@pytest.mark.parametrize("by_used", [False, True])
def test_case_03_a_burst_within_one_report_interval_spreads(by_used: bool) -> None:
    """SGL#21699: a burst under `total_tokens` landed on one rank, whose load was stale."""
    ledger = pool(by_used=by_used)
    queue = WaitingQueue(Policy(ledger))
    for number in range(1000):
        queue.add(Request(f"r{number}", 2048, 1024))
    for request, owner in queue.take():
        queue.policy.reserve(request, owner)
    assert [len(account.requests) for account in ledger.accounts] == [125] * OWNERS
    assert imbalance(loads(ledger)) == 1.0


def reports_of_a_short_life() -> list[Report]:
    """An owner gets four requests of 100 tokens, 60 of them input; two end."""
    third, fourth = Live(2, "r2", 70), Live(3, "r3", 60)
    said: list[dict[str, Any]] = [
        {"received": 1, "used": 60},
        {"received": 2, "used": 125},
        {"received": 2, "used": 62, "ended": (0,)},
        {"received": 3, "used": 128},
        {"received": 4, "used": 130, "ended": (1,)},
        {"received": 4, "used": 130, "live": (third, fourth)},
    ]
    return [
        report(0, seq, capacity=1000, max_requests=SLOTS, **fields)
        for seq, fields in enumerate(said, start=2)
    ]


@pytest.mark.parametrize("by_used", [False, True])
def test_case_04_late_double_and_reordered_reports_end_in_the_same_ledger(by_used: bool) -> None:
    """SGL#25142, #25235, #25736: decode loads were stale, and some KV counted twice."""
    for seed in range(200):
        ledger, draw = pool(1, capacity=1000, by_used=by_used), Random(seed)
        for number in range(4):
            ledger.reserve(0, f"r{number}", 100, 60)
        said = [r for r in reports_of_a_short_life() for _ in range(draw.randint(1, 3))]
        draw.shuffle(said)
        for one in said:
            ledger.apply(one)
        account = ledger.accounts[0]
        assert (account.reserved, account.current) == (200, 130)
        assert [r.rid for r in account.requests.values()] == ["r2", "r3"]
        assert loads(ledger) == [130 if by_used else 200]
        assert ledger.rooms == [800]


def test_case_04_what_is_on_its_way_counts_once() -> None:
    """SGL#25736: KV that was set aside counted again once it was used."""
    ledger = pool(1, capacity=1000, by_used=True)
    for number in range(4):
        ledger.reserve(0, f"r{number}", 100, 60)
    found = [loads(ledger)[0]]
    for one in reports_of_a_short_life():
        ledger.apply(one)
        found.append(loads(ledger)[0])
    # On their way: 4, 3, 2, 2, 1, 0 and 0 prompts of 60.
    assert found == [240, 60 + 180, 125 + 120, 62 + 120, 128 + 60, 130, 130]


def test_case_05_uniform_requests_get_uniform_owners() -> None:
    """SGL#12832: all requests went to the first rank."""
    policy = Policy(pool())
    owners = [place(policy, f"r{number}", 700) for number in range(10 * OWNERS)]
    assert owners == list(range(OWNERS)) * 10


def test_case_05_requests_that_end_at_once_reserve_nothing_and_still_spread() -> None:
    """SGL#12832, with requests so short that all loads look alike."""
    policy = Policy(pool())
    owners = [place(policy, f"r{number}", 0) for number in range(10 * OWNERS)]
    assert owners == list(range(OWNERS)) * 10


def test_case_18_whole_lives_are_admitted_and_never_more() -> None:
    """SGL#6027, #38202: memory ran out, since prompts fitted and their outputs did not.

    Owners here run every request to its last token, and none ever needs more than it has.
    """
    ledger, draw = pool(4, capacity=10_000), Random(3)
    queue = WaitingQueue(Policy(ledger))
    for number in range(500):
        inputs = draw.randint(1, 2000)
        queue.add(Request(f"r{number}", inputs + draw.randint(1, 4000), inputs))
    rounds = 0
    while len(queue):
        for request, owner in queue.take():
            queue.policy.reserve(request, owner)
        for owner, account in enumerate(ledger.accounts):
            at_the_end = sum(request.tokens for request in account.requests.values())
            assert at_the_end == account.reserved <= account.capacity
            tell(ledger, owner, used=at_the_end)
            with pytest.raises(ValueError, match="no room"):
                ledger.reserve(owner, "one too many", 10_001 - at_the_end, 1)
            tell(ledger, owner, ended=tuple(account.requests)[:2])
        rounds += 1
    assert rounds > 10


def test_case_20_explicit_owners_are_honoured_and_their_imbalance_is_told() -> None:
    """SGL#26611, #26612, #35964, #37401, #9571: hints gave one rank 14.18M tokens, another 5.66M.

    Those who choose get what they chose; those who do not make up for it.
    """
    ledger = pool(2)
    policy = Policy(ledger)
    for number in range(1418):
        assert place(policy, f"a{number}", 10_000, 0) == 0
    for number in range(566):
        assert place(policy, f"b{number}", 10_000, 1) == 1
    assert loads(ledger) == [14_180_000, 5_660_000]
    assert imbalance(loads(ledger)) == pytest.approx(1418 / 992)
    free = [place(policy, f"c{number}", 10_000) for number in range(852)]
    assert free == [1] * 852
    assert imbalance(loads(ledger)) == 1.0
