"""Proves the dry run on SGLang's own modules: bytes, KV room, messages, and what it refuses.

One process runs every case in turn, each through the command line's `main`.
"""

import json
import os
import re
from typing import Any

import pytest

from sglang_tknp.placement import human
from tests.tiny import make_tiny
from tests.upstream.process import MARK, TINY, result_of, run_python

pytestmark = [pytest.mark.upstream, pytest.mark.filterwarnings("ignore")]

GIB = 1 << 30
KIB = 1 << 10
NODES = [2, 4, 8]
SMALL = ["--tp-per-node", "4", "--nodes", "2", "--device-memory-gb", "1", "--batch", "7"]
CHECKPOINTS: dict[str, dict[str, Any]] = {
    # A vocabulary that SGLang pads from 500 to 512 rows, and 2 KV heads for 4 ranks.
    "tied": {"vocab_size": 500, "tie_word_embeddings": True},
    "llama": {},
    "qwen3": {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "head_dim": 16,
        "tie_word_embeddings": False,
    },
    "moe": {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 64,
        "head_dim": 8,
    },
}
# Name of a case: what follows --model-path; a name of CHECKPOINTS is its folder.
CASES: dict[str, list[str]] = {
    "llama-405b": ["llama-3.1-405b", "--json"],
    "llama-405b text": ["llama-3.1-405b", "--nodes", "4"],
    "llama-405b fp8": ["llama-3.1-405b", "--quantization", "fp8", "--json"],
    "llama-405b paper": ["llama-3.1-405b-fp8", "--json"],
    "nemotron-340b": ["nemotron-4-340b", "--json"],
    "nemotron-340b fp8": ["nemotron-4-340b", "--quantization", "fp8", "--nodes", "4", "--json"],
    "llama-405b, no room": ["llama-3.1-405b", "--nodes", "2", "--device-memory-gb", "40", "--json"],
    "llama-405b, some room": ["llama-3.1-405b", "--device-memory-gb", "40", "--json"],
    "tied": ["tied", *SMALL, "--json"],
    "qwen3": ["qwen3", *SMALL, "--dtype", "float32", "--kv-cache-dtype", "bf16", "--json"],
    "stored, as fp8": ["stored", *SMALL, "--tp-per-node", "2", "--quantization", "fp8", "--json"],
    "stored, as fp8, text": ["stored", *SMALL, "--tp-per-node", "2", "--quantization", "fp8"],
    "stored, in half": ["stored", *SMALL, "--tp-per-node", "2", "--dtype", "bfloat16"],
    "stored, tied": ["stored tied", *SMALL, "--tp-per-node", "2", "--dtype", "bfloat16"],
    "stored": ["stored", *SMALL, "--tp-per-node", "2", "--dtype", "float32", "--json"],
    "blocks": ["qwen3", *SMALL, "--tknp-layer-blocks", "3,1", "--json"],
    "bad blocks": ["qwen3", *SMALL, "--tknp-layer-blocks", "3,2"],
    "moe": ["moe", *SMALL],
    "heads": ["llama", "--nodes", "2", "--tp-per-node", "3"],
    "too many nodes": ["llama", "--nodes", "5", "--tp-per-node", "2"],
}

SCRIPT = f"""
import contextlib, io, json, os, resource, sys
from sglang_tknp.launch import dry_run

def run(argv):
    before, out, err = dict(os.environ), io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = dry_run.main(["--model-path", *argv])
    changed = sorted(k for k in {{*before, *os.environ}} if before.get(k) != os.environ.get(k))
    return {{"code": code, "out": out.getvalue(), "err": err.getvalue(), "env": changed}}

found = {{name: run(argv) for name, argv in json.loads(sys.argv[1]).items()}}
found["peak_kib"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
print("{MARK}" + json.dumps(found), flush=True)
"""


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("models")
    for name, changes in CHECKPOINTS.items():
        (folder / name).mkdir()
        (folder / name / "config.json").write_text(json.dumps({**TINY, **changes}))
    make_tiny("llama-untied", folder / "stored")
    make_tiny("llama", folder / "stored tied")
    paths = {name: str(folder / name) for name in (*CHECKPOINTS, "stored", "stored tied")}
    cases = {name: [paths.get(argv[0], argv[0]), *argv[1:]] for name, argv in CASES.items()}
    return dict(result_of(run_python(SCRIPT, json.dumps(cases))))


