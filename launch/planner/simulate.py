"""Discrete-event simulation of a decode pool, with the product's own controller in it.

Owners, queue, ledger and choice are the code that a server runs (scheduler_ext/assigner.py);
blocks, rows and bytes are placement.py, layout.py and traffic.py. Simulated is only what takes
time: steps, by a layout's step model. A request arrives with its KV in place, as in a decode pool
behind prefill servers; its first token comes with its first step, its last ends it.

Events are arrivals, and boundaries of steps at which a batch changes. Between two of these a group
of owners takes all its steps at once (steps.py), so nothing is rounded to several steps.
"""

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import NamedTuple

from sglang_tknp.launch.planner.layouts import Layout
from sglang_tknp.launch.planner.steps import Piece, first_steps, pieces, seconds_of, steps_until
from sglang_tknp.launch.planner.trace import Arrival
from sglang_tknp.scheduler_ext.admission import AdmissionSettings
from sglang_tknp.scheduler_ext.assigner import Assigner, AssignerSettings
from sglang_tknp.scheduler_ext.messages import Header, Report
from sglang_tknp.scheduler_ext.policy import Request

# SGLang's default between replicas of one server, and the rule of its total_requests.
ROUTERS = ("round-robin", "least-requests")
ANY_LENGTH = 1 << 40  # tokens of a context; requests per owner


