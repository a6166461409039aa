"""Greedy tokens of FP8 checkpoints through TKNP equal stock SGLang's at the same T in float32.

Both serve them with the CPU platform's FP8 products. Uneven layers, FP8 KV and its capacity, and
scales per block over two ranks of a node.
"""

from pathlib import Path
from typing import Any

import pytest

from tests.serve.client import PROMPTS, generate_all, owners, tokens
from tests.serve.server import Server, base_args, serve, tknp_args
from tests.tiny import SHAPE
from tests.tiny_fp8 import make_tiny_fp8

pytestmark = pytest.mark.serve

DEVICE_BYTES = 0.25 * 2**30  # of --tknp-device-memory-gb in base_args
SHARE = 0.9  # of the device memory that the CPU platform gives weights and KV


def ask(args: list[str], log: Path) -> Any:
    with serve(args, log) as server:
        return tokens(generate_all(server, PROMPTS))


@pytest.mark.timeout(400)
@pytest.mark.parametrize(("name", "ranks"), [("compressed-channel", 1), ("fp8-block", 2)])
def test_tokens_equal_stock(name: str, ranks: int, tmp_path: Path) -> None:
    fp8_kv = name == "compressed-channel"
    model = make_tiny_fp8(name, tmp_path / name, plain_layers=(1,), kv_scales=fp8_kv)
    expected = ask(base_args(model, tp_size=ranks), tmp_path / "stock.log")
    assert len({tuple(answer) for answer in expected}) > len(PROMPTS) / 2
    with serve(tknp_args(model, 2, ranks), tmp_path / "tknp.log") as server:
        replies = generate_all(server, PROMPTS)
        assert tokens(replies) == expected
        assert owners(replies) == {0, 1}
        check_nodes(server, kv_bytes=1 if fp8_kv else 4)


def check_nodes(server: Server, kv_bytes: int) -> None:
    """The plain layer 1 weighs as much as three others; each node's KV takes what is left."""
    states = [state["tknp"] for state in server.get_json("/server_info")["internal_states"]]
    assert [state["layer_blocks"] for state in states] == [[2, 3]] * 2
    log = server.log.read_text()
    assert ("dtype: torch.float8_e4m3fn" in log) == (kv_bytes == 1)
    head_dim = 8 if kv_bytes == 1 else 16
    for state in states:
        heads = SHAPE["num_key_value_heads"] // state["ranks_per_node"]
        per_token = 2 * SHAPE["num_hidden_layers"] * heads * head_dim * kv_bytes
        left = DEVICE_BYTES * SHARE - state["weight_bytes"] / state["ranks_per_node"]
        assert state["kv_tokens"] * per_token == pytest.approx(left, rel=0.01)