@pytest.fixture(scope="module")
def plans(ran: dict[str, Any]) -> Any:
    """The plans of a case that must succeed, by their number of nodes."""

    def read(name: str) -> dict[int, dict[str, Any]]:
        assert ran[name]["code"] == 0, ran[name]
        return {plan["num_nodes"]: plan for plan in json.loads(ran[name]["out"])["plans"]}

    return read


LLAMA_LAYER = 2 * (16384 * 128 * 272 + 3 * 16384 * 53248 + 2 * 16384)
LLAMA_VOCABULARY = 2 * 128256 * 16384
LLAMA_NORM = 2 * 16384
LLAMA_BYTES = 2 * 405_853_388_800
# Two projections in the MLP, and a bias beside every norm's weight.
NEMOTRON_NORM = 2 * 2 * 18432
NEMOTRON_LAYER = 2 * (18432 * 192 * 208 + 2 * 18432 * 73728) + 2 * NEMOTRON_NORM
NEMOTRON_BYTES = 96 * NEMOTRON_LAYER + NEMOTRON_NORM + 2 * (2 * 256000 * 18432)
MODELS = [
    ("llama-405b", LLAMA_BYTES, LLAMA_LAYER, LLAMA_NORM),
    ("nemotron-340b", NEMOTRON_BYTES, NEMOTRON_LAYER, NEMOTRON_NORM),
]


@pytest.mark.parametrize(("name", "one_copy", "layer", "norm"), MODELS)
def test_a_pool_holds_one_copy_and_its_modules_agree_exactly(
    plans: Any, name: str, one_copy: int, layer: int, norm: int
) -> None:
    found = plans(name)
    assert sorted(found) == NODES
    for num_nodes, plan in found.items():
        placed = [node["placed_bytes"] for node in plan["nodes"]]
        assert sum(placed) == plan["one_copy_bytes"] == one_copy
        assert [node["one_copy_bytes"] for node in plan["nodes"]] == placed
        assert max(placed) - one_copy / num_nodes <= layer
        assert plan["nodes"][0]["endpoints"] == ["embedding"]
        assert plan["nodes"][-1]["endpoints"] == ["final norm", "head"]


@pytest.mark.parametrize(("name", "one_copy", "layer", "norm"), MODELS)
def test_eight_ranks_repeat_the_norms_and_nothing_else(
    plans: Any, name: str, one_copy: int, layer: int, norm: int
) -> None:
    for plan in plans(name).values():
        for node in plan["nodes"]:
            norms = 2 * (node["layers"][1] - node["layers"][0])
            norms += 1 if "final norm" in node["endpoints"] else 0
            assert node["replicated_bytes"] == 7 * norms * norm
            assert node["uneven_bytes"] == 0
            assert node["weight_bytes"] == node["placed_bytes"] + node["replicated_bytes"]
            assert node["weight_bytes"] == 8 * node["rank_weight_bytes"]


