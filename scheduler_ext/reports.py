"""What an owner tells the controller: which requests it received, holds and ended.

It runs on the first rank of a node, beside SGLang's scheduler. A request ends when its client is
told: everything that ends one (a finish, an abort, an error, a retraction for good) sends that.
"""

import contextlib
import time
from collections import deque
from typing import Any

import zmq

from sglang_tknp import compat, compat_ipc
from sglang_tknp.scheduler_ext.ledger import whole_pages
from sglang_tknp.scheduler_ext.messages import Live, Report, encode

STATE_SECONDS = 0.1  # between reports of nothing but a changed state
ABSOLUTE_SECONDS = 1.0  # between reports that name every request, while there are any
IDLE_SECONDS = 10.0  # the same, while there are none
# SGLang stops a request two tokens before its pool is full.
UNUSABLE_TOKENS = 2


class OwnerReporter:
    """Numbers the requests of this node as they come, and reports to the controller."""

    def __init__(self, scheduler: Any, owner: int, socket: Any) -> None:
        """`scheduler`: SGLang's, of this node's first rank. `socket`: PUSH to the controller."""
        self.scheduler = scheduler
        self.owner = owner
        self.socket = socket
        self.page_size = int(scheduler.page_size)
        usable = max(0, int(scheduler.max_total_num_tokens) - UNUSABLE_TOKENS)
        self.capacity = usable // self.page_size * self.page_size
        self.epoch = time.time_ns()
        self.seq = 0
        self.received = 0
        self.requests: dict[int, Any] = {}  # SGLang's requests that it holds, by number
        self.numbers: dict[str, deque[int]] = {}  # by rid, which a client may use again
        self.retractions = 0
        self.state_due = self.absolute_due = self.idle_due = 0.0
        self.changed = False  # since the last absolute report
        self.send((), absolute=True)

    def on_created(self, request: Any) -> None:
        """A request from the controller has become one of SGLang's."""
        number, self.received = self.received, self.received + 1
        self.requests[number] = request
        self.numbers.setdefault(request.rid, deque()).append(number)
        self.changed = True

    def on_ended(self, rids: list[str]) -> None:
        """Clients are told that these requests are over; unknown ones are health checks."""
        numbers = [self.numbers[rid].popleft() for rid in rids if self.numbers.get(rid)]
        if numbers:
            for rid in rids:
                if rid in self.numbers and not self.numbers[rid]:
                    del self.numbers[rid]
            for number in numbers:
                self.retractions += self.requests.pop(number).retraction_count
            self.send(tuple(numbers))

    def report_when_due(self) -> None:
        """After a step; cheap."""
        now = time.monotonic()
        if now >= self.state_due and (self.requests or self.changed):
            self.send((), absolute=now >= self.absolute_due)

    def report_before_sleep(self) -> None:
        """Nothing runs: say so at once, and again now and then, for a report can get lost."""
        if self.changed or time.monotonic() >= self.idle_due:
            self.send((), absolute=True)

    def send(self, ended: tuple[int, ...], *, absolute: bool = False) -> None:
        """What gets lost is made up for by the next absolute report."""
        live = None
        if absolute:
            live = tuple(Live(n, r.rid, self._context(r)) for n, r in self.requests.items())
        self.seq += 1
        report = Report(
            owner=self.owner,
            epoch=self.epoch,
            seq=self.seq,
            capacity=self.capacity,
            max_requests=int(self.scheduler.max_running_requests),
            page_size=self.page_size,
            context_length=int(self.scheduler.model_config.context_len),
            received=self.received,
            used=sum(map(self._context, self.requests.values())),
            waiting=len(self.scheduler.waiting_queue),
            retractions=self.retractions
            + sum(request.retraction_count for request in self.requests.values()),
            ended=ended,
            live=live,
        )
        now = time.monotonic()
        self.state_due = now + STATE_SECONDS
        self.changed = True
        with contextlib.suppress(zmq.Again):
            self.socket.send(encode(report), zmq.NOBLOCK)
            if absolute:
                self.changed = False
                self.absolute_due, self.idle_due = now + ABSOLUTE_SECONDS, now + IDLE_SECONDS

    def _context(self, request: Any) -> int:
        return whole_pages(request.seqlen, self.page_size)


_reporter: OwnerReporter | None = None


def start(scheduler: Any, address: str) -> OwnerReporter | None:
    """On every rank, once the pool is ready; only the first rank of a node reports."""
    global _reporter
    parallel = compat.parallel()
    if parallel.attn_tp_rank == 0:
        socket = compat_ipc.push_socket(zmq.Context.instance(), address)
        _reporter = OwnerReporter(scheduler, parallel.attn_dp_rank, socket)
    return _reporter


def after_create_generation_req(request: Any, *_: Any, **__: Any) -> None:
    """Target: Scheduler._create_generation_req: every request passes here once, on its owner."""
    if _reporter is not None and not compat_ipc.is_health_check(request.rid):
        _reporter.on_created(request)


def before_send_output(sender: Any, output: Any, *_: Any, **__: Any) -> None:
    """Target: SenderWrapper.send_output: everything that a client is told passes here."""
    if _reporter is not None:
        _reporter.on_ended(compat_ipc.ended_rids(output))
