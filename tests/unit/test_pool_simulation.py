"""Pools without servers, large ones and busy ones: everything is served and nothing leaks.

Also the spread of the paper's workload, whose lengths are drawn from the statistics it tells.
"""

import heapq
from collections.abc import Iterator
from dataclasses import dataclass, field
from random import Random
from statistics import mean, median

import pytest

from sglang_tknp.scheduler_ext.ledger import Ledger, imbalance
from sglang_tknp.scheduler_ext.policy import Policy, Request
from sglang_tknp.scheduler_ext.waiting import WaitingQueue
from tests.reports import ledger_of, report

SLOTS = 1 << 20
HUGE = 1 << 40  # an owner's capacity that is never full
# Of the paper's mixed-length requests, input tokens.
SHORTEST, LONGEST, MEAN, MEDIAN = 8223, 126_848, 32_898, 19_048


def paper_lengths(count: int, seed: int = 0) -> list[int]:
    """A lognormal that is clipped to the paper's range; sigma is set for its mean."""
    draw = Random(seed)
    lengths = (int(MEDIAN * draw.lognormvariate(0, 1.12)) for _ in range(count))
    return [min(max(length, SHORTEST), LONGEST) for length in lengths]


@dataclass
class Pool:
    """Owners that hold a request for some seconds and report its end, then and there."""

    ledger: Ledger
    queue: WaitingQueue
    draw: Random
    now: float = 0.0
    running: list[tuple[float, int, int]] = field(default_factory=list)
    seqs: list[int] = field(default_factory=list)
    most_waiting: int = 0
    most_overtaken: int = 0
    finished: int = 0

    def arrive(self, request: Request) -> None:
        self.queue.add(request)
        self.dispatch()

    def dispatch(self) -> None:
        for request, owner in self.queue.take():
            number = self.queue.policy.reserve(request, owner)
            account = self.ledger.accounts[owner]
            assert account.reserved <= account.capacity
            assert len(account.requests) <= account.max_requests
            assert request.only_owner in (None, owner)
            self.most_overtaken = max(self.most_overtaken, request.overtaken)
            end = self.now + self.draw.uniform(2, 60)
            heapq.heappush(self.running, (end, owner, number))
        self.most_waiting = max(self.most_waiting, len(self.queue))

    def end_one(self) -> None:
        self.now, owner, number = heapq.heappop(self.running)
        account = self.ledger.accounts[owner]
        self.seqs[owner] += 1
        self.ledger.apply(
            report(
                owner,
                self.seqs[owner],
                capacity=account.capacity,
                max_requests=account.max_requests,
                received=account.next_number,
                used=0,  # reservations alone decide here
                ended=(number,),
            )
        )
        self.finished += 1
        self.dispatch()

    def run(self, arrivals: Iterator[tuple[float, Request]]) -> None:
        for when, request in arrivals:
            while self.running and self.running[0][0] <= when:
                self.end_one()
            self.now = when
            self.arrive(request)
        while self.running:
            self.end_one()


def pool_of(ledger: Ledger, max_overtakes: int = 16) -> Pool:
    queue = WaitingQueue(Policy(ledger), max_overtakes)
    return Pool(ledger, queue, Random(1), seqs=[1] * len(ledger.accounts))


def arrivals(
    count: int, per_second: float, sizes: list[int], pinned_to: tuple[int, ...] = ()
) -> Iterator[tuple[float, Request]]:
    """Poisson arrivals; one of a hundred asks for one of the given owners."""
    draw, now = Random(2), 0.0
    for number in range(count):
        now += draw.expovariate(per_second)
        tokens = draw.choice(sizes)
        owner = draw.choice(pinned_to) if pinned_to and number % 100 == 0 else None
        level = draw.choice((0, 0, 0, 1))
        yield now, Request(f"r{number}", tokens, tokens, only_owner=owner, level=level)


def assert_served(pool: Pool, count: int, max_overtakes: int) -> None:
    assert pool.finished == count
    assert len(pool.queue) == 0
    assert [a.reserved for a in pool.ledger.accounts] == [0] * len(pool.ledger.accounts)
    assert not any(a.requests for a in pool.ledger.accounts)
    assert pool.most_overtaken <= max_overtakes


def test_256_owners_serve_100_000_requests_of_which_thousands_wait() -> None:
    pool = pool_of(ledger_of(*[1_000_000] * 256, max_requests=SLOTS))
    pool.run(arrivals(100_000, 400.0, [9_000, 19_000, 33_000, 120_000]))
    assert_served(pool, 100_000, max_overtakes=16)
    assert pool.most_waiting > 2000
    assert sum(pool.queue.overtakes) > 0


@pytest.mark.parametrize("max_overtakes", [0, 3])
def test_uneven_owners_serve_requests_that_choose_and_that_do_not(max_overtakes: int) -> None:
    capacities = [150_000 + 10_000 * owner for owner in range(16)]
    pool = pool_of(ledger_of(*capacities, max_requests=6), max_overtakes)
    pool.run(arrivals(5000, 2.0, [9_000, 19_000, 120_000, 290_000], pinned_to=(15,)))
    assert_served(pool, 5000, max_overtakes)
    assert pool.most_waiting > 100


def released_at_once(lengths: list[int], owners: int = 8) -> list[int]:
    """Tokens that each owner has reserved after all requests came at once."""
    pool = pool_of(ledger_of(*[HUGE] * owners, max_requests=SLOTS))
    for number, tokens in enumerate(lengths):
        pool.queue.add(Request(f"r{number}", tokens, tokens))
    pool.dispatch()
    assert len(pool.running) == len(lengths)
    return [account.reserved for account in pool.ledger.accounts]


def test_imbalance_is_largest_over_mean() -> None:
    assert imbalance([0, 0]) == 1.0
    assert imbalance([5, 5, 5]) == 1.0
    assert imbalance([30, 10, 20]) == 1.5


def test_a_thousand_equal_requests_spread_evenly() -> None:
    assert imbalance(released_at_once([1024] * 1000)) <= 1.05


@pytest.mark.parametrize("seed", range(5))
def test_the_papers_mixed_lengths_spread_evenly(seed: int) -> None:
    lengths = paper_lengths(1000, seed)
    assert mean(lengths) == pytest.approx(MEAN, rel=0.1)
    assert median(lengths) == pytest.approx(MEDIAN, rel=0.1)
    assert imbalance(released_at_once(lengths)) <= 1.15
