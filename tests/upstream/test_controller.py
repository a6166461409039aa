"""The controller on SGLang's real messages and sockets, with SGLang's own controller behind it."""

import pickle
import time
from array import array
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import zmq
from sglang.srt.managers import data_parallel_controller, io_struct

from sglang_tknp import compat_ipc
from sglang_tknp.config import TknpConfig
from sglang_tknp.scheduler_ext import controller as module
from sglang_tknp.scheduler_ext import forward
from sglang_tknp.scheduler_ext.admission import AdmissionSettings
from sglang_tknp.scheduler_ext.assigner import Assigner, AssignerSettings
from sglang_tknp.scheduler_ext.controller import Controller
from sglang_tknp.scheduler_ext.gate import Gate
from sglang_tknp.scheduler_ext.messages import Live, decode_header, encode
from sglang_tknp.scheduler_ext.pool_state import PoolState
from sglang_tknp.scheduler_ext.view import pool_state
from tests.upstream.controller_pool import CAPACITY, NUM_OWNERS, Pool, request

pytestmark = pytest.mark.upstream


@pytest.fixture
def pool() -> Iterator[Pool]:
    made = Pool()
    yield made
    made.context.destroy(linger=0)


def test_a_request_arrives_as_it_was_sent(pool: Pool) -> None:
    sent = request("a", 2000, None, priority=3, cache_salt="x")
    sent.input_ids = array("q", range(500))
    pool.ask(sent)
    (found,) = pool.received(0)
    assert type(found) is type(sent) and found.input_ids == sent.input_ids
    assert (found.rid, found.priority, found.cache_salt) == ("a", 3, "x")
    assert found.sampling_params.max_new_tokens is None


def test_a_request_without_a_header_is_placed_too(pool: Pool) -> None:
    """Not every sender is a tokenizer with our hook."""
    io_struct.sock_send(pool.to_controller, request("a"))
    io_struct.sock_send(pool.to_controller, request("b"))
    pool.ask()
    assert [r.rid for r in pool.received(0)] == ["a"]
    assert [r.rid for r in pool.received(1)] == ["b"]


@pytest.mark.parametrize("with_header", [True, False])
def test_case_06_every_request_of_a_batch_has_one_owner(pool: Pool, with_header: bool) -> None:
    """Prior art, case 6 (SGL#18802): a batch was broadcast to every worker."""
    batch = io_struct.BatchTokenizedGenerateReqInput(batch=[request(f"r{i}") for i in range(7)])
    if with_header:
        pool.ask(batch)
    else:
        io_struct.sock_send(pool.to_controller, batch)
        pool.ask()
    found = [[r.rid for r in pool.received(owner)] for owner in range(NUM_OWNERS)]
    assert sorted(sum(found, [])) == [f"r{i}" for i in range(7)]
    assert sorted(map(len, found)) == [2, 2, 3]


@pytest.mark.parametrize("rank", [-1, NUM_OWNERS, 10**6])
def test_an_unknown_owner_is_that_requests_error(pool: Pool, rank: int) -> None:
    """Stock SGLang's controller raises here, and takes the server down."""
    pool.ask(request("bad", routed_dp_rank=rank), request("good"))
    (reply,) = pool.told()
    assert isinstance(reply, io_struct.AbortReq) and reply.rid == "bad"
    assert reply.finished_reason["status_code"] == 400
    assert f"routed_dp_rank={rank}" in reply.finished_reason["message"]
    assert [r.rid for r in pool.received(0)] == ["good"]


