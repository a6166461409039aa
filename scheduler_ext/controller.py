"""The data-parallel controller under TKNP: every request gets the owner that can hold it.

    tokenizer --[header, request]--> controller --[request]--> owner
    owner     --[report]-----------> controller --[refusal]--> tokenizer

It stands in for the loop of SGLang's controller and keeps all else of it: its worker sockets, and
what it does with control messages. It blocks on its sockets. A request is placed by its header,
and its frame is passed on untouched.
"""

import contextlib
import gc
import itertools
import logging
import time
from collections.abc import Callable
from http import HTTPStatus
from typing import Any

import msgspec
import zmq

from sglang_tknp import compat, compat_ipc
from sglang_tknp.config import TknpConfig
from sglang_tknp.scheduler_ext.assigner import Assigner, AssignerSettings
from sglang_tknp.scheduler_ext.forward import admission_settings, header_of
from sglang_tknp.scheduler_ext.guard import first_line, say
from sglang_tknp.scheduler_ext.ledger import LOST
from sglang_tknp.scheduler_ext.messages import Header, Report, decode_header, decode_report
from sglang_tknp.scheduler_ext.metrics import ControllerMetrics
from sglang_tknp.scheduler_ext.policy import Request
from sglang_tknp.scheduler_ext.view import pool_state, waiting_line

logger = logging.getLogger(__name__)

FIRST_REPORT_SECONDS = 60.0
HEARTBEAT_SECONDS = 1.0
FIRST_WAITING_LOG_SECONDS = 1.0
WAITING_LOG_SECONDS = 10.0
# Messages of one socket before the other has its turn.
TURN = 256


def around_event_loop(original: Callable[..., None], stock: Any) -> None:
    """Target: DataParallelController.event_loop; runs instead of it."""
    try:
        Controller(stock).run()
    except Exception as error:
        say(f"the data-parallel controller stops: {type(error).__name__}: {first_line(error)}")
        raise


def read_settings(config: TknpConfig) -> AssignerSettings:
    """TKNP's settings, and SGLang's for queues."""
    sglang = compat_ipc.queue_settings()
    return AssignerSettings(
        by_used=config.owner_policy == "kv-used",
        max_overtakes=config.max_overtakes,
        prefix_slack=config.prefix_slack,
        max_queued=sglang.max_queued,
        waiting_timeout=sglang.timeout,
        admission=admission_settings(config),
    )


