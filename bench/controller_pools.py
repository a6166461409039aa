"""For controller.py: both controllers without a pool, and the questions that need no sockets."""

import heapq
import itertools
import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from random import Random
from statistics import mean, median, quantiles
from types import SimpleNamespace
from typing import Any
from unittest import mock

import zmq
from sglang.srt.managers import data_parallel_controller as stock_module

from sglang_tknp.scheduler_ext.assigner import Assigner, AssignerSettings
from sglang_tknp.scheduler_ext.controller import Controller
from sglang_tknp.scheduler_ext.ledger import imbalance
from sglang_tknp.scheduler_ext.messages import Header, Report
from sglang_tknp.scheduler_ext.policy import Request
from sglang_tknp.scheduler_ext.prefixes import BLOCK_TOKENS

OWNERS = 8
OUTPUT = 512  # tokens
HUGE = 1 << 40  # KV tokens of an owner that is never full
STATE = {"epoch": 1, "max_requests": 1 << 20, "page_size": 1, "context_length": 1 << 20}
Rows = list[dict[str, Any]]


def paper_lengths(draw: Random, count: int) -> list[int]:
    """The paper's mixed inputs: 8,223 to 126,848 tokens, median 19,048, mean 32,898."""
    tails = (10_825 * draw.lognormvariate(0, 1.515) for _ in range(count))
    return [min(int(8223 + tail), 126_848) for tail in tails]


def report(owner: int, seq: int, **changes: Any) -> Report:
    state = {"capacity": HUGE, "received": 0, "used": 0, "waiting": 0, **STATE, **changes}
    return Report(owner=owner, seq=seq, **state)


class StockController(stock_module.DataParallelController):
    """SGLang's controller without its schedulers; its load snapshots never change."""

    def __init__(self, method: str, workers: Sequence[Any]) -> None:
        self.load_balance_method = stock_module.LoadBalanceMethod.from_str(method)
        self.dispatching = getattr(self, f"{method}_scheduler")
        self.refresh_load_budget_on_dispatch = method != "round_robin"
        self.load_snapshot_reader = SimpleNamespace(read_all=lambda: ())
        self._last_refresh_time = 0.0
        self.workers, self.status = list(workers), [True] * len(workers)
        self._active_workers = list(range(len(workers)))
        self.round_robin_counter = 0
        self.dp_budget = stock_module.DPBudget(len(workers))
        self.init_dispatcher()


class OurController(Controller):
    """Ours without a pool: its owners have reported that they can hold anything."""

    def __init__(self, workers: Sequence[Any], requests: Any = None) -> None:
        self.stock = SimpleNamespace(soft_watchdog=SimpleNamespace(feed=lambda: None))
        self.workers, self.requests, self.reports = list(workers), requests, None
        self.poller = zmq.Poller()
        if requests is not None:
            self.poller.register(requests, zmq.POLLIN)
        self.settings, self.metrics = AssignerSettings(), None
        self.early_aborts: dict[tuple[int, int], str] = {}
        self.assigner = Assigner(len(workers), self.settings, self.send, self.refuse)
        self.log_level, self.waiting_log_due = logging.DEBUG, 0.0
        self.logs_requests = False
        for owner in range(len(workers)):
            self.assigner.on_report(report(owner, 1), 0.0)


def deaf_workers() -> list[Any]:
    return [SimpleNamespace(send=lambda *_, **__: None) for _ in range(OWNERS)]


# Spread: a thousand requests at once, as (input, output) tokens

Burst = Sequence[tuple[int, int]]


def stock_loads(method: str, burst: Burst) -> list[int]:
    workers: list[list[Any]] = [[] for _ in range(OWNERS)]
    stock = StockController(method, workers)
    with mock.patch.object(stock_module, "sock_send", list.append):
        for tokens, output in burst:
            asked = {"input_ids": range(tokens), "load": tokens + output}
            stock.dispatching(SimpleNamespace(routed_dp_rank=None, **asked))
    return [sum(asked.load for asked in worker) for worker in workers]


def our_loads(burst: Burst) -> list[int]:
    ours = OurController(deaf_workers())
    for number, (tokens, output) in enumerate(burst):
        ours.on_request(Header(str(number), tokens, output), None)
    return [account.reserved for account in ours.assigner.ledger.accounts]


