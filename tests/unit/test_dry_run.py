"""Proves the dry run's plan and report from hand-made builds, and what it says of wrong settings.

The builds by SGLang itself are in tests/upstream/test_dry_run.py.
"""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

from sglang_tknp import shapes
from sglang_tknp.launch import dry_run
from sglang_tknp.launch.dry_run_report import Facts, Report, to_json, to_text, why_nothing_fits
from sglang_tknp.placement import ModelBytes, place
from sglang_tknp.pool_plan import Memory, NodeBuild, PoolBuild, PoolPlan, plan_pool

GIB = 1 << 30
MODEL = ModelBytes(embedding=400, layers=(1000,) * 4, final_norm=8, head=400)
FACTS = Facts(
    model="tiny",
    model_class="LlamaForCausalLM",
    sglang="0.5.23",
    num_layers=4,
    hidden_size=64,
    num_heads=8,
    num_kv_heads=2,
    head_dim=8,
    vocab_size=512,
    dtype="bfloat16",
    quantization=None,
    kv_cache_dtype="bfloat16",
    sizes_from="configuration",
    stored_dtypes=(),
    tp_per_node=2,
    batch=5,
    device_memory_gb=1,
    mem_fraction_static=0.5,
)


def node_build(one_copy: int) -> NodeBuild:
    return NodeBuild(
        rank_weights=(one_copy + 40) // 2, rank_buffers=100, one_copy=one_copy, replicated=40,
        uneven=0,
    )  # fmt: skip


BUILD = PoolBuild(
    model_class="LlamaForCausalLM",
    nodes=(node_build(2400), node_build(2408)),
    tp_size=2,
    hidden_size=64,
    element_bytes=2,
    q_size=32,
    kv_size=8,
    head_width=256,
)


def planned(memory: Memory, build: PoolBuild = BUILD) -> PoolPlan:
    return plan_pool(place(MODEL, (2, 2)), MODEL, build, memory, batch=5, kv_element_bytes=2)


PLAN = planned(Memory(device_gb=1, mem_fraction_static=0.5))
REPORT = Report(facts=FACTS, plans=(PLAN,))