class Controller:
    """The sockets around an Assigner."""

    def __init__(self, stock: Any) -> None:
        """`stock`: SGLang's controller, its schedulers ready."""
        self.stock = stock
        self.workers = stock.workers  # PUSH sockets to the owners, in order
        self.requests = stock.recv_from_tokenizer
        self.report_address = compat_ipc.report_address(stock.port_args)
        self.reports = compat_ipc.pull_socket(stock.context, self.report_address)
        self.replies = compat_ipc.push_socket(stock.context, stock.port_args.tokenizer_ipc_name)
        self.poller = zmq.Poller()
        self.config = TknpConfig.from_env()
        self.settings = read_settings(self.config)
        self.assigner = Assigner(len(self.workers), self.settings, self.send, self.refuse)
        self.metrics = ControllerMetrics(self.assigner) if compat.metrics_enabled() else None
        self.health_turns = itertools.cycle(range(len(self.workers)))
        # Aborts of requests that their owners had not received, by (owner, rid).
        self.early_aborts: dict[tuple[int, str], Any] = {}
        self.log_level = logging.INFO if stock.server_args.log_requests else logging.DEBUG
        self.logs_requests = logger.isEnabledFor(self.log_level)
        self.waiting_log_due = 0.0

    def run(self) -> None:
        self.poller.register(self.reports, zmq.POLLIN)
        self.await_owners()
        self.poller.register(self.requests, zmq.POLLIN)
        gc.freeze()  # all that was imported; a full collection would walk it for half a second
        while True:
            self.turn(HEARTBEAT_SECONDS)

    def await_owners(self) -> None:
        """Nobody is placed before every owner has told what it can hold.

        Raises:
            TimeoutError: an owner did not report; names it and the address.
        """
        deadline = time.monotonic() + FIRST_REPORT_SECONDS
        accounts = self.assigner.ledger.accounts
        while missing := [owner for owner, account in enumerate(accounts) if not account.alive]:
            if time.monotonic() > deadline:
                raise TimeoutError(
                    f"no report of node(s) {missing} at {self.report_address} within "
                    f"{FIRST_REPORT_SECONDS:.0f} s; is that port open between the hosts?"
                )
            self.turn(HEARTBEAT_SECONDS)
        capacities = ", ".join(f"node {i}: {a.capacity}" for i, a in enumerate(accounts))
        logger.info("TKNP assigns owners by %s; KV tokens %s", self.config.owner_policy, capacities)
        self.tell_state()

    def turn(self, seconds: float) -> None:
        """Wait for messages, take them, and do what time demands."""
        self.stock.soft_watchdog.feed()
        expiry = self.assigner.next_expiry()
        if expiry is not None:
            seconds = min(seconds, max(0.0, expiry - time.monotonic()))
        ready = dict(self.poller.poll(int(seconds * 1000) + 1))
        if self.reports in ready:
            self.drain(self.reports, self.on_report)
        if self.requests in ready:
            self.drain(self.requests, self.on_message)
        now = time.monotonic()
        self.assigner.expire(now)
        self.log_waiting(now)
        if self.metrics is not None:
            self.metrics.update_when_due(now)

    @staticmethod
    def drain(socket: Any, handle: Callable[[list[Any]], None]) -> None:
        for _ in range(TURN):
            try:
                frames = [socket.recv(zmq.NOBLOCK, copy=False)]
            except zmq.Again:
                return
            while frames[-1].more:
                frames.append(socket.recv(copy=False))
            handle(frames)

    def on_report(self, frames: list[Any]) -> None:
        """A report that cannot be read, or of no owner of ours, is left out with a warning."""
        try:
            report = decode_report(frames[0].buffer)
            drifts = self.assigner.on_report(report, time.monotonic())
        except (msgspec.DecodeError, ValueError) as error:
            logger.warning("TKNP's controller got a report that it cannot use: %s", error)
            return
        for drift in drifts:
            logger.warning(
                "TKNP's ledger healed: owner %d, request %s: %s", drift.owner, drift.rid, drift.what
            )
            if drift.what == LOST:
                status = HTTPStatus.SERVICE_UNAVAILABLE
                self.refuse(drift.rid, None, status, f"The request was lost: {drift.what}.")
        if self.early_aborts:
            self.repeat_aborts(report)

    def on_message(self, frames: list[Any]) -> None:
        """A request behind its header, or any message of SGLang's in one frame."""
        if len(frames) == 2:
            with contextlib.suppress(msgspec.DecodeError):
                self.on_request(decode_header(frames[0].buffer), frames[1])
                return
        try:
            message = compat_ipc.decode_message(frames[-1].buffer)
        except msgspec.DecodeError as error:
            logger.error("TKNP's controller got a message that it cannot read: %s", error)
            return
        requests = compat_ipc.generate_requests(message)
        for request in requests:
            self.on_bare_request(request)
        if not requests:
            self.on_control(message)

    def on_bare_request(self, request: Any) -> None:
        """One without a header that can be read: its sender is no tokenizer of ours."""
        try:
            header = header_of(request, with_prefix=self.settings.prefix_slack is not None)
        except ValueError as error:
            back = request.http_worker_ipc
            self.refuse(str(request.rid), back, HTTPStatus.BAD_REQUEST, str(error))
        else:
            self.on_request(header, compat_ipc.encode_message(request))

    def on_request(self, header: Header, frame: Any) -> None:
        if compat_ipc.is_health_check(header.rid):
            owner = header.routed_dp_rank
            if owner is None or not 0 <= owner < len(self.workers):
                owner = next(self.health_turns)
            self.workers[owner].send(frame, copy=False)
        else:
            self.assigner.on_request(header, frame, time.monotonic())

    def on_control(self, message: Any) -> None:
        kind = compat_ipc.control_kind(message)
        if kind == "abort":
            self.on_abort(message)
        elif kind == "flush" and self.assigner.prefixes is not None:
            self.assigner.prefixes.clear()
        elif kind == "state":
            self.tell_state()
        compat_ipc.dispatch_control(self.stock, message)
        if kind == "status":
            self.assigner.on_status(self.stock.status, time.monotonic())

    def on_abort(self, message: Any) -> None:
        """Waiting requests end here; the others at their owners, as in SGLang."""
        now = time.monotonic()
        for request in self.assigner.on_abort(message.rid, now, everything=message.abort_all):
            self.reply(request.rid, request.reply_to, message.finished_reason, None)
        for owner, account in enumerate(self.assigner.ledger.accounts):
            for number, _ in account.in_flight:
                held = account.requests.get(number)
                if held and (message.abort_all or held.rid.startswith(message.rid)):
                    self.early_aborts[owner, held.rid] = message.finished_reason

    def repeat_aborts(self, report: Report) -> None:
        """An abort takes another way than its request, and may have come before it."""
        account = self.assigner.ledger.accounts[report.owner]
        held = {r.rid: number for number, r in account.requests.items()}
        for (owner, rid), reason in list(self.early_aborts.items()):
            if owner != report.owner or held.get(rid, -1) >= report.received:
                continue
            del self.early_aborts[owner, rid]
            # SGLang aborts by prefix: others must not be hit by a repetition.
            if rid in held and not self.is_prefix_of_others(rid):
                again = compat_ipc.abort_message(rid, None, reason, None)
                compat_ipc.dispatch_control(self.stock, again)

    def is_prefix_of_others(self, rid: str) -> bool:
        accounts = self.assigner.ledger.accounts
        rids = (r.rid for account in accounts for r in account.requests.values())
        return any(other != rid and other.startswith(rid) for other in rids)

    def send(self, request: Request, owner: int, waited: float) -> None:
        self.workers[owner].send(request.payload, copy=False)
        if self.logs_requests:
            logger.log(
                self.log_level,
                "Request %s: owner %d, %d KV tokens reserved, waited %.3f s",
                request.rid,
                owner,
                request.tokens,
                waited,
            )
        if self.metrics is not None:
            self.metrics.sent(owner, waited)

    def refuse(self, rid: str, reply_to: str | None, status: HTTPStatus, message: str) -> None:
        logger.log(self.log_level, "Request %s: refused, %s", rid, message)
        reason = {"type": "abort", "status_code": status, "message": message}
        self.reply(rid, reply_to, reason, message)

    def reply(self, rid: str, reply_to: str | None, reason: Any, text: str | None) -> None:
        message = compat_ipc.abort_message(rid, reply_to, reason, text)
        self.replies.send(compat_ipc.encode_message(message))

    def tell_state(self) -> None:
        from sglang_tknp.scheduler_ext.pool_state import PoolState

        state = PoolState(state=pool_state(self.assigner, self.config))
        self.replies.send(compat_ipc.encode_message(state))

    def log_waiting(self, now: float) -> None:
        """Of a queue that lasts: a line now and then."""
        if not self.assigner.queue:
            self.waiting_log_due = now + FIRST_WAITING_LOG_SECONDS
        elif now >= self.waiting_log_due:
            self.waiting_log_due = now + WAITING_LOG_SECONDS
            logger.info("%s", waiting_line(self.assigner, now))
