"""Three hundred requests on a real model whose owners have room for few, a third of them aborted.

The pretended memory leaves each owner some hundred KV tokens, so most requests must wait in the
controller. All that are not aborted must answer as stock SGLang does; in the end nothing is
reserved, and every owner's KV is free.
"""

import json
import random
import re
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from sglang_tknp.launch.models import prepare_smollm2
from tests.serve.client import greedy
from tests.serve.server import Server, base_args, serve, tknp_args

pytestmark = pytest.mark.serve

NUM_REQUESTS = 300
KV_TOKENS = 250
STATIC_SHARE = 0.9
TEXT = (Path(__file__).parents[2] / "LICENSE").read_text()  # English that stays as it is
RANDOM = random.Random(20)


def make_requests() -> list[dict[str, Any]]:
    """Pieces of English of very mixed lengths; every third is to be aborted some time.

    `abort_after` is a number of answered requests: a time would depend on the machine.

    No rid begins another: SGLang aborts by prefix.
    """
    found: list[dict[str, Any]] = []
    for index in range(NUM_REQUESTS):
        start, length = RANDOM.randrange(len(TEXT) - 500), RANDOM.choice([8, 20, 40, 80, 200])
        found.append(
            {
                "rid": f"mixed-{index:03d}",
                "text": TEXT[start : start + length],
                "sampling_params": greedy(RANDOM.choice([2, 4, 8, 12])),
                "abort_after": RANDOM.randrange(NUM_REQUESTS // 2) if index % 3 == 0 else None,
            }
        )
    return found


def memory_gb(config: dict[str, int]) -> float:
    """Of a rank whose half of the layers and embedding (float32) leave KV_TOKENS tokens."""
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    kv_width = config["num_key_value_heads"] * 64
    layer = 2 * hidden * (hidden + kv_width) + 3 * hidden * inner + 2 * hidden
    layers = config["num_hidden_layers"]
    weights = 4 * (layers / 2 * layer + config["vocab_size"] * hidden)
    return (weights + KV_TOKENS * layers * 2 * kv_width * 4) / STATIC_SHARE / 2**30


def ask(server: Server, request: dict[str, Any]) -> Any:
    body = {key: value for key, value in request.items() if key != "abort_after"}
    return server.post("/generate", body, timeout=600)


def ask_all(server: Server, requests: list[dict[str, Any]]) -> list[Any]:
    """All at once; the replies, with None for those whose abort came first."""
    with ThreadPoolExecutor(len(requests)) as clients:
        futures = [clients.submit(ask, server, request) for request in requests]
        to_abort = sorted(
            (r for r in requests if r["abort_after"] is not None), key=lambda r: r["abort_after"]
        )
        for request in to_abort:
            while sum(future.done() for future in futures) < request["abort_after"]:
                time.sleep(0.02)
            server.post("/abort_request", {"rid": request["rid"]})
        replies = [future.result() for future in futures]
    aborted = [r["meta_info"]["finish_reason"]["type"] == "abort" for r in replies]
    return [None if gone else reply for gone, reply in zip(aborted, replies, strict=True)]


def ledgers(server: Server) -> list[dict[str, Any]]:
    states = server.get_json("/server_info")["internal_states"]
    return [state["tknp"]["ledger"] for state in states]


def wait_until_empty(server: Server, seconds: float = 20) -> list[dict[str, Any]]:
    deadline = time.monotonic() + seconds
    while any(ledger["requests"] for ledger in ledgers(server)):
        assert time.monotonic() < deadline, ledgers(server)
        time.sleep(0.2)
    return ledgers(server)


def check_all_is_free(server: Server) -> None:
    for ledger in wait_until_empty(server):
        assert ledger["reserved"] == ledger["used"] == ledger["waiting"] == 0, ledger
        assert ledger["drifts"] == 0, ledger
        assert KV_TOKENS / 2 < ledger["capacity"] < KV_TOKENS * 2, "the memory was to be small"
    for load in server.get_json("/v1/loads?include=core")["loads"]:
        assert load["num_used_tokens"] == load["num_running_reqs"] == 0, load
        assert load["num_waiting_reqs"] == 0, load


def check_most_waited(server: Server) -> None:
    log = server.log.read_text()
    waited = [float(seconds) for seconds in re.findall(r"KV tokens reserved, waited (\S+) s", log)]
    assert sum(seconds > 0.01 for seconds in waited) > NUM_REQUESTS / 2, len(waited)


@pytest.mark.timeout(900)
def test_most_wait_and_a_third_is_aborted(tmp_path: Path) -> None:
    model = prepare_smollm2()
    config = json.loads((model / "config.json").read_text())
    requests = make_requests()
    flags = {"mem_fraction_static": STATIC_SHARE, "chunked_prefill_size": 256}
    with serve(base_args(model, tknp_device_memory_gb=2, **flags), tmp_path / "stock") as server:
        with ThreadPoolExecutor(32) as clients:
            expected = list(clients.map(lambda request: ask(server, request), requests))
    flags |= {"log_requests": True, "log_requests_level": 0}
    args = tknp_args(model, 2, tknp_device_memory_gb=memory_gb(config), **flags)
    with serve(args, tmp_path / "tknp") as server:
        replies = ask_all(server, requests)
        check_all_is_free(server)
        check_most_waited(server)
    aborted = 0
    for request, reply, stock in zip(requests, replies, expected, strict=True):
        if reply is None:
            aborted += 1
            assert request["abort_after"] is not None, request
        else:
            assert reply["output_ids"] == stock["output_ids"], request
    assert aborted >= NUM_REQUESTS // 10, "the aborts came too late to prove anything"
    owners = [r["meta_info"]["dp_rank"] for r in replies if r is not None]
    assert min(owners.count(0), owners.count(1)) > len(owners) // 4