def test_kv_tokens_are_memory_less_weights_over_a_tokens_bytes(plans: Any) -> None:
    plan = plans("llama-405b")[4]
    assert plan["rank_kv_token_bytes"] == 126 * 2 * 128 * 2
    assert plan["kv_token_bytes"] == 504 * KIB  # 126 layers of 8 KV heads of 128, K and V
    layers = 31
    weights = (layers * LLAMA_LAYER + LLAMA_VOCABULARY) // 8 + 2 * layers * LLAMA_NORM * 7 // 8
    rotary = 131072 * 128 * 4  # one float32 table for all layers
    first = plan["nodes"][0]
    assert first["layers"] == [0, layers]
    assert first["rank_weight_bytes"] == weights
    assert first["buffer_bytes"] == 8 * rotary
    assert first["kv_tokens"] == (70 * GIB - weights - rotary) // (126 * 2 * 128 * 2)
    assert plan["kv_tokens"] == sum(node["kv_tokens"] for node in plan["nodes"])


def test_nemotrons_kv_and_messages(plans: Any) -> None:
    """Heads of 192 elements, 12 query heads and one KV head on a rank; 32 rows on each owner."""
    plan = plans("nemotron-340b")[4]
    assert plan["rank_kv_token_bytes"] == 96 * 2 * 192 * 2
    assert plan["traffic"]["qkv"] == [32 * (12 + 2) * 192 * 2] * 4
    assert plan["traffic"]["output"] == [32 * 12 * 192 * 2] * 4
    assert plan["traffic"]["layer"] == [3 * 32 * (2 * 12 + 2) * 192 * 2] * 4
    assert plan["traffic"]["logits"] == [32 * 32000 * 2] * 3 + [0]


def test_messages_are_the_papers(plans: Any) -> None:
    """Section 4.4: batch 128 on four nodes of eight ranks, bfloat16."""
    traffic = plans("llama-405b")[4]["traffic"]
    assert traffic["qkv"] == [144 * KIB] * 4
    assert traffic["output"] == [128 * KIB] * 4
    assert traffic["layer"] == [816 * KIB] * 4
    assert traffic["exchange"] == 126 * 816 * KIB
    assert traffic["handoff"] == 1024 * KIB
    assert traffic["logits"] == [32 * 16032 * 2] * 3 + [0]


