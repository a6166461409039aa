"""The real model in bfloat16 answers through TKNP as through stock SGLang; KV capacity by node.

Uneven blocks and little pretended memory: every node's KV capacity must be what its own weights
leave, to one per cent, and never the smallest of the pool.
"""

import json
from pathlib import Path

import openai
import pytest

from sglang_tknp.launch.models import prepare_smollm2
from tests.serve.server import Server, base_args, serve, tknp_args

pytestmark = pytest.mark.serve

QUESTIONS = [
    "What is the capital of France?",
    "Name three colours.",
    "What is two plus two?",
    "Write one sentence about the sea.",
]
MEMORY_GB, STATIC_SHARE = 0.75, 0.9
BLOCKS = (24, 6)


def answers(server: Server) -> list[str]:
    client = openai.OpenAI(base_url=server.url + "/v1", api_key="none", timeout=120)
    replies = [
        client.chat.completions.create(
            model="default",
            messages=[{"role": "user", "content": question}],
            temperature=0,
            max_tokens=24,
        )
        for question in QUESTIONS
    ]
    return [reply.choices[0].message.content for reply in replies]


def expected_kv_tokens(config: dict[str, int], layers: int) -> float:
    """KV tokens of a node that holds `layers` layers and one copy of the embedding (T = 1)."""
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    width = config["num_attention_heads"] * 64
    kv_width = config["num_key_value_heads"] * 64
    layer = 2 * hidden * (width + kv_width) + 3 * hidden * inner + 2 * hidden
    weights = 2 * (layers * layer + config["vocab_size"] * hidden)
    kv_bytes_per_token = config["num_hidden_layers"] * 2 * kv_width * 2
    return (MEMORY_GB * STATIC_SHARE * 2**30 - weights) / kv_bytes_per_token


@pytest.mark.timeout(400)
def test_smollm2_answers_as_stock(tmp_path: Path) -> None:
    model = prepare_smollm2()
    flags = {"dtype": "bfloat16", "tknp_device_memory_gb": MEMORY_GB}
    with serve(base_args(model, **flags), tmp_path / "stock.log") as server:
        expected = answers(server)
    assert "Paris" in expected[0]
    blocks = ",".join(map(str, BLOCKS))
    with serve(tknp_args(model, 2, tknp_layer_blocks=blocks, **flags), tmp_path / "log") as server:
        assert answers(server) == expected
        states = server.get_json("/server_info")["internal_states"]
        config = json.loads((model / "config.json").read_text())
        for state in (s["tknp"] for s in states):
            node = state["node"]
            wanted = expected_kv_tokens(config, BLOCKS[node])
            assert state["kv_tokens"] == pytest.approx(wanted, rel=0.01), state
            assert f"{node}  " in server.log.read_text()
        assert len({state["tknp"]["kv_tokens"] for state in states}) == 2
