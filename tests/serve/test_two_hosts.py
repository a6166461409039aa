"""Two hosts on one machine: two network namespaces, SGLang's own multi-host launch, T = 2.

The interface between them counts every byte that crosses: TKNP's own count must explain it, so
that nothing dense (all-reduces inside a node) crosses. Then a rank on one host is killed, and
both hosts end. Needs root and network namespaces; skipped, with the reason, without them.
"""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.serve.client import PROMPTS, greedy
from tests.serve.server import START_SECONDS, Server, tknp_args
from tests.serve.test_parity import find_rank, gone_after
from tests.serve.test_starts import wait_for_rank
from tests.tiny import make_tiny

pytestmark = pytest.mark.serve

HOSTS = ("tknp-test-a", "tknp-test-b")
ADDRESSES = ("10.213.77.1", "10.213.77.2")
LINKS = ("tknp-a", "tknp-b")
# Rows wide enough that payload, not headers, makes the traffic.
WIDE = {"hidden_size": 1024, "num_attention_heads": 16, "num_key_value_heads": 4, "head_dim": 64}
# Headers and acknowledgements of one message, and SGLang's own synchronisation of one step.
BYTES_PER_MESSAGE = 300
BYTES_PER_STEP = 12_000

CLIENT = """
import json, sys, urllib.request
from concurrent.futures import ThreadPoolExecutor
url, bodies = sys.argv[1], json.load(sys.stdin)
def post(body):
    data = json.dumps(body).encode()
    request = urllib.request.Request(url + "/generate", data, {"Content-Type": "application/json"})
    return json.load(urllib.request.urlopen(request, timeout=120))
def info():
    return json.load(urllib.request.urlopen(url + "/server_info", timeout=30))["internal_states"]
with ThreadPoolExecutor(16) as pool:
    replies = list(pool.map(post, bodies))
print(json.dumps({"replies": replies, "states": [state["tknp"] for state in info()]}))
"""


def ip(*args: str) -> str:
    return subprocess.run(
        ["ip", *args], check=True, capture_output=True, text=True, timeout=10
    ).stdout


@pytest.fixture
def hosts() -> Iterator[None]:
    """Two namespaces joined by one link."""
    try:
        ip("netns", "add", HOSTS[0])
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"network namespaces cannot be made here: {error}")
    try:
        ip("netns", "add", HOSTS[1])
        ends = ("netns", HOSTS[0], "type", "veth", "peer", "name", LINKS[1], "netns", HOSTS[1])
        ip("link", "add", LINKS[0], *ends)
        for host, address, link in zip(HOSTS, ADDRESSES, LINKS, strict=True):
            ip("-n", host, "addr", "add", f"{address}/24", "dev", link)
            for device in (link, "lo"):
                ip("-n", host, "link", "set", device, "up")
        yield
    finally:
        for host in HOSTS:
            subprocess.run(["ip", "netns", "del", host], timeout=10)


def start(rank: int, model: Path, log: Path) -> Server:
    env = {
        "SGLANG_HOST_IP": ADDRESSES[rank],
        "HOST_IP": ADDRESSES[rank],
        "GLOO_SOCKET_IFNAME": LINKS[rank],
    }
    prefix = ["ip", "netns", "exec", HOSTS[rank]]
    if rank:
        # SGLang takes two processes that share memory for one host.
        private = 'mount -t tmpfs tmpfs /dev/shm; exec "$@"'
        prefix += ["unshare", "-m", "bash", "-c", private, "bash"]
    flags = {"nnodes": 2, "node_rank": rank, "attn_dp_size": None, "tknp_force_slots": True}
    args = tknp_args(model, 2, 2, **flags)
    args += ["--dist-init-addr", f"{ADDRESSES[0]}:29555"]
    return Server(args, log, env, prefix=prefix, host=ADDRESSES[rank])


def wait_ready(servers: list[Server]) -> None:
    deadline = time.monotonic() + START_SECONDS
    while "is fired up" not in servers[0].log.read_text():
        assert time.monotonic() < deadline, servers[0].tail() + servers[1].tail()
        for server in servers:
            assert server.process.poll() is None, server.tail()
        time.sleep(0.5)


