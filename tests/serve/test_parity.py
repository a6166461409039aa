"""Greedy tokens through TKNP equal stock SGLang's at the same T in float32.

One pool serves many checks, since a start costs most of a minute: concurrent prompts of mixed
lengths over all owners with chunked prefill, a prefix-cache hit, a lone request (zero rows on
every other owner), exact bytes on the wire, and the pool's end when a rank is killed.
"""

import contextlib
import os
import re
import signal
import time
import urllib.error
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.metadata import metadata_bytes
from tests.serve.client import PROMPTS, generate, generate_all, greedy, owners, tokens
from tests.serve.server import Server, check_native, serve, tknp_args
from tests.tiny import SHAPE

pytestmark = pytest.mark.serve

SHAPES = [(2, 1), (3, 1), (2, 2)]
# Blocks of uneven size where the balanced ones are even.
BLOCKS = {("llama", 2, 1): "1,4", ("qwen2", 3, 1): "1,3,1"}
FAMILIES = ["llama", "llama-untied", "qwen2", "qwen3", "mistral", "nemotron"]
SOME_SHAPES = {"llama-untied": [(2, 1)], "nemotron": [(2, 1), (2, 2)]}
ON_SLOTS = [
    (family, nodes, ranks, True)
    for nodes, ranks in SHAPES
    for family in FAMILIES
    if (nodes, ranks) in SOME_SHAPES.get(family, SHAPES)
]
# Exact rows, as on a CPU by default, are the rows of most other serve tests.
CASES = [*ON_SLOTS, ("llama", 2, 1, False)]


@pytest.mark.timeout(600)
@pytest.mark.parametrize(("family", "nodes", "ranks", "slots"), CASES)
def test_tokens_equal_stock(
    family: str,
    nodes: int,
    ranks: int,
    slots: bool,
    checkpoint: Any,
    stock_tokens: Any,
    tmp_path: Any,
) -> None:
    expected = stock_tokens(family, ranks)
    blocks = BLOCKS.get((family, nodes, ranks))
    flags: dict[str, Any] = {"tknp_layer_blocks": blocks, "tknp_force_slots": slots}
    flags["enable_metrics"] = True
    args = tknp_args(checkpoint(family), nodes, ranks, **flags)
    args += ["--cuda-graph-bs-decode", "1", "2", "4", "8"] if slots else []
    with serve(args, tmp_path / "tknp.log") as server:
        check_native(server)
        check_concurrent_prompts(server, expected, nodes)
        check_prefix_cache_hit(server, expected)
        check_lone_requests(server, expected, nodes)
        check_pool_info(server, nodes, ranks, blocks)
        check_exact_bytes(server, checkpoint(family), nodes, ranks, slots)
        if slots:
            check_slots(server, expected, nodes)
        check_killed_rank_ends_pool(server, nodes * ranks - 1, ranks)


def test_our_model_equals_transformers(checkpoint: Any, stock_tokens: Any) -> None:
    """SGLang without TKNP, the reference above, runs the same class: it needs one of its own."""
    model = AutoModelForCausalLM.from_pretrained(checkpoint("nemotron"))
    model.generation_config.eos_token_id = None
    outs = [
        model.generate(torch.tensor([prompt]), max_new_tokens=24, do_sample=False)[0].tolist()
        for prompt in PROMPTS
    ]
    answers = [out[len(prompt) :] for out, prompt in zip(outs, PROMPTS, strict=True)]
    assert stock_tokens("nemotron", 1) == answers


def check_concurrent_prompts(server: Server, expected: list[list[int]], nodes: int) -> None:
    replies = generate_all(server, PROMPTS)
    assert tokens(replies) == expected
    assert owners(replies) == set(range(nodes))


def check_prefix_cache_hit(server: Server, expected: list[list[int]]) -> None:
    """A prompt continued by its own answer: its owner, asked for by rank, has the prefix."""
    longest = max(range(len(PROMPTS)), key=lambda i: len(PROMPTS[i]))
    prompt, answer = PROMPTS[longest], expected[longest]
    for owner in (0, 1):
        first = generate(server, prompt, routed_dp_rank=owner)
        again = generate(server, prompt + answer[:8], routed_dp_rank=owner)
        assert first["output_ids"] == answer
        assert again["output_ids"][:16] == answer[8:24]
        assert again["meta_info"]["cached_tokens"] > len(prompt) // 2
        assert again["meta_info"]["dp_rank"] == owner


def check_lone_requests(server: Server, expected: list[list[int]], nodes: int) -> None:
    """One request at a time: all other owners have zero rows in every step."""
    for owner in range(nodes):
        for index in (0, 2):
            reply = generate(server, PROMPTS[index], routed_dp_rank=owner)
            assert reply["output_ids"] == expected[index]


def check_pool_info(server: Server, nodes: int, ranks: int, blocks: str | None) -> None:
    states = [state["tknp"] for state in server.get_json("/server_info")["internal_states"]]
    assert sorted(state["node"] for state in states) == list(range(nodes))
    for state in states:
        assert (state["num_nodes"], state["ranks_per_node"]) == (nodes, ranks)
        assert sum(state["layer_blocks"]) == SHAPE["num_hidden_layers"]
        if blocks:
            assert state["layer_blocks"] == [int(n) for n in blocks.split(",")]


def traffic(server: Server) -> list[dict[str, int]]:
    """Bytes sent by every node so far, per kind, and its steps."""
    states = sorted(
        (state["tknp"] for state in server.get_json("/server_info")["internal_states"]),
        key=lambda state: state["node"],
    )
    return [
        {kind: t["bytes"] for kind, t in state["exchange"].items()} | {"steps": state["num_steps"]}
        for state in states
    ]