@dataclass(slots=True)
class Served:
    """What became of a request. Seconds from the release of the workload."""

    arrival: float
    input_tokens: int
    output_tokens: int
    owner: int = -1
    admit: float = -1.0  # it is sent to its owner
    first: float = -1.0  # its first token
    finish: float = -1.0
    refused: str = ""

    @property
    def wait(self) -> float:
        """Seconds in the queue."""
        return self.admit - self.arrival


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Of the controller."""

    by_used: bool = False  # --tknp-owner-policy kv-used
    max_overtakes: int | None = None  # None: the layout's own
    max_running: int = ANY_LENGTH  # requests of one server, as --max-running-requests
    page_size: int = 1
    router: str = ROUTERS[0]  # of requests to queues, where a layout has several


AS_SERVED = Options()


class Taken(NamedTuple):
    """Steps that a group took with one batch."""

    start: float
    piece: Piece
    rows: int  # requests in the batch: each got a token in each step
    new: int  # of them, those whose first token came with the first of these steps


@dataclass(slots=True)
class Run:
    """A finished simulation."""

    layout: str
    requests: list[Served]
    steps: list[Taken]
    peak_requests: list[int]  # by owner
    peak_waiting: int = 0


@dataclass(slots=True, eq=False)
class _Group:
    """Owners that step together."""

    number: int
    owners: tuple[int, ...]
    rows: list[int]
    tokens: list[int]  # context of each owner's requests
    step: int = 0  # steps so far
    begun: float = 0.0  # when the present pieces began
    parts: list[Piece] = field(default_factory=list)
    joined: int = 0  # requests that are new in the present pieces
    pending: list[int] = field(default_factory=list)  # requests that join at the next boundary
    ends: list[tuple[int, int]] = field(default_factory=list)  # heap of (last step, request)
    version: int = 0  # of its next event; older ones are void
    at_boundary: bool = False


class Simulation:
    """One layout serving one trace."""

    def __init__(
        self, layout: Layout, trace: Sequence[Arrival], options: Options = AS_SERVED
    ) -> None:
        """Raises ValueError for a layout that holds nothing."""
        if not layout.fits:
            raise ValueError(f"{layout.title} does not fit: its weights leave no room for KV")
        self.layout = layout
        self.options = options
        self.requests = [Served(*arrival) for arrival in trace]
        self.order = sorted(range(len(trace)), key=lambda i: trace[i].seconds)
        num_owners = len(layout.capacity)
        self.run = Run(layout.name, self.requests, [], [0] * num_owners)
        self.now = 0.0
        self.finished = 0
        self._numbers = [0] * len(trace)  # of each request, at its owner
        self._seqs = [0] * num_owners
        self._groups = [
            _Group(i, o, [0] * len(o), [0] * len(o)) for i, o in enumerate(layout.groups)
        ]
        self._place = {
            owner: (group, place)
            for group in self._groups
            for place, owner in enumerate(group.owners)
        }
        self._queues = [self._assigner(queue) for queue in range(len(layout.queues))]
        self._queue_of = {o: (q, i) for q, qs in enumerate(layout.queues) for i, o in enumerate(qs)}
        self._turn = 0
        self._outstanding = [0] * len(self._queues)
        self._events: list[tuple[float, int, int, int]] = []  # (time, number, group, version)
        self._num_events = 0
        for owner in range(num_owners):
            self._report(owner, ())

    def _assigner(self, queue: int) -> Assigner:
        overtakes = self.options.max_overtakes
        settings = AssignerSettings(
            by_used=self.options.by_used,
            max_overtakes=self.layout.max_overtakes if overtakes is None else overtakes,
            admission=AdmissionSettings(),
        )
        owners = self.layout.queues[queue]

        def send(request: Request, owner: int, waited: float) -> None:
            self._on_sent(request.payload, owners[owner], queue, owner)

        def refuse(rid: str, reply_to: str | None, status: HTTPStatus, message: str) -> None:
            self.requests[int(rid)].refused = message
            self._outstanding[queue] -= 1
            self.finished += 1

        return Assigner(len(owners), settings, send, refuse)

    def simulate(self, on_progress: Callable[[int], None] = lambda finished: None) -> Run:
        """Serve all; `on_progress` hears of the requests finished so far, now and then."""
        order, arrived, heard = self.order, 0, 0
        while arrived < len(order) or self._events:
            arrival = self.requests[order[arrived]].arrival if arrived < len(order) else None
            if arrival is not None and (not self._events or arrival <= self._events[0][0]):
                self.now = max(self.now, arrival)
                self._on_arrival(order[arrived])
                arrived += 1
            else:
                self.now, _, group, version = heapq.heappop(self._events)
                if self._groups[group].version == version:
                    self._on_boundary(self._groups[group])
            if self.finished - heard >= 256:
                heard = self.finished
                on_progress(heard)
        on_progress(self.finished)
        return self.run

    def _on_arrival(self, index: int) -> None:
        request = self.requests[index]
        queue = self._turn % len(self._queues)
        if self.options.router == "least-requests":
            queue = self._outstanding.index(min(self._outstanding))
        self._turn += 1
        self._outstanding[queue] += 1
        self._refresh(self.layout.queues[queue])
        header = Header(str(index), request.input_tokens, request.output_tokens)
        self._queues[queue].on_request(header, index, self.now)
        waiting = sum(len(assigner.queue) for assigner in self._queues)
        self.run.peak_waiting = max(self.run.peak_waiting, waiting)

    def _on_sent(self, index: int, owner: int, queue: int, place: int) -> None:
        """The controller has chosen: the request joins at its group's next boundary."""
        request = self.requests[index]
        request.owner, request.admit = owner, self.now
        account = self._queues[queue].ledger.accounts[place]
        self._numbers[index] = account.next_number - 1
        peaks = self.run.peak_requests
        peaks[owner] = max(peaks[owner], len(account.requests))
        group, _ = self._place[owner]
        group.pending.append(index)
        if not group.at_boundary:
            steps = max(1, steps_until(group.parts, self.now - group.begun))
            self._go_on(group, first_steps(group.parts, steps))

    def _go_on(self, group: _Group, parts: list[Piece]) -> None:
        """Take these steps, then come to a boundary."""
        group.parts = parts
        group.version += 1
        self._num_events += 1
        end = max(self.now, group.begun + seconds_of(parts))
        heapq.heappush(self._events, (end, self._num_events, group.number, group.version))

    def _on_boundary(self, group: _Group) -> None:
        self._account(group)
        group.at_boundary = True
        self._finish(group)
        for index in group.pending:
            request = self.requests[index]
            _, place = self._place[request.owner]
            group.rows[place] += 1
            group.tokens[place] += request.input_tokens
            heapq.heappush(group.ends, (group.step + request.output_tokens, index))
        group.at_boundary = False
        group.begun = self.now
        group.joined = len(group.pending)
        new, group.pending = group.pending, []
        if not group.ends:
            group.parts = []
            return
        rows = tuple(group.rows)
        fixed, lines = self.layout.fixed(rows), self.layout.lines(rows, group.tokens)
        parts = pieces(fixed, lines, group.ends[0][0] - group.step)
        for index in new:
            self.requests[index].first = self.now + parts[0].first
        self._go_on(group, parts)

    def _account(self, group: _Group) -> None:
        """The steps of the present pieces have been taken."""
        rows, joined, start = sum(group.rows), group.joined, group.begun
        for part in group.parts:
            group.step += part.steps
            self.run.steps.append(Taken(start, part, rows, joined))
            joined = 0
            start += part.seconds
            for place, more in enumerate(group.rows):
                group.tokens[place] += more * part.steps

    def _finish(self, group: _Group) -> None:
        """Release who has all tokens; the controller may send others, also to this group."""
        ended: dict[int, list[int]] = {}
        while group.ends and group.ends[0][0] <= group.step:
            _, index = heapq.heappop(group.ends)
            request = self.requests[index]
            request.finish = self.now
            _, place = self._place[request.owner]
            group.rows[place] -= 1
            group.tokens[place] -= request.input_tokens + request.output_tokens
            ended.setdefault(request.owner, []).append(self._numbers[index])
            self._outstanding[self._queue_of[request.owner][0]] -= 1
            self.finished += 1
        for queue in dict.fromkeys(self._queue_of[owner][0] for owner in ended):
            self._refresh(self.layout.queues[queue])
        for owner, numbers in ended.items():
            self._report(owner, tuple(numbers))

    def _refresh(self, owners: Sequence[int]) -> None:
        """Contexts grow between ends too, and servers say so ten times a second."""
        if self.options.by_used:
            for owner in owners:
                self._report(owner, ())

    def _grown(self, group: _Group) -> int:
        """Steps of the present pieces that are over, and not accounted yet."""
        if group.at_boundary:
            return 0
        return max(0, steps_until(group.parts, self.now - group.begun) - 1)

    def _report(self, owner: int, ended: tuple[int, ...]) -> None:
        """What the owner's server would tell the controller."""
        queue, place = self._queue_of[owner]
        assigner = self._queues[queue]
        group, at = self._place[owner]
        joining = sum(
            self.requests[i].input_tokens for i in group.pending if self.requests[i].owner == owner
        )
        self._seqs[owner] += 1
        report = Report(
            owner=place,
            epoch=1,
            seq=self._seqs[owner],
            capacity=self.layout.capacity[owner],
            max_requests=self.layout.running_limit(self.options.max_running),
            page_size=self.options.page_size,
            context_length=ANY_LENGTH,
            received=assigner.ledger.accounts[place].next_number,
            used=group.tokens[at] + group.rows[at] * self._grown(group) + joining,
            waiting=0,
            ended=ended,
        )
        assigner.on_report(report, self.now)