def ask(server: Server, prompts: list[list[int]]) -> Any:
    """Replies and the nodes' states, by a client on the first host."""
    bodies = [{"input_ids": prompt, "sampling_params": greedy()} for prompt in prompts]
    command = ["ip", "netns", "exec", HOSTS[0], sys.executable, "-c", CLIENT, server.url]
    text = subprocess.run(
        command, input=json.dumps(bodies), check=True, capture_output=True, text=True, timeout=180
    ).stdout
    return json.loads(text)


def link_bytes() -> int:
    """Bytes over the link so far, both ways."""
    (link,) = json.loads(ip("-n", HOSTS[0], "-s", "-j", "link", "show", LINKS[0]))
    return int(link["stats64"]["rx"]["bytes"] + link["stats64"]["tx"]["bytes"])


def sent(states: list[Any]) -> tuple[int, int, int]:
    """(bytes, messages, steps) of all ranks: every TP rank sends what its node's first one does."""
    kinds = [traffic for state in states for traffic in state["exchange"].values()]
    total = 2 * sum(kind["bytes"] for kind in kinds), 2 * sum(kind["messages"] for kind in kinds)
    return *total, states[0]["num_steps"]


@pytest.mark.timeout(600)
def test_two_hosts(hosts: None, tmp_path: Path) -> None:
    model = make_tiny("llama-untied", tmp_path / "model", **WIDE)
    logs = [tmp_path / f"host{rank}.log" for rank in (0, 1)]
    servers = [start(rank, model, log) for rank, log in enumerate(logs)]
    try:
        wait_ready(servers)
        warm = ask(servers[0], PROMPTS[:2])
        before = link_bytes()
        after = ask(servers[0], PROMPTS)
        check_traffic(link_bytes() - before, sent(warm["states"]), sent(after["states"]))
        assert {reply["meta_info"]["dp_rank"] for reply in after["replies"]} == {0, 1}
        for ledger in (state["ledger"] for state in after["states"]):
            # Both owners' reports reach the controller, one of them over the network.
            assert ledger["capacity"] > 0 and ledger["drifts"] == 0, ledger
            assert len(PROMPTS) // 4 < ledger["sent"], ledger
        check_killed_rank_ends_both_hosts(servers)
    finally:
        for server in servers:
            server.stop()


def check_traffic(grown: int, before: tuple[int, int, int], after: tuple[int, int, int]) -> None:
    payload, messages, steps = (a - b for a, b in zip(after, before, strict=True))
    assert payload > 10_000_000, "too little traffic to tell anything"
    print(f"link {grown} bytes, TKNP {payload} in {messages} messages, {steps} steps")
    allowed = 1.1 * payload + BYTES_PER_MESSAGE * messages + BYTES_PER_STEP * steps
    assert payload <= grown <= allowed, (grown, payload, messages, steps)


def check_killed_rank_ends_both_hosts(servers: list[Server]) -> None:
    os.kill(find_rank(servers[1], 3), signal.SIGKILL)
    for server in servers:
        assert gone_after(server, 10), server.tail()
    assert "rank 3 (node 1, TP rank 1), process" in servers[1].log.read_text()
    assert "sglang-tknp: " in servers[0].log.read_text()


@pytest.mark.timeout(300)
def test_rank_killed_while_the_hosts_start(hosts: None, tmp_path: Path) -> None:
    """Before any process group exists only the launchers' own link tells of the other host."""
    model = make_tiny("llama-untied", tmp_path / "model")
    logs = [tmp_path / f"host{rank}.log" for rank in (0, 1)]
    servers = [start(rank, model, log) for rank, log in enumerate(logs)]
    try:
        wait_for_rank(servers[0], 0)
        os.kill(wait_for_rank(servers[1], 3), signal.SIGKILL)
        for server in servers:
            assert gone_after(server, 10), server.tail()
        assert "rank 3 (node 1, TP rank 1), process" in logs[1].read_text()
        assert f"host {ADDRESSES[1]} of the pool is gone" in logs[0].read_text()
    finally:
        for server in servers:
            server.stop()
