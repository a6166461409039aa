"""Who goes where, who waits, who is refused: the controller's decisions, without its sockets. Pure.

Events come in (a request's header, an owner's report, an abort, the clock), and two callbacks go
out: `send` a request to its owner, `refuse` a request with an HTTP status and a reason.
"""

from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any

from sglang_tknp.config import DEFAULT_MAX_OVERTAKES
from sglang_tknp.scheduler_ext.admission import AdmissionSettings, RefusedError, admit
from sglang_tknp.scheduler_ext.ledger import Drift, Ledger
from sglang_tknp.scheduler_ext.messages import Header, Report
from sglang_tknp.scheduler_ext.policy import Policy, Request
from sglang_tknp.scheduler_ext.prefixes import PrefixIndex
from sglang_tknp.scheduler_ext.waiting import WaitingQueue

# (rid, return route, status, message)
Refuse = Callable[[str, str | None, HTTPStatus, str], None]
Send = Callable[[Request, int, float], None]  # (request, owner, seconds that it waited)


@dataclass(frozen=True, slots=True, kw_only=True)
class AssignerSettings:
    by_used: bool = False  # --tknp-owner-policy kv-used
    max_overtakes: int = DEFAULT_MAX_OVERTAKES
    prefix_slack: int | None = None  # KV tokens; None switches prefix affinity off
    max_queued: int | None = None  # --max-queued-requests
    waiting_timeout: float = -1.0  # seconds, SGLANG_REQ_WAITING_TIMEOUT; none if not positive
    admission: AdmissionSettings = field(default_factory=AdmissionSettings)


class Assigner:
    """The state of one pool's controller."""

    def __init__(
        self, num_owners: int, settings: AssignerSettings, send: Send, refuse: Refuse
    ) -> None:
        self.settings = settings
        self.send = send
        self.refuse = refuse
        self.ledger = Ledger(num_owners, by_used=settings.by_used)
        slack = settings.prefix_slack
        self.prefixes = None if slack is None else PrefixIndex(num_owners)
        self.policy = Policy(self.ledger, self.prefixes, slack or 0)
        self.queue = WaitingQueue(self.policy, settings.max_overtakes)
        self.refusals: Counter[tuple[str, str]] = Counter()  # by refusal_key
        self.sent = [0] * num_owners
        self.drifts = [0] * num_owners
        # (arrived, rid, arrival) of the queue, and of some that have left it.
        self._by_age: deque[tuple[float, str, int]] = deque()

    def on_request(self, header: Header, payload: Any, now: float) -> None:
        """Send a new request to its owner, let it wait, or refuse it."""
        if (forgotten := self.queue.get(header.rid)) is not None:
            self.queue.remove(forgotten)  # SGLang's tokenizer knows one request of a rid
        try:
            request = admit(header, payload, now, self.ledger, self.settings.admission)
        except RefusedError as refused:
            self.refusals[refusal_key(refused.kind, header.routed_dp_rank)] += 1
            self.refuse(header.rid, header.http_worker_ipc, refused.status, str(refused))
            return
        if not self.queue and (owner := self.policy.pick(request)) is not None:
            self._send(request, owner, now)
        else:
            self.queue.add(request)
            self.assign(now)
            self._check_queue_limit(request)
            if self.settings.waiting_timeout > 0 and self.queue.get(request.rid) is request:
                self._by_age.append((now, request.rid, request.arrival))

    def on_report(self, report: Report, now: float) -> list[Drift]:
        """Take an owner's report, and send who fits now."""
        drifts = self.ledger.apply(report)
        self.drifts[report.owner] += len(drifts)
        self.assign(now)
        return drifts

    def on_status(self, serving: Sequence[bool], now: float) -> None:
        """SGLang says which owners serve; who waits for a dead one only is refused."""
        for owner, serves in enumerate(serving):
            self.ledger.set_serving(owner, serves)
        for request in list(self.queue):
            owner = request.only_owner
            if owner is not None and not serving[owner]:
                self.queue.remove(request)
                message = f"Node {owner}, which the request asks for, no longer serves."
                self._refuse_waiting(request, "dead_owner", message)
        self.assign(now)

    def assign(self, now: float) -> None:
        for request, owner in self.queue.take():
            self._send(request, owner, now)

    def on_abort(self, rid: str, now: float, *, everything: bool) -> list[Request]:
        """Take the waiting requests that SGLang's rule names out of the queue; returns them."""
        gone = list(self.queue) if everything else self.queue.matching(rid)
        for request in gone:
            self.queue.remove(request)
        self.assign(now)
        return gone

    def expire(self, now: float) -> None:
        """Refuse who has waited for too long."""
        while self._by_age:
            arrived, rid, arrival = self._by_age[0]
            request = self.queue.get(rid)
            if request is not None and request.arrival == arrival:
                if now - arrived < self.settings.waiting_timeout:
                    break
                self.queue.remove(request)
                self._refuse_waiting(request, "timeout", "Request waiting timeout reached.")
            self._by_age.popleft()
        self.assign(now)

    def next_expiry(self) -> float | None:
        """When `expire` has work, by the controller's clock."""
        if not self._by_age:
            return None
        return self._by_age[0][0] + self.settings.waiting_timeout

    def _send(self, request: Request, owner: int, now: float) -> None:
        self.policy.reserve(request, owner)
        self.sent[owner] += 1
        self.send(request, owner, now - request.arrived)

    def _check_queue_limit(self, newest: Request) -> None:
        """SGLang's rule for a full queue: the newest of the least important is refused."""
        limit = self.settings.max_queued
        if limit is None or len(self.queue) <= limit or self.queue.get(newest.rid) is not newest:
            return
        last = self.queue.last()
        message = "The request queue is full."
        if last is not newest:
            message = "The request is aborted by a higher priority request."
        self.queue.remove(last)
        self._refuse_waiting(last, "queue_full", message)

    def _refuse_waiting(self, request: Request, kind: str, message: str) -> None:
        self.refusals[refusal_key(kind, request.only_owner)] += 1
        self.refuse(request.rid, request.reply_to, HTTPStatus.SERVICE_UNAVAILABLE, message)


def refusal_key(kind: str, owner: int | None) -> tuple[str, str]:
    """The reason, and the owner that the client asked for or "any", as /metrics label them."""
    return kind, "any" if owner is None or kind == "unknown_owner" else str(owner)