LENGTHS: dict[str, Callable[[Sequence[int]], Burst]] = {
    "equal": lambda burst: [(128, 128) for _ in burst],
    "paper's mixed inputs": lambda burst: [(tokens, OUTPUT) for tokens in burst],
    "mixed outputs instead": lambda burst: [(OUTPUT, tokens // 8) for tokens in burst],
}


def spread(repeats: int) -> Rows:
    """Largest over mean load, input and output; median and worst of the seeds."""
    rows: Rows = []
    bursts = [paper_lengths(Random(seed), 1000) for seed in range(4 * repeats)]
    for lengths, burst_of in LENGTHS.items():
        for way in ("round_robin", "total_requests", "total_tokens", "ours"):
            found = []
            for tokens in bursts:
                burst = burst_of(tokens)
                loads = our_loads(burst) if way == "ours" else stock_loads(way, burst)
                found.append(imbalance(loads))
            row = {"max_by_mean": median(found), "worst": max(found)}
            rows.append({"lengths": lengths, "way": way, **row})
    return rows


class Pool:
    """A real Assigner in simulated time; its owners run every request and report its end.

    A request's payload is called with its owner; it returns the seconds that the request takes
    there, and what to call at its end.
    """

    def __init__(self, owners: int, capacity: int, prefix_slack: int | None = None) -> None:
        self.now, self.capacity, self.seqs = 0.0, capacity, [1] * owners
        self.events: list[Any] = []
        self.sent: list[Any] = []
        self.ids = itertools.count()
        self.us: dict[str, list[float]] = {"on_request": [], "on_report": []}
        self.most_waiting = 0
        settings = AssignerSettings(prefix_slack=prefix_slack)
        self.assigner = Assigner(owners, settings, self.send, self.refuse)
        self.accounts = self.assigner.ledger.accounts
        for owner in range(owners):
            self.tell("on_report", report(owner, 1, capacity=capacity))

    def send(self, request: Request, owner: int, waited: float) -> None:
        self.sent.append((request.payload, owner, self.accounts[owner].next_number - 1))

    @staticmethod
    def refuse(rid: str, *why: Any) -> None:
        raise AssertionError(f"{rid} was refused: {why}")

    def at(self, when: float, call: Callable[..., Any], *args: Any) -> None:
        heapq.heappush(self.events, (when, next(self.ids), call, args))

    def run(self) -> None:
        while self.events:
            self.now, _, call, args = heapq.heappop(self.events)
            call(*args)

    def ask(self, header: Header, payload: Callable[[int], Any]) -> None:
        self.tell("on_request", header, payload)

    def tell(self, event: str, *args: Any) -> None:
        handle, began = getattr(self.assigner, event), time.thread_time()
        handle(*args, self.now)
        self.us[event].append((time.thread_time() - began) * 1e6)
        self.most_waiting = max(self.most_waiting, len(self.assigner.queue))
        for payload, owner, number in self.sent:
            seconds, ended = payload(owner)
            self.at(self.now + seconds, self.end, owner, number, ended)
        self.sent.clear()

    def end(self, owner: int, number: int, ended: Callable[[], Any]) -> None:
        ended()
        self.seqs[owner] += 1
        state = {"capacity": self.capacity, "received": self.accounts[owner].next_number}
        self.tell("on_report", report(owner, self.seqs[owner], ended=(number,), **state))


# Prefix affinity: conversations of 8 turns

SCENARIOS = {  # KV tokens of an owner, blocks that all conversations begin with
    "all fit": (524_288, 0),
    "too many for the caches": (262_144, 0),
    "all fit, 2K system prompt": (524_288, 2048 // BLOCK_TOKENS),
}
SLACKS = (None, 0, 16_384, 65_536, 262_144)
CONVERSATIONS, TURNS = 200, 8
SAMPLED_SECONDS = (60.0, 240.0)  # all have begun, and few are over


class Cache:
    """An owner's radix cache: exactly the blocks that were used last."""

    def __init__(self, capacity: int) -> None:
        self.blocks: OrderedDict[int, None] = OrderedDict()
        self.limit = capacity // BLOCK_TOKENS

    def use(self, blocks: Sequence[int]) -> int:
        """Returns how many blocks of a prompt were there."""
        found = sum(1 for _ in itertools.takewhile(self.blocks.__contains__, blocks))
        for block in reversed(blocks):
            self.blocks[block] = None
            self.blocks.move_to_end(block)
        while len(self.blocks) > self.limit:
            self.blocks.popitem(last=False)
        return found


class Conversation:
    def __init__(self, name: str, pool: Pool, caches: list[Cache], draw: Random, shared: int):
        self.name, self.pool, self.caches = name, pool, caches
        news = [draw.randint(1024, 4096) for _ in range(TURNS)]
        self.lengths = [shared * BLOCK_TOKENS + total for total in itertools.accumulate(news)]
        own = (draw.getrandbits(60) for _ in range(self.lengths[-1] // BLOCK_TOKENS + 3 - shared))
        self.blocks = (*range(-shared - 1, -1), *own)
        self.runs = [draw.uniform(10, 30) for _ in range(TURNS)]
        self.pauses = [draw.expovariate(1 / 20) for _ in range(TURNS)]
        self.turn, self.found = 0, 0
        self.loads: list[float] = []
        pool.at(draw.uniform(0, SAMPLED_SECONDS[0]), self.ask)

    def ask(self) -> None:
        first, last = SAMPLED_SECONDS
        if first < self.pool.now < last:
            self.loads.append(imbalance([account.held for account in self.pool.accounts]))
        tokens = self.lengths[self.turn]
        prefix = self.blocks[: tokens // BLOCK_TOKENS]
        header = Header(f"{self.name}.{self.turn}", tokens, OUTPUT, prefix=prefix)
        self.pool.ask(header, self.start)

    def start(self, owner: int) -> tuple[float, Callable[[], None]]:
        tokens = self.lengths[self.turn]
        prompt = self.blocks[: tokens // BLOCK_TOKENS]
        self.found += self.caches[owner].use(prompt) * BLOCK_TOKENS
        after = self.blocks[: (tokens + OUTPUT) // BLOCK_TOKENS]
        return self.runs[self.turn], lambda: self.end(owner, after)

    def end(self, owner: int, after: Sequence[int]) -> None:
        self.caches[owner].use(after)
        pause = self.pauses[self.turn]
        self.turn += 1
        if self.turn < TURNS:
            self.pool.at(self.pool.now + pause, self.ask)


def converse(slack: int | None, capacity: int, shared: int, seed: int) -> tuple[float, ...]:
    """Returns the part found, million tokens to compute, load's max/mean (mean, p95), waiting."""
    draw, pool = Random(seed), Pool(OWNERS, capacity, slack)
    caches = [Cache(capacity) for _ in range(OWNERS)]
    talks = [Conversation(f"c{i}", pool, caches, draw, shared) for i in range(CONVERSATIONS)]
    pool.run()
    assert all(talk.turn == TURNS for talk in talks)
    found, asked = sum(talk.found for talk in talks), sum(sum(talk.lengths) for talk in talks)
    loads = [load for talk in talks for load in talk.loads]
    computed = (asked - found) / 1e6
    return found / asked, computed, mean(loads), quantiles(loads, n=20)[-1], pool.most_waiting


def affinity(repeats: int) -> Rows:
    names = ("found", "computed_M", "max_by_mean", "max_by_mean_p95", "most_waiting")
    rows: Rows = []
    for scenario, (capacity, shared) in SCENARIOS.items():
        for slack in SLACKS:
            runs = [converse(slack, capacity, shared, seed) for seed in range(repeats)]
            medians = map(median, zip(*runs, strict=True))
            shown = "off" if slack is None else slack
            rows.append(
                {"scenario": scenario, "slack": shown, **dict(zip(names, medians, strict=True))}
            )
    return rows


# A pool of 256 owners


class Crowd:
    """100,000 requests that come too fast, with the paper's lengths."""

    COUNT, PER_SECOND, CAPACITY, OWNERS = 100_000, 300.0, 1_000_000, 256

    def __init__(self, seed: int) -> None:
        self.draw, self.pool = Random(seed), Pool(self.OWNERS, self.CAPACITY)
        self.lengths = enumerate(paper_lengths(self.draw, self.COUNT))
        self.ended = 0
        self.arrive()

    def arrive(self) -> None:
        number, tokens = next(self.lengths)
        self.pool.ask(Header(f"r{number}", tokens, OUTPUT), self.start)
        if number + 1 < self.COUNT:
            self.pool.at(self.pool.now + self.draw.expovariate(self.PER_SECOND), self.arrive)

    def start(self, owner: int) -> tuple[float, Callable[[], None]]:
        return self.draw.uniform(2, 60), self.end

    def end(self) -> None:
        self.ended += 1


def pool_row(seed: int) -> dict[str, float]:
    began = time.perf_counter()
    crowd = Crowd(seed)
    crowd.pool.run()
    seconds = time.perf_counter() - began
    assert crowd.ended == crowd.COUNT
    us, queue = crowd.pool.us, crowd.pool.assigner.queue
    every = us["on_request"] + us["on_report"]
    return {
        "seconds": seconds,
        "of_the_controller": sum(every) / 1e6,
        "us_per_event": mean(every),
        "us_per_request": mean(us["on_request"]),
        "us_per_report": mean(us["on_report"]),
        "us_p99": quantiles(every, n=100)[-1],
        "us_slowest": max(every),
        "most_waiting": crowd.pool.most_waiting,
        "overtakes": sum(queue.overtakes),
    }


def pool(repeats: int) -> Rows:
    runs = [pool_row(seed) for seed in range(repeats)]
    return [{name: median(run[name] for run in runs) for name in runs[0]}]


def us_each(step: Callable[[Any], Any], items: Sequence[Any]) -> float:
    began = time.thread_time()
    for item in items:
        step(item)
    return (time.thread_time() - began) / len(items) * 1e6


def by_header(_: None, owners: int) -> float:
    """All that the controller does for a request, but its sockets."""
    pool = Assigner(owners, AssignerSettings(), lambda *_: None, lambda *_: None)
    for owner in range(owners):
        pool.on_report(report(owner, 1, capacity=HUGE), 0.0)
    lengths = paper_lengths(Random(0), 96 * owners)
    headers = [Header(str(i), tokens, OUTPUT) for i, tokens in enumerate(lengths)]
    return us_each(lambda header: pool.on_request(header, None, 0.0), headers)