def test_fp8_halves_the_projections(plans: Any) -> None:
    for plan in plans("llama-405b fp8").values():
        for node in plan["nodes"]:
            layers = node["layers"][1] - node["layers"][0]
            # SGLang makes two KV scales for each layer, which such a checkpoint does not store.
            assert node["one_copy_bytes"] - node["placed_bytes"] == layers * 2 * 4
    nemotron = plans("nemotron-340b fp8")[4]["one_copy_bytes"]
    assert nemotron == NEMOTRON_BYTES - 96 * ((NEMOTRON_LAYER - 2 * NEMOTRON_NORM) // 2 - 6 * 4)
    one_copy = plans("llama-405b fp8")[2]["one_copy_bytes"]
    assert one_copy == LLAMA_BYTES - 126 * ((LLAMA_LAYER - 2 * LLAMA_NORM) // 2 - 7 * 4)


def test_the_papers_fp8_model(plans: Any) -> None:
    """Section 3.2: 454 GiB, and 2,016 GiB of KV for 128 requests of 32K tokens."""
    for num_nodes, plan in plans("llama-405b paper").items():
        assert round(plan["one_copy_bytes"] / GIB) == 454
        assert 128 * 32768 * plan["kv_token_bytes"] == 2016 * GIB
        held = sum(node["one_copy_bytes"] for node in plan["nodes"])
        assert held == plan["one_copy_bytes"] + 126 * 2 * 4
        kv = plan["kv_tokens"] * plan["kv_token_bytes"] / GIB
        # All 560 GiB of each node but one copy, and half a GiB of rotary tables on each.
        assert kv == pytest.approx(560 * num_nodes - 453.7 - 0.5 * num_nodes, abs=0.5)


def test_text_shows_the_plan(ran: dict[str, Any]) -> None:
    text = ran["llama-405b text"]["out"]
    assert text.startswith("llama-3.1-405b: 126 layers, hidden 16384, 128 heads and 8 KV heads of ")
    assert "LlamaForCausalLM built from SGLang 0.5.23's modules on the meta device" in text
    assert "80 GiB x 0.875 = 70.00 GiB of a rank" in text
    assert (
        "144.0 KiB of QKV to and 128.0 KiB of output from each of 3 remote owners: 816.0 KiB"
        in (text)
    )
    assert "the modules hold the placed bytes exactly on every node" in text


def test_no_room_is_an_error_with_the_numbers(ran: dict[str, Any]) -> None:
    case = ran["llama-405b, no room"]
    assert case["code"] == 1
    (plan,) = json.loads(case["out"])["plans"]
    assert (plan["fits"], plan["kv_tokens"]) == (False, 0)
    assert case["err"].splitlines()[-1] == (
        "sglang-tknp: nothing fits: with --nodes 2 --tp-per-node 8 a rank of node 1 holds 47.31 "
        "GiB of weights and rotary tables, and 40 GiB x 0.875 = 35.00 GiB is for them and KV; use "
        "more nodes or ranks, or raise --device-memory-gb or --mem-fraction-static"
    )


def test_one_pool_that_fits_is_enough(plans: Any) -> None:
    found = plans("llama-405b, some room")
    assert {n: plan["fits"] for n, plan in found.items()} == {2: False, 4: True, 8: True}


def test_a_tied_head_padding_and_repeated_kv_heads(plans: Any) -> None:
    plan = plans("tied")[2]
    first, last = plan["nodes"]
    row, norm = 64 * 2, 64 * 2
    # Both ends hold the embedding: 500 rows as placed, 512 as SGLang pads them.
    assert first["placed_bytes"] + last["placed_bytes"] == plan["one_copy_bytes"] + 500 * row
    for node in (first, last):
        assert node["one_copy_bytes"] - node["placed_bytes"] == 12 * row
        # Four ranks share two KV heads: K and V of both layers are there twice.
        assert node["uneven_bytes"] == 2 * (2 * 2 * 8 * 64 * 2)
    assert first["replicated_bytes"] == 3 * 4 * norm
    assert last["replicated_bytes"] == 3 * 5 * norm
    assert plan["rank_kv_token_bytes"] == 4 * 2 * 8 * 2
    assert plan["traffic"]["rows"] == [4, 3]
    assert plan["traffic"]["logits"] == [4 * 128 * 2, 0]


def test_dtypes_of_weights_and_kv(plans: Any) -> None:
    plan = plans("qwen3")[2]
    # A head_dim of 16, two norms of 16 on queries and keys, 4 bytes each.
    layer = 4 * (64 * 16 * (2 * 8 + 2 * 2) + 3 * 64 * 128 + 2 * 64 + 2 * 16)
    assert [node["placed_bytes"] for node in plan["nodes"]] == [
        2 * layer + 4 * 512 * 64,
        2 * layer + 4 * 512 * 64 + 4 * 64,
    ]
    for node in plan["nodes"]:
        assert node["one_copy_bytes"] == node["placed_bytes"]
    assert plan["rank_kv_token_bytes"] == 4 * 2 * 16 * 2
    assert plan["traffic"]["qkv"][0] == 4 * (2 + 1 + 1) * 16 * 4


def test_a_checkpoints_own_tensors_are_what_its_modules_hold(plans: Any, ran: Any) -> None:
    plan = plans("stored")[2]
    layer = 4 * (64 * 8 * (2 * 8 + 2 * 2) + 3 * 64 * 128 + 2 * 64)
    assert [node["placed_bytes"] for node in plan["nodes"]] == [
        3 * layer + 4 * 512 * 64,
        2 * layer + 4 * 512 * 64 + 4 * 64,
    ]
    assert [node["one_copy_bytes"] - node["placed_bytes"] for node in plan["nodes"]] == [0, 0]
    assert json.loads(ran["stored"]["out"])["facts"]["sizes_from"] == "checkpoint"


def test_quantization_plans_an_fp8_checkpoint_and_not_the_stored_one(
    plans: Any, ran: dict[str, Any]
) -> None:
    """A float32 checkpoint planned as FP8 beside float16, which SGLang makes of float32."""
    plan = plans("stored, as fp8")[2]
    weights = 64 * 8 * (2 * 8 + 2 * 2) + 3 * 64 * 128
    layer = weights + 7 * 4 + 2 * (2 * 64)  # seven scales, two norms
    assert [node["placed_bytes"] for node in plan["nodes"]] == [
        3 * layer + 2 * 512 * 64,
        2 * layer + 2 * 512 * 64 + 2 * 64,
    ]
    # Only the two KV scales that SGLang makes for each layer are beyond the placed bytes.
    beyond = [node["one_copy_bytes"] - node["placed_bytes"] for node in plan["nodes"]]
    assert beyond == [3 * 2 * 4, 2 * 2 * 4]
    assert json.loads(ran["stored, as fp8"]["out"])["facts"]["sizes_from"] == "configuration"
    assert sum(shares_of(ran["stored, as fp8, text"]["out"])) == pytest.approx(100, abs=0.1)


def test_a_dtype_other_than_the_stored_one_is_said_and_all_columns_are_in_it(
    ran: dict[str, Any],
) -> None:
    text = ran["stored, in half"]["out"]
    assert "stored in float32; the tables have the bytes held, in bfloat16\n" in text
    assert "(stored in float32, held in bfloat16)" in text
    assert sum(shares_of(text)) == pytest.approx(100, abs=0.1)
    # Half of what the test above finds stored; two ranks repeat the norms.
    norm = 2 * 64
    layer = 2 * (64 * 8 * (2 * 8 + 2 * 2) + 3 * 64 * 128) + 2 * norm
    first = 3 * layer + 2 * 512 * 64
    row = f" {human(first)}  {first / (5 * layer + 4 * 512 * 64 + norm):.1%}  "
    assert row + f"{human((first + 6 * norm) / 2)}  " in text


def test_a_tied_copy_is_said_below_the_shares(ran: dict[str, Any]) -> None:
    text = ran["stored, tied"]["out"]
    said = re.search(r"copy of the tied embedding, 64.0 KiB: .* sum to ([\d.]+)%\n", text)
    assert said and float(said[1]) > 105
    assert sum(shares_of(text)) == pytest.approx(float(said[1]), abs=0.15)


def shares_of(text: str) -> list[float]:
    """The column of the nodes' shares, in percent."""
    return [float(share) for share in re.findall(r"^ +\d+ .* ([\d.]+)%  ", text, re.M)]


def test_layer_blocks_are_the_users(plans: Any) -> None:
    assert [node["layers"] for node in plans("blocks")[2]["nodes"]] == [[0, 3], [3, 4]]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("bad blocks", '--tknp-layer-blocks="3,2" sums to 5, and the model has 4 layers; for 4 '),
        ("moe", "--enable-tknp does not serve Qwen3MoeForCausalLM: it is a mixture of experts, "),
        ("heads", "the model's 8 attention heads do not divide over the 3 ranks of a node "),
        ("too many nodes", "--attn-dp-size=5 is more than the model's 4 layers, and every node "),
    ],
)
def test_what_tknp_refuses_is_one_line(ran: dict[str, Any], name: str, message: str) -> None:
    case = ran[name]
    assert (case["code"], case["out"]) == (1, "")
    assert case["err"].splitlines()[-1].startswith(f"sglang-tknp: {message}")


def test_a_run_leaves_the_environment_and_takes_no_memory(ran: dict[str, Any]) -> None:
    assert [name for name in CASES if ran[name]["env"]] == []
    # SGLang's imports take more than one GiB; the model would take 756.
    assert ran["peak_kib"] < 3 * 1024 * 1024
    assert not os.environ.get("SGLANG_PP_LAYER_PARTITION")
