"""The simulator's oracle: a decode pool one step at a time, with its own queue and owner choice.

Slow and plain, written from the documentation. It shares only `Layout.step_seconds`.
"""

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, field

from sglang_tknp.launch.planner.layouts import Layout, Line, Rows, Terms
from sglang_tknp.launch.planner.simulate import AS_SERVED, Options
from sglang_tknp.launch.planner.trace import Arrival

WINDOW = 64  # requests of the queue that are looked at
LEAST_OUTPUT = 5  # to reserve for a request that nearly fills the smallest owner


class Toy(Layout):
    """Step times simple enough for a test to foresee."""

    name, title = "toy", "toy"

    def __init__(
        self,
        capacity: Sequence[int],
        *,
        queues: Sequence[Rows] | None = None,
        groups: Sequence[Rows] | None = None,
        step: float = 0.5,
        per_row: float = 0.0,
        per_token: float = 0.0,
        max_overtakes: int = 0,
    ) -> None:
        everyone = tuple(range(len(capacity)))
        self.capacity = tuple(capacity)
        self.queues = tuple(queues or (everyone,))
        self.groups = tuple(groups or (everyone,))
        self.step, self.per_row, self.per_token = step, per_row, per_token
        self.max_overtakes = max_overtakes
        self.fixed = self._fixed_seconds

    def memory(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        raise NotImplementedError

    def fixed_terms(self, rows: Rows) -> Terms:
        """Groups of different sizes never keep time with each other."""
        return {"step": self.step * math.sqrt(len(rows)), "rows": self.per_row * sum(rows)}

    def lines(self, rows: Rows, tokens: Sequence[float]) -> list[Line]:
        return [(self.per_token * k, self.per_token * b) for b, k in zip(rows, tokens, strict=True)]


@dataclass(eq=False)
class Ask:
    index: int
    arrival: float
    input_tokens: int
    output_tokens: int
    reserved: int = 0
    made: int = 0  # tokens so far
    times: list[float] = field(default_factory=list)  # of each token
    overtaken: int = 0
    owner: int = -1
    admit: float = -1.0
    first: float = -1.0
    finish: float = -1.0
    refused: bool = False


@dataclass(eq=False)
class Node:
    capacity: int
    held: list[Ask] = field(default_factory=list)

    @property
    def reserved(self) -> int:
        return sum(ask.reserved for ask in self.held)

    @property
    def context(self) -> int:
        """What has ended is no context any more, also before the controller hears of it."""
        return sum(ask.input_tokens + ask.made for ask in self.held if ask.finish < 0)


@dataclass(eq=False)
class Group:
    owners: Rows
    running: list[Ask] = field(default_factory=list)
    joining: list[Ask] = field(default_factory=list)
    boundary: float | None = None
    busy: bool = False  # at a boundary: who is sent now joins at once


class Oracle:
    def __init__(
        self, layout: Layout, trace: Sequence[Arrival], options: Options = AS_SERVED
    ) -> None:
        self.layout, self.options = layout, options
        nodes = len(layout.capacity) if layout.splits_requests else 1
        self.running_limit = max(1, options.max_running // nodes)  # of an owner
        self.asks = [Ask(index, *arrival) for index, arrival in enumerate(trace)]
        self.nodes = [Node(capacity) for capacity in layout.capacity]
        self.groups = [Group(owners) for owners in layout.groups]
        self.waiting: list[list[Ask]] = [[] for _ in layout.queues]
        self.outstanding = [0] * len(layout.queues)
        overtakes = options.max_overtakes
        self.limit = layout.max_overtakes if overtakes is None else overtakes
        self.now, self.turn, self.peak_waiting = 0.0, 0, 0
        self.peaks = [0] * len(self.nodes)
        self.steps: list[tuple[float, float, int]] = []  # begin, seconds, rows

    def run(self) -> list[Ask]:
        coming = sorted(self.asks, key=lambda ask: ask.arrival)
        while True:
            stepping = [group for group in self.groups if group.boundary is not None]
            group = min(stepping, key=lambda g: g.boundary or 0.0, default=None)
            if coming and (group is None or coming[0].arrival <= (group.boundary or 0.0)):
                self.now = coming[0].arrival
                self.arrive(coming.pop(0))
            elif group is not None:
                self.now = group.boundary or 0.0
                self.at_boundary(group)
            else:
                return self.asks

    def arrive(self, ask: Ask) -> None:
        queue = self.turn % len(self.waiting)
        if self.options.router == "least-requests":
            queue = self.outstanding.index(min(self.outstanding))
        self.turn += 1
        sizes = [self.nodes[owner].capacity for owner in self.layout.queues[queue]]
        output, page = ask.output_tokens, self.options.page_size
        if ask.input_tokens + LEAST_OUTPUT > min(sizes):
            output = max(output, LEAST_OUTPUT)
        ask.reserved = math.ceil((ask.input_tokens + output) / page) * page
        if ask.reserved > max(sizes):
            ask.refused = True
            return
        self.outstanding[queue] += 1
        self.waiting[queue].append(ask)
        self.send_who_fits(queue)
        self.peak_waiting = max(self.peak_waiting, sum(map(len, self.waiting)))

    def send_who_fits(self, queue: int) -> None:
        while self.look(queue):
            pass

    def look(self, queue: int) -> bool:
        """First come, first served, but for `limit` later ones that may pass each."""
        waiting, sent = self.waiting[queue], False
        closed: set[int] = set()
        stayed: list[Ask] = []
        for ask in waiting[:WINDOW]:
            owner = self.choose(queue, ask, closed)
            if owner is None:
                stayed.append(ask)
            else:
                waiting.remove(ask)
                self.send(ask, owner)
                sent = True
                for earlier in stayed:
                    earlier.overtaken += self.nodes[owner].capacity >= earlier.reserved
                if ask.overtaken >= self.limit:
                    break  # what it kept closed is open
            for earlier in stayed:
                if earlier.overtaken >= self.limit:
                    closed |= {
                        o
                        for o in self.layout.queues[queue]
                        if self.nodes[o].capacity >= earlier.reserved
                    }
        return sent

    def choose(self, queue: int, ask: Ask, closed: set[int]) -> int | None:
        """The lowest load, then the fewest requests, then the lowest node."""
        fitting = []
        for owner in self.layout.queues[queue]:
            node = self.nodes[owner]
            has_room = node.capacity - node.reserved >= ask.reserved
            if owner not in closed and has_room and len(node.held) < self.running_limit:
                load = node.context if self.options.by_used else node.reserved
                fitting.append((load, len(node.held), owner))
        return min(fitting)[2] if fitting else None

    def send(self, ask: Ask, owner: int) -> None:
        ask.owner, ask.admit = owner, self.now
        node = self.nodes[owner]
        node.held.append(ask)
        self.peaks[owner] = max(self.peaks[owner], len(node.held))
        group = next(g for g in self.groups if owner in g.owners)
        group.joining.append(ask)
        if group.boundary is None and not group.busy:
            group.boundary = self.now

    def at_boundary(self, group: Group) -> None:
        group.busy, group.boundary = True, None
        ended: dict[int, list[Ask]] = {}
        for ask in sorted(group.running, key=lambda a: a.index):
            ask.made += 1
            ask.times.append(self.now)
            if ask.made == 1:
                ask.first = self.now
            if ask.made == ask.output_tokens:
                ask.finish = self.now
                group.running.remove(ask)
                ended.setdefault(ask.owner, []).append(ask)
        queue_of = {o: q for q, owners in enumerate(self.layout.queues) for o in owners}
        for owner, asks in ended.items():
            self.outstanding[queue_of[owner]] -= len(asks)
        for owner, asks in ended.items():  # one owner says so after the other
            self.nodes[owner].held = [a for a in self.nodes[owner].held if a not in asks]
            self.send_who_fits(queue_of[owner])
        group.running += group.joining
        group.joining, group.busy = [], False
        if group.running:
            seconds = self.step_seconds(group)
            self.steps.append((self.now, seconds, len(group.running)))
            group.boundary = self.now + seconds

    def step_seconds(self, group: Group) -> float:
        of_owner = [[a for a in group.running if a.owner == owner] for owner in group.owners]
        rows = tuple(map(len, of_owner))
        return self.layout.step_seconds(
            rows, [sum(a.input_tokens + a.made for a in asks) for asks in of_owner]
        )


def random_trace(
    rng: random.Random, count: int, longest: int, most_output: int, seconds: float
) -> list[Arrival]:
    """Some one by one, some together; not in their order."""
    found: list[Arrival] = []
    while len(found) < count:
        at = rng.choice([0.0, rng.uniform(0, seconds)])
        for _ in range(rng.choice([1, 1, 1, 5])):
            output = rng.choice([1, rng.randint(1, most_output)])
            found.append(Arrival(at, rng.randint(1, longest), output))
    return found[:count]