def check_exact_bytes(server: Server, model: Any, nodes: int, ranks: int, slots: bool) -> None:
    """The paper's equation 3 for every owner alone, and each handoff's rows once.

    Of one peer group: /server_info counts a node's first rank. On slots, every owner has one in
    each decode step.
    """
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(model)
    q, kv = row_sizes(config, ranks)
    blocks = server.get_json("/server_info")["internal_states"][0]["tknp"]["layer_blocks"]
    for owner in range(nodes):
        before = traffic(server)
        reply = generate(server, PROMPTS[5], routed_dp_rank=owner)
        after = traffic(server)
        sent = [{k: a[k] - b[k] for k in a} for a, b in zip(after, before, strict=True)]
        # The last generated token is no row: nobody asks for what follows it.
        prefill = len(PROMPTS[5]) - reply["meta_info"]["cached_tokens"]
        decode = len(reply["output_ids"]) - 1
        everyone = decode * (nodes if slots else 1)
        rows = prefill + everyone
        layers = config.num_hidden_layers
        own = (prefill + decode) * (layers - blocks[owner])
        remote = (
            own if not slots else prefill * (layers - blocks[owner]) + decode * layers * (nodes - 1)
        )
        assert sum(node["scatter"] for node in sent) == 4 * (q + 2 * kv) * remote
        assert sum(node["gather"] for node in sent) == 4 * q * remote
        assert sent[owner]["gather"] == 4 * q * own
        handoffs = (nodes - 1) * 2 * 4 * config.hidden_size // ranks * rows
        assert sum(node["handoff"] for node in sent) == handoffs
        for node, kinds in enumerate(sent):
            # Ids and positions to the first root only, positions on with each handoff; then the
            # rounds of logits in each chunk of the prompt.
            own_rows = prefill * (node == owner) + decode * (slots or node == owner)
            counts = {"own_rows": own_rows, "all_rows": rows}
            counts["prompt_steps"] = kinds["steps"] - decode
            assert kinds["metadata"] == metadata_bytes(node, owner, nodes, **counts)


def row_sizes(config: Any, ranks: int) -> tuple[int, int]:
    """Elements of Q, and of K or V, of one row on one TP rank."""
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return (
        config.num_attention_heads // ranks * head_dim,
        config.num_key_value_heads // ranks * head_dim,
    )


def check_slots(server: Server, expected: list[list[int]], nodes: int) -> None:
    """A busy owner gets more slots than the others; too many rows run eagerly, and count."""
    before = slots_of(server)
    generate_on(server, expected, [0] * 6 + [1] * 2)
    after = slots_of(server)
    assert after["fallbacks"] == before["fallbacks"]
    if nodes == 2:
        assert after["replays"]["7,3"] > before["replays"].get("7,3", 0)
    generate_on(server, expected, [0] * 10)
    assert slots_of(server)["fallbacks"] > before["fallbacks"]
    metrics = server.get("/metrics").read().decode()
    for path in ("replayed", "fallback", "eager"):
        pattern = rf'^sglang:tknp_steps_total{{node="0",path="{path}"}} [1-9]'
        assert re.search(pattern, metrics, re.M), pattern


def generate_on(server: Server, expected: list[list[int]], owners: list[int]) -> None:
    """At once, the i-th prompt on the i-th of these owners."""
    with ThreadPoolExecutor(len(owners)) as pool:
        jobs = [
            pool.submit(generate, server, PROMPTS[i], routed_dp_rank=owner)
            for i, owner in enumerate(owners)
        ]
        assert tokens([job.result() for job in jobs]) == expected[: len(owners)]


def slots_of(server: Server) -> dict[str, Any]:
    states = [state["tknp"] for state in server.get_json("/server_info")["internal_states"]]
    assert all(state["decode_slots"] == states[0]["decode_slots"] for state in states)
    slots: dict[str, Any] = states[0]["decode_slots"]
    return slots


def check_killed_rank_ends_pool(server: Server, rank: int, ranks_per_node: int) -> None:
    """kill -9 of one rank while it serves: all processes gone, the rank named, requests end."""

    def endless() -> str:
        try:
            body = {"input_ids": PROMPTS[0], "sampling_params": greedy(900)}
            return str(server.post("/generate", body))
        except (urllib.error.URLError, OSError) as error:
            return f"failed: {error}"

    with ThreadPoolExecutor(1) as pool:
        request = pool.submit(endless)
        time.sleep(1)
        victim = find_rank(server, rank)
        os.kill(victim, signal.SIGKILL)
        assert gone_after(server, 10), server.tail()
        assert request.result(timeout=20).startswith("failed")
    node, tp_rank = divmod(rank, ranks_per_node)
    line = (
        f"sglang-tknp: rank {rank} (node {node}, TP rank {tp_rank}), process {victim}, was killed"
    )
    assert line in server.log.read_text()


def find_rank(server: Server, rank: int) -> int:
    for pid in server.pids():
        with contextlib.suppress(OSError), open(f"/proc/{pid}/cmdline") as stream:
            title = stream.read().split("\0")[0]
            if title.startswith("sglang::scheduler") and title.strip().endswith(f"TP{rank}"):
                return pid
    raise AssertionError(f"no scheduler of rank {rank} among {server.pids()}")


def gone_after(server: Server, limit: float) -> bool:
    deadline = time.monotonic() + limit
    while time.monotonic() < deadline:
        if not server.pids():
            return True
        time.sleep(0.1)
    return False