def test_kv_tokens_are_what_weights_and_buffers_leave() -> None:
    # K and V of 8 elements, 4 layers, 2 bytes: 128 bytes a token on a rank.
    assert (PLAN.rank_kv_token_bytes, PLAN.kv_token_bytes) == (128, 256)
    first, second = PLAN.nodes
    assert first.kv_tokens == (GIB // 2 - 1220 - 100) // 128
    assert second.kv_tokens == (GIB // 2 - 1224 - 100) // 128
    assert PLAN.kv_tokens == first.kv_tokens + second.kv_tokens
    assert PLAN.fits


def test_a_plan_sums_to_one_copy_and_shows_what_is_beyond_it() -> None:
    assert sum(node.placed_bytes for node in PLAN.nodes) == PLAN.one_copy_bytes == MODEL.one_copy
    assert [node.beyond_placement for node in PLAN.nodes] == [0, 0]
    assert [node.endpoints for node in PLAN.nodes] == [("embedding",), ("final norm", "head")]
    padded = replace(BUILD, nodes=(node_build(2400), node_build(2440)))
    plan = planned(Memory(device_gb=1, mem_fraction_static=0.5), padded)
    assert [node.beyond_placement for node in plan.nodes] == [0, 32]


def test_text_says_what_agrees() -> None:
    assert "hold the placed bytes exactly on every node; the ranks repeat 80 B" in to_text(REPORT)
    padded = replace(BUILD, nodes=(node_build(2400), replace(node_build(2440), uneven=6)))
    plan = planned(Memory(device_gb=1, mem_fraction_static=0.5), padded)
    text = to_text(Report(facts=FACTS, plans=(plan,)))
    assert "the modules hold 32 B more than was placed" in text
    assert "and 6 B of KV heads" in text


def test_text_has_assumptions_first_and_a_line_for_every_node() -> None:
    text = to_text(REPORT)
    assert text.index("assumed") < text.index("2 nodes of 2 ranks")
    assert "1 GiB x 0.5 = 0.50 GiB of a rank for weights and KV" in text
    assert re.search(r"^ +0 +0-1 +2.3 KiB +49.9% +1.2 KiB +4194293  embedding$", text, re.M)
    assert re.search(r"^ +1 +2-3 +2.4 KiB +50.1% +1.2 KiB +4194293  final norm, head$", text, re.M)
    # 3 and 2 rows: the messages are those of the owner with more.
    assert "up to 288 B of QKV to and 192 B of output from the remote owner: 480 B per" in text


def test_columns_are_of_what_is_held_where_loading_changes_the_dtype() -> None:
    """Placed as stored in float32, held in half of it: 2400 of 4808 bytes on the first node."""
    doubled = ModelBytes(embedding=800, layers=(2000,) * 4, final_norm=16, head=800)
    memory = Memory(device_gb=1, mem_fraction_static=0.5)
    plan = plan_pool(place(doubled, (2, 2)), doubled, BUILD, memory, batch=5, kv_element_bytes=2)
    facts = replace(FACTS, sizes_from="checkpoint", stored_dtypes=("float32",))
    text = to_text(Report(facts=facts, plans=(plan,)))
    assert (
        "bfloat16; placed by sizes of the checkpoint's tensors, stored in float32; the tables have "
        "the bytes held, in bfloat16\n" in text
    )
    assert re.search(r"^ +0 +0-1 +2.3 KiB +49.9% +1.2 KiB ", text, re.M)
    assert re.search(r"^ +1 +2-3 +2.4 KiB +50.1% +1.2 KiB ", text, re.M)
    assert "hold 4.7 KiB less than was placed (stored in float32, held in bfloat16);" in text
    same = replace(facts, stored_dtypes=("F8_E4M3", "bfloat16"))
    assert "stored in" not in to_text(Report(facts=same, plans=(plan,)))


def test_a_tied_copy_is_said_below_the_shares() -> None:
    plan = planned(Memory(device_gb=1, mem_fraction_static=0.5), replace(BUILD, tied_copy=400))
    text = to_text(Report(facts=FACTS, plans=(plan,)))
    shares = [float(share) for share in re.findall(r"([\d.]+)%  ", text)]
    assert (plan.held_bytes, shares) == (4408, [54.4, 54.6])
    assert (
        "  tied       the last node's head is a copy of the tied embedding, 400 B: the shares of "
        "one copy sum to 109.1%\n" in text
    )
    assert "tied" not in to_text(REPORT)


def test_json_has_every_number() -> None:
    found = json.loads(to_json(REPORT))
    assert found["facts"]["mem_fraction_static"] == 0.5
    (plan,) = found["plans"]
    assert (plan["num_nodes"], plan["fits"], plan["kv_tokens"]) == (2, True, PLAN.kv_tokens)
    assert [node["layers"] for node in plan["nodes"]] == [[0, 2], [2, 4]]
    assert plan["nodes"][0]["placed_bytes"] == 2400
    assert plan["traffic"]["rows"] == [3, 2]
    assert plan["traffic"]["peer_group"] == PLAN.traffic.peer_group


def test_nothing_fits() -> None:
    full = planned(Memory(device_gb=1300 / GIB, mem_fraction_static=0.5))
    assert [node.kv_tokens for node in full.nodes] == [0, 0]
    report = Report(facts=FACTS, plans=(full,))
    assert not report.fits
    assert "2 nodes of 2 ranks: DOES NOT FIT" in to_text(report)
    assert why_nothing_fits(report) == (
        "nothing fits: with --nodes 2 --tp-per-node 2 a rank of node 1 holds 1.3 KiB of weights "
        "and rotary tables, and 1 GiB x 0.5 = 0.50 GiB is for them and KV; use more nodes or "
        "ranks, or raise --device-memory-gb or --mem-fraction-static"
    )
    assert Report(facts=FACTS, plans=(full, PLAN)).fits


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--nodes 4 1", "--nodes=1 is no pool: TKNP needs 2 nodes or more"),
        ("--tp-per-node 0", "--tp-per-node=0 must be 1 or more ranks"),
        ("--batch 0", "--batch=0 must be 1 or more rows"),
        ("--device-memory-gb nan", "--device-memory-gb=nan must be a positive number of GiB, of "),
        ("--mem-fraction-static 1", "--mem-fraction-static=1 must lie between 0 and 1, for "),
        (
            "--tknp-layer-blocks 63,63",
            '--tknp-layer-blocks="63,63" needs one value of --nodes, and there are 3; use for '
            "example --nodes 2",
        ),
    ],
)
def test_a_wrong_flag_is_named_with_its_fix(
    flags: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert dry_run.main(["--model-path", "llama-3.1-405b", *flags.split()]) == 1
    assert capsys.readouterr().err.startswith(f"sglang-tknp: {message}")


def test_an_unknown_model_is_named_with_what_exists(capsys: pytest.CaptureFixture[str]) -> None:
    assert dry_run.main(["--model-path", "no/such"]) == 1
    assert capsys.readouterr().err == (
        "sglang-tknp: --model-path=no/such is neither a built-in shape nor a checkpoint on this "
        f"machine (no/such is not there); use {', '.join(shapes.SHAPES)}, or a folder with a "
        "config.json\n"
    )


@pytest.mark.parametrize(
    ("text", "message"), [("{", "is not JSON"), ("[]", "names no architectures"), ("{}", "names")]
)
def test_a_broken_configuration_is_named(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ValueError, match=rf"^--model-path={tmp_path}: .*config.json {message}"):
        dry_run.find_model(str(tmp_path))


def test_a_folder_and_its_config_are_the_same_model(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["A"]}))
    found = dry_run.find_model(str(tmp_path))
    assert found == dry_run.find_model(str(tmp_path / "config.json"))
    assert (found.name, found.folder) == (tmp_path.name, tmp_path)


def test_a_quantised_model_is_not_quantised_again() -> None:
    model = dry_run.find_model("llama-3.1-405b-fp8")
    assert dry_run.quantize(model, None) == model
    with pytest.raises(ValueError, match=r"is quantised already \(fp8\); leave the flag out$"):
        dry_run.quantize(model, "fp8")
    plain = dry_run.quantize(dry_run.find_model("llama-3.1-405b"), "fp8")
    assert plain.config["quantization_config"]["quant_method"] == "fp8"


def test_a_quantised_models_folder_is_not_read(tmp_path: Path) -> None:
    """Its tensors are not those of the FP8 checkpoint that is planned."""
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["A"]}))
    model = dry_run.find_model(str(tmp_path))
    quantised = dry_run.quantize(model, "fp8")
    assert (model.folder, quantised.folder) == (tmp_path, None)
    assert quantised.name == model.name
