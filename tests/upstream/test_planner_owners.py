"""Proves that the simulator chooses owners as the live controller does, on the paper's workload."""

from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from sglang_tknp.launch.planner import trace
from sglang_tknp.launch.planner.simulate import Options, Run, Simulation
from sglang_tknp.launch.planner.trace import Arrival
from sglang_tknp.scheduler_ext import forward
from tests.unit.pool_oracle import Toy
from tests.upstream import controller_pool
from tests.upstream.controller_pool import Pool, request

pytestmark = pytest.mark.upstream
NUM_OWNERS = 4
PAPER = 220_000  # KV tokens of a node: 106 GiB for Llama 3.1 405B
SCARCE = (206_000, 130_000, 150_000, 206_000)  # so that many wait, and overtake
MIXED = trace.paper_mixed(1024)


class LivePool(Pool):
    """Owners of given sizes, that get and end requests when a simulation says so."""

    def __init__(self, capacity: Sequence[int], options: Options) -> None:
        self.capacity = capacity
        super().__init__(by_used=options.by_used, max_overtakes=options.max_overtakes or 0)
        self.holds: list[dict[str, int]] = [{} for _ in capacity]  # number by rid
        self.counts = [0] * len(capacity)
        self.owner_of: dict[str, int] = {}

    def report(self, owner: int, **state: Any) -> None:
        sizes = {"capacity": self.capacity[owner], "context_length": 1 << 20}
        super().report(owner, **sizes, **state)

    def arrive(self, rid: str, arrival: Arrival) -> None:
        manager = SimpleNamespace(
            tknp_gate=self.gate, tknp_with_prefix=False, send_to_scheduler=self.to_controller
        )
        sent = request(rid, arrival.input_tokens, arrival.output_tokens)
        forward.around_dispatch_to_scheduler(self.stock_dispatch, manager, sent)
        self.controller.on_message(self.tokenizer.recv_multipart(copy=False))
        self.take()

    def end(self, owner: int, rids: Sequence[str], used: int) -> None:
        """The owner says that these are over, and how long its contexts are."""
        numbers = tuple(self.holds[owner].pop(rid) for rid in rids)
        self.report(owner, received=self.counts[owner], used=used, ended=numbers)
        self.take()

    def take(self) -> None:
        for owner, socket in enumerate(self.owners):
            while socket.poll(0):
                rid = controller_pool.io_struct.sock_recv(socket).rid
                self.holds[owner][rid] = self.counts[owner]
                self.counts[owner] += 1
                self.owner_of[rid] = owner


class Replayed(Simulation):
    """Tells a live pool of each event as it is simulated."""

    def __init__(self, live: LivePool, *args: Any) -> None:
        self.live, self.rids = live, {}
        super().__init__(*args)
        assigner = self._queues[0]
        simulated = assigner.on_report, assigner.on_request

        def on_report(report: Any, now: float) -> Any:
            owner = report.owner
            ended = [self.rids.pop((owner, number)) for number in report.ended]
            live.end(owner, ended, report.used)
            return simulated[0](report, now)

        def on_request(header: Any, index: int, now: float) -> None:
            live.arrive(header.rid, args[1][index])
            simulated[1](header, index, now)

        assigner.on_report, assigner.on_request = on_report, on_request  # type: ignore[assignment]

    def _on_sent(self, index: int, owner: int, queue: int, place: int) -> None:
        super()._on_sent(index, owner, queue, place)
        self.rids[owner, self._numbers[index]] = str(index)


@pytest.fixture(autouse=True)
def four_owners(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(controller_pool, "NUM_OWNERS", NUM_OWNERS)


@pytest.fixture
def pools() -> Iterator[list[LivePool]]:
    made: list[LivePool] = []
    yield made
    for pool in made:
        pool.context.destroy(linger=0)


def replay(
    pools: list[LivePool], capacity: Sequence[int], requests: list[Arrival], options: Options
) -> Run:
    live = LivePool(capacity, options)
    pools.append(live)
    layout = Toy(capacity, step=0.03, per_row=0.0003, per_token=3e-8)
    run = Replayed(live, layout, requests, options).simulate()
    expected = {str(i): r.owner for i, r in enumerate(run.requests) if not r.refused}
    assert live.owner_of == expected
    accounts = live.controller.assigner.ledger.accounts
    assert [account.reserved for account in accounts] == [0] * NUM_OWNERS
    assert not live.controller.assigner.queue
    assert sum(live.controller.assigner.drifts) == 0
    return run


def test_the_papers_workload_one_by_one(pools: list[LivePool]) -> None:
    requests = trace.poisson(MIXED, 1.0, 42)
    run = replay(pools, (PAPER,) * NUM_OWNERS, requests, Options(max_overtakes=16))
    assert all(count > 10 for count in map([r.owner for r in run.requests].count, range(4)))


@pytest.mark.parametrize("overtakes", [0, 2, 16])
def test_as_a_burst_that_waits_and_overtakes(pools: list[LivePool], overtakes: int) -> None:
    run = replay(pools, SCARCE, MIXED, Options(max_overtakes=overtakes))
    assert run.peak_waiting > 80
    order = [r.admit for r in run.requests]
    assert (order == sorted(order)) == (overtakes == 0), "later ones have passed"


def test_by_contexts_as_they_are(pools: list[LivePool]) -> None:
    requests = trace.poisson(MIXED[:64], 2.0, 1)
    replay(pools, (PAPER,) * NUM_OWNERS, requests, Options(by_used=True, max_overtakes=16))
