"""The controller of a live pool: who waits, who is refused, who goes where, and what is told.

One pool of two nodes of two ranks, whose owners hold a thousand KV tokens, with SGLang's queue
limit and waiting time-out set, priorities on, and every scheduler's clock off by its own amount
(prior art, case 9). Long requests hold both owners while the tests look at what waits.
"""

import contextlib
import os
import re
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.error import HTTPError

import openai
import pytest

from tests.serve.client import PROMPTS, generate, generate_all, greedy, owners, tokens
from tests.serve.server import Server, serve, tknp_args

pytestmark = [pytest.mark.serve, pytest.mark.timeout(300)]

CAPACITY = 1000
HELD = 900  # by one long request
MAX_QUEUED = 8
TIMEOUT = 5.0
SKEW = Path(__file__).parent / "skew"


@pytest.fixture(scope="module")
def pool(checkpoint: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("controller")
    path = os.pathsep.join([str(SKEW), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
    env = {
        "PYTHONPATH": path,
        "TKNP_SKEW_LOG": str(folder / "skew"),
        "SGLANG_REQ_WAITING_TIMEOUT": str(TIMEOUT),
    }
    flags = {
        "max_total_tokens": CAPACITY + 2,
        "max_queued_requests": MAX_QUEUED,
        "enable_priority_scheduling": True,
        "enable_metrics": True,
        "log_requests": True,
        "log_requests_level": 0,
    }
    with serve(tknp_args(checkpoint("llama"), 2, 2, **flags), folder / "log", env) as server:
        skews = (folder / "skew").read_text().split()
        assert len(set(skews)) >= 4, "every scheduler's clock was to be off by its own amount"
        yield server


@pytest.fixture(scope="module")
def clients() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(64) as executor:
        yield executor


@pytest.fixture(autouse=True)
def empty_pool(pool: Server) -> Iterator[None]:
    """Every test leaves nothing behind: not in the ledger, not in the queue, not in the pools."""
    yield
    pool.post("/abort_request", {"abort_all": True})
    wait_for(lambda: not sum(o["requests"] for o in ledgers(pool)) + controller(pool)["waiting"])
    assert all(o["reserved"] == o["used"] == o["drifts"] == 0 for o in ledgers(pool))
    loads = pool.get_json("/v1/loads?include=core")["loads"]
    assert [load["num_used_tokens"] for load in loads] == [0, 0]


def states(server: Server) -> list[dict[str, Any]]:
    found = [s["tknp"] for s in server.get_json("/server_info")["internal_states"]]
    return sorted(found, key=lambda state: state["node"])


def ledgers(server: Server) -> list[dict[str, Any]]:
    return [state["ledger"] for state in states(server)]


def controller(server: Server) -> dict[str, Any]:
    found: dict[str, Any] = states(server)[0]["controller"]
    return found


def wait_for(condition: Any, seconds: float = 10) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "not within the time"
        time.sleep(0.05)


def send(clients: ThreadPoolExecutor, server: Server, rid: str, **body: Any) -> Future[Any]:
    """A request of 10 input and 10 output tokens, unless `body` says otherwise."""
    whole = {"rid": rid, "input_ids": [7] * 10, "sampling_params": greedy(10), **body}
    return clients.submit(server.post, "/generate", whole)


@contextlib.contextmanager
def owners_held(clients: ThreadPoolExecutor, server: Server) -> Iterator[None]:
    """Each owner has room for CAPACITY - HELD tokens meanwhile."""
    long = {"input_ids": [5] * 20, "sampling_params": greedy(HELD - 20)}
    futures = [send(clients, server, f"long-{i}", **long) for i in (0, 1)]
    wait_for(lambda: [o["reserved"] for o in ledgers(server)] == [HELD, HELD])
    try:
        yield
    finally:
        for i in (0, 1):
            server.post("/abort_request", {"rid": f"long-{i}"})
        for future in futures:
            assert future.result()["meta_info"]["finish_reason"]["type"] == "abort"


def error_of(future: Future[Any]) -> tuple[int, str]:
    with pytest.raises(HTTPError) as failure:
        future.result()
    return failure.value.code, failure.value.read().decode()


LARGE = {"sampling_params": greedy(300)}  # does not fit beside a long request


def test_tokens_are_stocks_and_owners_share(pool: Server, stock_tokens: Any) -> None:
    replies = generate_all(pool, PROMPTS)
    assert tokens(replies) == stock_tokens("llama", 2)
    assert owners(replies) == {0, 1}


def test_case_13_owners_without_rows_are_ordinary(pool: Server, stock_tokens: Any) -> None:
    """Prior art, case 13: an idle rank crashed; here one node, root and owner, has no rows."""
    for owner in (0, 1):
        reply = generate(pool, PROMPTS[3], routed_dp_rank=owner)
        assert reply["meta_info"]["dp_rank"] == owner
        assert reply["output_ids"] == stock_tokens("llama", 2)[3]


def test_who_has_no_room_waits_and_small_ones_pass(
    pool: Server, clients: ThreadPoolExecutor
) -> None:
    before = controller(pool)["overtakes"]
    with owners_held(clients, pool):
        large = send(clients, pool, "large", **LARGE)
        wait_for(lambda: controller(pool)["waiting"] == 1)
        small = send(clients, pool, "small").result()
        assert small["meta_info"]["finish_reason"]["type"] == "length"
        assert not large.done() and controller(pool)["overtakes"] == before + 1
    assert large.result()["meta_info"]["completion_tokens"] == 300


def test_waiting_requests_can_be_aborted(pool: Server, clients: ThreadPoolExecutor) -> None:
    with owners_held(clients, pool):
        waiting = send(clients, pool, "waiting", **LARGE)
        wait_for(lambda: controller(pool)["waiting"] == 1)
        pool.post("/abort_request", {"rid": "waiting"})
        finish = waiting.result()["meta_info"]["finish_reason"]
        assert finish["type"] == "abort" and controller(pool)["waiting"] == 0


def test_a_client_that_leaves_takes_its_waiting_request_along(
    pool: Server, clients: ThreadPoolExecutor
) -> None:
    before = controller(pool)["refusals"].get("timeout", 0)
    with owners_held(clients, pool):
        body = {"rid": "left", "input_ids": [7] * 10, **LARGE, "stream": True}
        with contextlib.suppress(OSError):
            pool.post("/generate", body, timeout=0.5)
        wait_for(lambda: controller(pool)["waiting"] == 0)
        assert controller(pool)["refusals"].get("timeout", 0) == before, "it was not aborted"


def test_case_09_one_clock_decides_who_waited_too_long(
    pool: Server, clients: ThreadPoolExecutor
) -> None:
    """Prior art, case 9: clocks that disagree must neither hang the pool nor abort at random."""
    with owners_held(clients, pool):
        start = time.monotonic()
        status, text = error_of(send(clients, pool, "late", **LARGE))
        assert status == 503 and "Request waiting timeout reached." in text
        assert TIMEOUT - 0.5 < time.monotonic() - start < TIMEOUT + 3
    reply = send(clients, pool, "after").result()
    assert reply["meta_info"]["finish_reason"]["type"] == "length"


def test_a_full_queue_follows_sglangs_limit_and_priorities(
    pool: Server, clients: ThreadPoolExecutor
) -> None:
    with owners_held(clients, pool):
        waiting = [send(clients, pool, f"w{i}", priority=5, **LARGE) for i in range(MAX_QUEUED)]
        wait_for(lambda: controller(pool)["waiting"] == MAX_QUEUED)
        status, text = error_of(send(clients, pool, "less", priority=1, **LARGE))
        assert status == 503 and "The request queue is full." in text
        more = send(clients, pool, "more", priority=9, **LARGE)
        wait_for(lambda: any(future.done() for future in waiting))
        ended = [future for future in waiting if future.done()]
        status, text = error_of(ended[0])
        assert len(ended) == 1 and status == 503 and "higher priority" in text
    assert more.result()["meta_info"]["completion_tokens"] == 300


def test_the_queue_limit_does_not_hold_for_a_burst_that_fits(pool: Server) -> None:
    """The owners' own queues are longer than the limit for a moment, and refuse nobody."""
    body = {"input_ids": [[9] * 5] * 3 * MAX_QUEUED, "sampling_params": greedy(4)}
    replies = pool.post("/generate", body)
    assert {reply["meta_info"]["finish_reason"]["type"] for reply in replies} == {"length"}


def test_what_nobody_could_hold_is_refused_at_once(
    pool: Server, clients: ThreadPoolExecutor
) -> None:
    status, text = error_of(send(clients, pool, "huge", sampling_params=greedy(CAPACITY)))
    assert status == 400
    assert f"needs {CAPACITY + 10} KV tokens (10 of input and {CAPACITY} of expected" in text
    assert f"the largest node of this pool holds {CAPACITY}" in text
    client = openai.OpenAI(base_url=pool.url + "/v1", api_key="none", max_retries=0)
    with pytest.raises(openai.BadRequestError, match="largest node"):
        client.completions.create(model="default", prompt=[7] * 10, max_tokens=CAPACITY)
    with pytest.raises(openai.BadRequestError, match="largest node"):
        client.completions.create(
            model="default", prompt=[7] * 10, max_tokens=CAPACITY, stream=True
        )
    whole = send(clients, pool, "whole", sampling_params=greedy(CAPACITY - 10))
    wait_for(lambda: ledgers(pool)[0]["reserved"] == CAPACITY)
    pool.post("/abort_request", {"rid": "whole"})
    assert whole.result()["meta_info"]["finish_reason"]["type"] == "abort"


def test_case_02_and_20_an_explicit_owner_is_honoured(
    pool: Server, clients: ThreadPoolExecutor
) -> None:
    """Prior art, cases 2 and 20: the hint counts, shows as load, and others go elsewhere."""
    long = {"sampling_params": greedy(200)}
    hinted = [send(clients, pool, f"hint-{i}", routed_dp_rank=1, **long) for i in range(4)]
    wait_for(lambda: ledgers(pool)[1]["reserved"] == 4 * 210)
    assert ledgers(pool)[0]["reserved"] == 0
    free = [send(clients, pool, f"free-{i}") for i in range(4)]
    assert {f.result()["meta_info"]["dp_rank"] for f in free} == {0}
    assert {f.result()["meta_info"]["dp_rank"] for f in hinted} == {1}
    status, text = error_of(send(clients, pool, "nobody", routed_dp_rank=2))
    assert status == 400 and "routed_dp_rank=2" in text


def test_case_06_every_request_of_a_batch_has_one_owner(
    pool: Server, clients: ThreadPoolExecutor
) -> None:
    """Prior art, case 6: a batch was once sent to every worker."""
    before = sum(owner["sent"] for owner in ledgers(pool))
    body = {"input_ids": [[9] * 5] * 6, "sampling_params": greedy(4)}
    replies = pool.post("/generate", body)
    assert len({tuple(reply["output_ids"]) for reply in replies}) == 1
    assert sum(owner["sent"] for owner in ledgers(pool)) == before + 6
    assert owners(replies) == {0, 1}


def test_many_samples_and_health_checks(pool: Server, clients: ThreadPoolExecutor) -> None:
    with owners_held(clients, pool):
        assert pool.get("/health_generate").status == 200, "a health check never waits"
        body = {"input_ids": [9] * 5, "sampling_params": greedy(4, n=3)}
        assert len(pool.post("/generate", body)) == 3
    assert pool.get("/health_generate").status == 200


def test_pause_and_continue_with_requests_that_wait(
    pool: Server, clients: ThreadPoolExecutor
) -> None:
    with owners_held(clients, pool):
        waiting = send(clients, pool, "waits", **LARGE)
        wait_for(lambda: controller(pool)["waiting"] == 1)
        pool.post("/pause_generation", {"mode": "in_place"})
        pool.post("/continue_generation", {})
    assert waiting.result()["meta_info"]["completion_tokens"] == 300
    assert "Cache flushed" in pool.post("/flush_cache", {})


def test_an_abort_of_all_ends_who_waits_too(pool: Server, clients: ThreadPoolExecutor) -> None:
    with owners_held(clients, pool):
        waiting = [send(clients, pool, f"all-{i}", **LARGE) for i in range(3)]
        wait_for(lambda: controller(pool)["waiting"] == 3)
        pool.post("/abort_request", {"abort_all": True})
        for future in waiting:
            assert future.result()["meta_info"]["finish_reason"]["type"] == "abort"


def metric(server: Server, name: str, **labels: str) -> float:
    pattern = "".join(rf'(?=[^}}]*{key}="{value}")' for key, value in labels.items())
    text = server.get("/metrics").read().decode()
    found = re.search(rf"^sglang:tknp_{name}(?:{{{pattern}[^}}]*}})? (\S+)$", text, re.M)
    assert found, f"no metric {name}"
    return float(found[1])


def test_metrics_and_log_show_the_owners(pool: Server, clients: ThreadPoolExecutor) -> None:
    for body in ({"sampling_params": greedy(CAPACITY)}, {"routed_dp_rank": 1}):
        with contextlib.suppress(HTTPError):
            send(clients, pool, "first", **body).result()
    with owners_held(clients, pool):
        waiting = send(clients, pool, "seen", **LARGE)
        wait_for(lambda: metric(pool, "waiting_requests") == 1)
        small = send(clients, pool, "passes").result()["meta_info"]["dp_rank"]
        for owner in ("0", "1"):
            assert metric(pool, "owner_capacity_tokens", owner=owner) == CAPACITY
            assert metric(pool, "owner_reserved_tokens", owner=owner) == HELD
            assert 20 <= metric(pool, "owner_used_tokens", owner=owner) <= HELD
            assert metric(pool, "owner_running_requests", owner=owner) == 1
            assert metric(pool, "owner_waiting_requests", owner=owner) == 0
            assert metric(pool, "queue_time_seconds_count", owner=owner) > 0
    owner = waiting.result()["meta_info"]["dp_rank"]
    log = pool.log.read_text()
    assert re.search(rf"Request seen: owner {owner}, 310 KV tokens reserved, waited \d", log)
    wait_for(lambda: metric(pool, "refused_requests_total", reason="too_large") >= 1)
    assert metric(pool, "owner_overtakes_total", owner=str(small)) >= 1
    assert metric(pool, "load_imbalance") >= 1
    assert metric(pool, "owner_ledger_drifts_total", owner="0") == 0
