"""Greedy tokens of FP8 checkpoints through TKNP equal stock SGLang's at the same T in float32.

Both serve them with the CPU platform's FP8 products: uneven layers, scales per block over two
ranks of a node, FP8 KV and its capacity. With FP8 KV the requests come one at a time: rounding to
eight bits makes stock's own tokens depend on which requests shared a step.
"""

from pathlib import Path
from typing import Any

import pytest

from tests.serve.client import PROMPTS, generate, generate_all, owners, tokens
from tests.serve.server import Server, base_args, serve, tknp_args
from tests.tiny import FAMILIES, SHAPE
from tests.tiny_fp8 import make_tiny_fp8

pytestmark = pytest.mark.serve

DEVICE_BYTES = 0.25 * 2**30  # of --tknp-device-memory-gb in base_args
SHARE = 0.9  # of the device memory that the CPU platform gives weights and KV


def one_by_one(server: Server, num_owners: int) -> list[Any]:
    routes = [{"routed_dp_rank": i % num_owners} if num_owners > 1 else {} for i in range(16)]
    return [generate(server, prompt, **r) for prompt, r in zip(PROMPTS, routes, strict=True)]


@pytest.mark.timeout(400)
def test_scales_per_block_over_two_ranks(tmp_path: Path) -> None:
    model = make_tiny_fp8("fp8-block", tmp_path / "model", plain_layers=(1,))
    with serve(base_args(model, tp_size=2), tmp_path / "stock.log") as server:
        expected = tokens(generate_all(server, PROMPTS))
    with serve(tknp_args(model, 2, 2), tmp_path / "tknp.log") as server:
        replies = generate_all(server, PROMPTS)
        assert tokens(replies) == expected
        assert owners(replies) == {0, 1}
        check_nodes(server, FAMILIES["qwen3"]["head_dim"], kv_bytes=4)


@pytest.mark.timeout(400)
def test_scales_per_channel_and_fp8_kv(tmp_path: Path) -> None:
    """The checkpoint's kv_cache_scheme asks for FP8 KV, without a flag."""
    model = make_tiny_fp8(
        "compressed-channel", tmp_path / "model", plain_layers=(1,), kv_scales=True
    )
    with serve(base_args(model), tmp_path / "stock.log") as server:
        expected = tokens(one_by_one(server, 1))
    with serve(tknp_args(model, 2), tmp_path / "tknp.log") as server:
        replies = one_by_one(server, 2)
        assert tokens(replies) == expected
        assert owners(replies) == {0, 1}
        check_nodes(server, SHAPE["hidden_size"] // SHAPE["num_attention_heads"], kv_bytes=1)


def check_nodes(server: Server, head_dim: int, kv_bytes: int) -> None:
    """The plain layer 1 weighs as much as four others; each node's KV takes what is left."""
    states = [state["tknp"] for state in server.get_json("/server_info")["internal_states"]]
    assert [state["layer_blocks"] for state in states] == [[2, 3]] * 2
    for state in states:
        heads = SHAPE["num_key_value_heads"] // state["ranks_per_node"]
        per_token = 2 * SHAPE["num_hidden_layers"] * heads * head_dim * kv_bytes
        left = DEVICE_BYTES * SHARE - state["weight_bytes"] / state["ranks_per_node"]
        assert state["kv_tokens"] * per_token == pytest.approx(left, rel=0.01)