def test_a_dead_owner_is_that_requests_error(pool: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    no_elastic = SimpleNamespace(moe=SimpleNamespace(elastic_ep_backend=None))
    monkeypatch.setattr(data_parallel_controller, "get_exec", lambda: no_elastic)
    pool.ask(request("full", CAPACITY - 60, 10, routed_dp_rank=1))
    pool.ask(request("waits", 100, 100, routed_dp_rank=1))
    pool.ask(io_struct.ActiveRanksOutput(status=[True, False, True]))
    (reply,) = pool.told()
    assert reply.rid == "waits" and reply.finished_reason["status_code"] == 503
    pool.ask(request("dead", routed_dp_rank=1), *[request(f"free{i}") for i in range(4)])
    (reply,) = pool.told()
    assert reply.rid == "dead" and reply.finished_reason["status_code"] == 503
    assert [r.rid for r in pool.received(1)] == ["full"]
    pool.ask(io_struct.ActiveRanksOutput(status=[True, True, True]))
    pool.ask(request("again", routed_dp_rank=1))
    assert [r.rid for r in pool.received(1)] == ["again"]


def test_control_messages_go_where_sglang_sends_them(pool: Pool) -> None:
    block = io_struct.BlockReqInput(req_type=io_struct.BlockReqType.BLOCK)
    pool.ask(block, io_struct.FlushCacheReqInput(), io_struct.ContinueGenerationReqInput())
    kinds = [[type(m).__name__ for m in pool.received(o)] for o in range(NUM_OWNERS)]
    assert kinds[0] == ["BlockReqInput", "FlushCacheReqInput", "ContinueGenerationReqInput"]
    assert kinds[1] == kinds[2] == ["BlockReqInput"]


def test_the_state_is_told_before_the_nodes_are_asked(pool: Pool) -> None:
    pool.ask(request("a"), io_struct.GetInternalStateReq())
    (state,) = pool.told()
    assert isinstance(state, PoolState)
    assert [owner["reserved"] for owner in state.state["owners"]] == [20, 0, 0]
    assert [type(m).__name__ for m in pool.received(0)][-1] == "GetInternalStateReq"


def test_the_gate_refuses_what_the_pool_told_that_it_cannot_hold(pool: Pool) -> None:
    """At the tokenizer ValueError is HTTP 400, also for a stream; and nothing is sent."""
    pool.gate = Gate(AdmissionSettings())
    pool.ask(request("early", 5000, 10))
    assert [reply.rid for reply in pool.told()] == ["early"], "nothing told yet: it is sent"
    pool.gate.keep(pool_state(pool.controller.assigner, TknpConfig()))
    batch = [request("small"), request("huge", CAPACITY - 100, 101)]
    with pytest.raises(ValueError, match=f"needs {CAPACITY + 1} KV tokens"):
        pool.ask(io_struct.BatchTokenizedGenerateReqInput(batch=batch))
    with pytest.raises(ValueError, match="routed_dp_rank=3 is no node"):
        pool.ask(request("nowhere", routed_dp_rank=3))
    assert all(pool.received(owner) == [] for owner in range(NUM_OWNERS)) and pool.told() == []
    pool.ask(request("exact", CAPACITY - 5, 5))
    assert [r.rid for r in pool.received(0)] == ["exact"]
    states = [{"tknp": {"node": node}} for node in (1, 0, 2)]
    pool.gate.add_to(states)
    assert states[0]["tknp"]["ledger"]["capacity"] == CAPACITY
    assert states[0]["tknp"]["controller"]["refusals"] == {"too_large": 2, "unknown_owner": 1}


def test_health_checks_need_no_room(pool: Pool) -> None:
    for owner in range(NUM_OWNERS):
        pool.ask(request(f"full{owner}", CAPACITY - 10, 10))
    pool.ask(*[request(f"HEALTH_CHECK_{i}") for i in range(NUM_OWNERS)])
    for owner in range(NUM_OWNERS):
        assert pool.received(owner)[-1].rid.startswith("HEALTH_CHECK_")
    assert not pool.controller.assigner.queue and pool.told() == []


def test_waiting_requests_are_aborted_as_sglang_aborts(pool: Pool) -> None:
    for owner in range(NUM_OWNERS):
        pool.ask(request(f"full{owner}", CAPACITY - 10, 10))
    reason = {"type": "abort", "message": "why", "status_code": 499}
    pool.ask(request("wait-1", 100), request("wait-2", 100), request("other", 100))
    pool.ask(io_struct.AbortReq(rid="wait", finished_reason=reason))
    assert {(m.rid, m.finished_reason["message"]) for m in pool.told()} == {
        ("wait-1", "why"),
        ("wait-2", "why"),
    }
    assert [type(m).__name__ for m in pool.received(0)][-1] == "AbortReq", "it goes on to the pool"
    pool.ask(io_struct.AbortReq(abort_all=True))
    assert [m.rid for m in pool.told()] == ["other"]


def test_an_abort_that_overtook_its_request_is_repeated(pool: Pool) -> None:
    """Requests and aborts take different ways to an owner."""
    pool.ask(request("a"), request("b"), io_struct.AbortReq(rid="b"))
    pool.received(0)
    pool.report(1, received=0)
    assert pool.received(0) == [], "the owner has not got it yet"
    pool.report(1, received=1, live=(Live(0, "b", 10),))
    (again,) = pool.received(0)
    assert isinstance(again, io_struct.AbortReq) and again.rid == "b" and not again.abort_all
    pool.report(1, received=1, ended=(0,))
    assert pool.received(0) == [] and not pool.controller.early_aborts


def test_a_repeated_abort_does_not_hit_another_request(pool: Pool) -> None:
    """SGLang aborts by prefix."""
    pool.ask(request("a-1"), io_struct.AbortReq(rid="a-1"), request("a-10"))
    pool.received(0)
    pool.report(0, received=1, live=(Live(0, "a-1", 10),))
    assert pool.received(0) == [] and not pool.controller.early_aborts


def test_a_report_that_nobody_can_use_is_left_out(
    pool: Pool, caplog: pytest.LogCaptureFixture
) -> None:
    for frame in (b"", b"junk", pickle.dumps({"owner": 0}), encode([1, 2, 3])):
        pool.controller.on_report([zmq.Frame(frame)])
    pool.seqs.append(0)
    pool.report(NUM_OWNERS)
    pool.ask(request("a"))
    assert [r.rid for r in pool.received(0)] == ["a"]
    assert caplog.text.count("a report that it cannot use") == 5


def test_a_drift_is_logged_with_its_rid(pool: Pool, caplog: pytest.LogCaptureFixture) -> None:
    pool.ask(request("lost"))
    pool.report(0, received=1, live=())
    assert "ledger healed: owner 0, request lost: reserved, but not there" in caplog.text
    assert pool.controller.assigner.ledger.accounts[0].reserved == 0


def test_an_owner_that_never_reports_stops_the_controller(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "FIRST_REPORT_SECONDS", 0.2)
    context = zmq.Context()
    waiting = Controller.__new__(Controller)
    waiting.__dict__.update(
        stock=SimpleNamespace(soft_watchdog=SimpleNamespace(feed=lambda: None)),
        reports=context.socket(zmq.PULL),
        requests=context.socket(zmq.PULL),
        report_address="tcp://first:5048",
        poller=zmq.Poller(),
        assigner=Assigner(2, AssignerSettings(), print, print),
        metrics=None,
        waiting_log_due=0.0,
    )
    start = time.monotonic()
    with pytest.raises(TimeoutError, match=r"node\(s\) \[0, 1\] at tcp://first:5048 within"):
        waiting.await_owners()
    assert time.monotonic() - start < 5
    context.destroy(linger=0)


@pytest.mark.parametrize(("length", "whole"), [(10.0, 10), (9.2, 10), (True, 1)])
def test_lengths_that_are_no_integers_are_rounded_up(pool: Pool, length: Any, whole: int) -> None:
    """SGLang serves such a request; a controller that stops on it would take the pool along."""
    pool.ask(request("odd", 10, length))
    io_struct.sock_send(pool.to_controller, request("bare", 10, length))
    pool.ask()
    assert [r.rid for r in pool.received(0)] == ["odd"]
    reserved = [a.reserved for a in pool.controller.assigner.ledger.accounts]
    assert reserved == [10 + whole, 10 + whole, 0]


@pytest.mark.parametrize(
    "field",
    [
        {"rid": 7},
        {"max_new_tokens": "ten"},
        {"max_new_tokens": 1e999},
        {"priority": 1.5},
        {"routed_dp_rank": "0"},
    ],
)
def test_what_cannot_be_placed_is_an_error_of_its_own(pool: Pool, field: Any) -> None:
    bad = request(**{"rid": "bad", **field})
    with pytest.raises(ValueError, match="--enable-tknp|number of tokens"):
        pool.ask(bad)
    io_struct.sock_send(pool.to_controller, bad)
    pool.to_controller.send_multipart([encode([1, 2]), compat_ipc.encode_message(bad)])
    pool.ask(request("good"))
    first, second = pool.told()
    assert first.rid == second.rid == str(bad.rid)
    assert first.finished_reason["status_code"] == second.finished_reason["status_code"] == 400
    assert [r.rid for r in pool.received(0)] == ["good"]


def test_a_session_names_its_node(pool: Pool) -> None:
    session = io_struct.SessionParams(id="s")
    with pytest.raises(ValueError, match="session_params needs routed_dp_rank"):
        pool.ask(request("a", session_params=session))
    pool.ask(request("b", session_params=session, routed_dp_rank=2))
    assert [r.rid for r in pool.received(2)] == ["b"]


def test_a_request_that_was_lost_on_its_way_is_an_error_to_its_client(pool: Pool) -> None:
    pool.ask(request("lost"), request("other"), request("more"), request("next"))
    pool.report(0, received=1, live=(Live(0, "next", 10),))
    (reply,) = pool.told()
    assert reply.rid == "lost" and reply.finished_reason["status_code"] == 503


def test_the_header_says_what_placing_needs() -> None:
    whole = request("a", 600, 7, priority=2, routed_dp_rank=1, http_worker_ipc="back")
    header = forward.header_of(whole, with_prefix=True)
    assert decode_header(encode(header)) == header
    assert (header.rid, header.input_tokens, header.max_new_tokens) == ("a", 600, 7)
    assert (header.priority, header.routed_dp_rank, header.http_worker_ipc) == (2, 1, "back")
    assert len(header.prefix) == 2
    salted = forward.header_of(request("b", 600, cache_salt="s"), with_prefix=True)
    assert set(salted.prefix).isdisjoint(header.prefix), "KV of another salt is not shared"
    assert forward.header_of(whole, with_prefix=False).prefix == ()


def test_what_ends_a_request() -> None:
    assert compat_ipc.ended_rids(io_struct.AbortReq(rid="a")) == ["a"]
    kind = io_struct.BatchTokenIDOutput
    fields: dict[str, Any] = {f.name: None for f in msgspec.structs.fields(kind) if f.required}
    fields.update(rids=["a", "b", "c"], finished_reasons=[None, {"type": "stop"}, None])
    output = kind(**fields)
    assert compat_ipc.ended_rids(output) == ["b"]
    assert compat_ipc.ended_rids(io_struct.HealthCheckOutput()) == []
