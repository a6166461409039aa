"""Proves what layouts hold and how long their steps take, by hand and by the lecture."""

import random
from dataclasses import replace
from functools import lru_cache
from typing import Any

import pytest

from sglang_tknp.launch.planner import hardware, lecture
from sglang_tknp.launch.planner.compare import LAYOUTS, build
from sglang_tknp.launch.planner.layout_stock import Dcp, Pp
from sglang_tknp.launch.planner.layout_tknp import Tknp, TknpDualRoot
from sglang_tknp.launch.planner.layouts import Layout, Setting
from sglang_tknp.launch.planner.paper_pools import Pools
from sglang_tknp.layout import OwnershipLayout, exchange_bytes

GIB = 1 << 30
KIB = 1 << 10
LLAMA, NEMOTRON = "llama-3.1-405b-fp8", "nemotron-4-340b-fp8"
NAMES = (*LAYOUTS, "pp2", "dp-tp4")


@lru_cache
def setting(nodes: int = 4, model: str = LLAMA, **changes: Any) -> Setting:
    return replace(Pools(hardware.load("h100-sxm")).setting(model, nodes), **changes)


def layout(name: str, nodes: int = 4, model: str = LLAMA, **changes: Any) -> Any:
    return build(name, setting(nodes, model, **changes))


# --- memory ---


def test_memory_is_in_gib_and_bandwidth_in_gb() -> None:
    found = hardware.load("h100-sxm")
    assert found.usable_memory == 70 * 2**30 < 80e9
    assert found.memory_bandwidth == 3350 * 10**9
    assert setting().node_memory == 8 * 70 * 2**30
    dp = layout("dp")
    assert dp.weights == (setting().model.weight_bytes,) * 4
    assert dp.capacity == ((560 * GIB - dp.weights[0]) // (504 * KIB),) * 4


def test_a_dp_replica_reserves_input_and_output() -> None:
    """6, 3 and 2 residents: at 32K current usage alone would let a seventh in."""
    (tokens, *_) = layout("dp").capacity
    assert [tokens // (context + 1024) for context in (32_768, 65_536, 98_304)] == [6, 3, 2]


def test_kv_heads_repeat_beyond_their_number() -> None:
    model = setting().model
    for ranks in (1, 2, 4, 8, 16, 32, 64):
        logical = lecture.kv_token_bytes(126, 8, 128, 2)
        copies = lecture.kv_replication(8, ranks)
        assert model.kv_heads_per_rank(ranks) == max(1, 8 // ranks)
        assert model.kv_token_bytes(ranks) * ranks == logical * copies
    dp, tp = layout("dp", 1), layout("tp")
    room = 4 * 560 * GIB - 4 * tp.weights[0]
    assert tp.capacity == (room // (4 * 504 * KIB),)
    assert dp.costs.attention_token(8) == tp.costs.attention_token(32), "no gain beyond Hkv"


def test_dcp_shares_what_tp_repeats() -> None:
    for nodes in (2, 4, 8):
        dcp, tp = layout("dcp", nodes), layout("tp", nodes)
        degrees = lecture.dcp_degrees(8, 8 * nodes)
        assert dcp.kv_shards == degrees[-1] == nodes
        token = lecture.dcp_kv_bytes(504 * KIB, 8, 8 * nodes, dcp.kv_shards)
        room = (560 * GIB - dcp.weights[0]) // 8  # of a rank
        assert dcp.capacity[0] == pytest.approx(room / token, abs=nodes)
        assert dcp.capacity[0] == nodes * tp.capacity[0]
        (line,), (repeated,) = dcp.lines((1,), [1e6]), tp.lines((1,), [1e6])
        read = repeated[0] - 126 * tp.costs.attention_rows(1)
        assert line[0] == pytest.approx(lecture.dcp_step(repeated[0] - read, read, nodes, 0))
    assert Dcp.why_not(setting(1)) == "8 ranks repeat none of 8 KV heads"


def test_a_dcp_group_across_nodes_costs_messages() -> None:
    node, cross = layout("dcp"), layout("dcp", dcp_span="cross")
    query = 128 * (128 / 32) * 128 * 2  # of each of 32 ranks, at a batch of 128
    # It attends the heads of its group of four: 512 KiB of outputs, 8 KiB of log-sum-exps.
    assert cross.merge_bytes(128) == (query, 512 * 1024, 8 * 1024)
    sent = 3 * (query + 8 * 1024 + query)
    hw = setting().hardware
    assert cross.merge_seconds(128) == pytest.approx(
        3 * hw.exchange_latency + sent / hw.message_bandwidth
    )
    assert node.merge_seconds(128) < cross.merge_seconds(128)


def test_nemotron_has_no_gate_and_heads_of_192() -> None:
    model = setting(4, "nemotron-4-340b").model
    assert not model.gated and model.head_dim == 192
    up, down = model.layers[5].mlp
    assert (up.rows, up.columns, down.rows) == (73_728, 18_432, 18_432)
    assert up.weight_bytes + down.weight_bytes == 2 * (2 * 18_432 * 73_728), "2 d f of BF16"
    assert model.kv_token_bytes(8) * 8 == 2 * 96 * 8 * 192 * 2
    gated = setting(4, "llama-3.1-405b").model
    up, down = gated.layers[5].mlp
    assert gated.gated and up.rows == 2 * down.columns == 2 * 53_248


def test_blocks_balance_bytes_not_layers() -> None:
    model = setting().model
    wide, narrow = model.layers[0], model.layers[1]
    mlp = [sum(p.weight_bytes for p in layer.mlp) for layer in (wide, narrow)]
    assert mlp[0] / mlp[1] == pytest.approx(2.0, rel=1e-3)
    sizes = model.sizes
    assert sizes.layers[0] == sizes.layers[-1]
    assert sizes.layers[0] / sizes.layers[1] == pytest.approx(1.7, abs=0.05)
    for nodes in (2, 4, 8):
        tknp = layout("tknp", nodes)
        assert sum(tknp.weights) == sizes.one_copy, "embeddings too"
        assert max(tknp.weights) - min(tknp.weights) <= sizes.layers[0]
        blocks = tknp.placement.blocks
        assert blocks[0] < blocks[1] or nodes == 2, "the first node has the embedding too"
        assert blocks[-1] < blocks[-2] or nodes == 2


@pytest.mark.parametrize("nodes", [2, 4, 8])
def test_two_roots_hold_block_b_twice(nodes: int) -> None:
    one, two = layout("tknp", nodes), layout("tknp-dual", nodes)
    half = nodes // 2
    assert two.weights == tuple(
        one.weights[n] + one.weights[(n + half) % nodes] for n in range(nodes)
    )
    assert sum(two.weights) == 2 * sum(one.weights)
    token = 504 * KIB
    assert two.capacity == tuple((560 * GIB - held) // token for held in two.weights)


def test_two_roots_need_an_even_number_of_nodes() -> None:
    for nodes in (3, 5, 7):
        assert "even number of nodes" in (TknpDualRoot.why_not(setting(nodes)) or "")
        assert Tknp.why_not(setting(nodes)) is None
    with pytest.raises(ValueError, match="two roots need an even number of nodes, not 3"):
        layout("tknp-dual", 3)
    assert Tknp.why_not(setting(1)) == "TKNP needs 2 nodes or more"


def test_attention_dp_holds_attention_everywhere() -> None:
    model, found = setting().model, layout("attention-dp")
    attention = sum(p.weight_bytes for layer in model.layers for p in layer.attention)
    mlp = sum(p.weight_bytes for layer in model.layers for p in layer.mlp)
    split = mlp + model.sizes.head  # SGLang's head is over all ranks, its embedding is not
    assert found.weights == (model.weight_bytes - split + split // 4,) * 4
    assert found.weights[0] > attention
    assert min(found.weights) > max(layout("tknp").weights), "so TKNP has more room"


@pytest.mark.parametrize("name", NAMES)
def test_measured_room_beats_the_estimate(name: str) -> None:
    estimate = layout(name, model="llama-3.1-70b").capacity
    assert min(estimate) > 12_345
    pool = replace(setting(4, "llama-3.1-70b"), measured={name: 12_345, "other": 1})
    assert build(name, pool).capacity == (12_345,) * len(estimate)


def test_more_memory_where_layers_are_sharded() -> None:
    more = setting().hardware.with_values("test", sharded_extra=22.0)
    for name in LAYOUTS:
        grown = build(name, replace(setting(), hardware=more)).kv_tokens - layout(name).kv_tokens
        assert (grown > 0) == (name != "dp"), name


# --- step times ---


def some_rows(rng: random.Random, owners: int) -> tuple[tuple[int, ...], list[float]]:
    """Also owners without rows, and one row in all."""
    most = rng.choice([1, 3, 64])
    rows = [rng.choice([0, rng.randint(0, most)]) for _ in range(owners)]
    rows[rng.randrange(owners)] += 1
    return tuple(rows), [n * rng.randint(1, 100_000) for n in rows]


@pytest.mark.parametrize("changes", [{}, {"pp_overlap": 0.3, "dcp_span": "cross"}], ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_terms_sum_to_the_step_and_lines_are_its_growth(name: str, changes: Any) -> None:
    found: Layout = layout(name, model="llama-3.1-70b", **changes)
    rng = random.Random(name)
    for _ in range(60):
        rows, tokens = some_rows(rng, len(found.groups[0]))
        step, terms = found.step_seconds(rows, tokens), found.terms(rows, tokens)
        assert sum(terms.values()) == pytest.approx(step, rel=1e-12)
        assert min(terms.values()) >= 0
        # A step later every request has one token more, in every line.
        later = [k + b for k, b in zip(tokens, rows, strict=True)]
        grown = [start + growth for start, growth in found.lines(rows, tokens)]
        assert [line[0] for line in found.lines(rows, later)] == pytest.approx(grown, rel=1e-12)
        assert all(start >= growth >= 0 for start, growth in found.lines(rows, tokens))


def test_exchange_bytes_are_the_products() -> None:
    rng = random.Random(1)
    for nodes in (2, 4, 8):
        tknp = layout("tknp", nodes)
        hw = setting().hardware
        for _ in range(20):
            rows, _ = some_rows(rng, nodes)
            sizes = [
                exchange_bytes(
                    OwnershipLayout(rows), root, q_size=2048, kv_size=128, element_bytes=2
                )
                for root in range(nodes)
            ]
            blocks = tknp.placement.blocks
            total = sum(n * size for n, size in zip(blocks, sizes, strict=True))
            assert tknp.traffic(rows).exchange == total
            layers = sum(n for n, size in zip(blocks, sizes, strict=True) if size)
            expected = 2 * layers * hw.exchange_latency + total / hw.message_bandwidth
            assert tknp.exchange_seconds(rows) == pytest.approx(expected)
    assert layout("tknp").traffic((32,) * 4).exchange == 126 * 816 * KIB


@pytest.mark.parametrize("root", range(4))
def test_a_root_that_owns_all_rows_exchanges_nothing(root: int) -> None:
    tknp, hw = layout("tknp"), setting().hardware
    rows = tuple(8 * (owner == root) for owner in range(4))
    others = 126 - tknp.placement.blocks[root]
    size = 8 * (2 * 2048 + 2 * 128) * 2
    expected = others * (2 * hw.exchange_latency + size / hw.message_bandwidth)
    assert tknp.exchange_seconds(rows) == pytest.approx(expected)


def test_the_slowest_owner_decides() -> None:
    tknp = layout("tknp")
    rows = (4, 4, 4, 4)
    even, uneven = [1e5] * 4, [1e5, 3e5, 1e5, 1e5]
    longer = 126 * tknp.costs.attention_token(8) * 2e5
    assert tknp.step_seconds(rows, uneven) - tknp.step_seconds(rows, even) == pytest.approx(longer)


def test_two_roots_hide_no_attention_behind_attention() -> None:
    rng, two = random.Random(2), layout("tknp-dual")
    for _ in range(50):
        rows, tokens = some_rows(rng, 4)
        halves = two.microbatches(rows)
        assert tuple(map(sum, zip(*halves, strict=True))) == rows
        assert all(abs(a - b) <= 1 for a, b in zip(*halves, strict=True))
        token = two.costs.attention_token(8)
        busy = max(
            126 * (two.costs.attention_rows(a) + two.costs.attention_rows(b) + token * k)
            for a, b, k in zip(*halves, tokens, strict=True)
        )
        assert two.terms(rows, tokens)["attention"] == pytest.approx(busy)
        root = max(two.costs.dense(sum(half), 8).seconds for half in halves if sum(half))
        assert two.step_seconds(rows, tokens) > max(busy, root)


@pytest.mark.parametrize("stages", [2, 4, 8])
def test_the_bubble_of_a_pipeline_is_the_lectures(stages: int) -> None:
    """Without overlap one microbatch is in flight; with it, always as many as stages."""
    idle, full = layout("pp", stages, pp_overlap=0.0), layout("pp", stages, pp_overlap=1.0)
    rows, tokens = (64,), [64 * 30_000.0]
    step = full.step_seconds(rows, tokens)
    share = 1 - step / idle.step_seconds(rows, tokens)
    assert share == pytest.approx(lecture.pipeline_bubble(stages, 1))
    half = layout("pp", stages, pp_overlap=0.5).step_seconds(rows, tokens)
    assert half == pytest.approx((step + idle.step_seconds(rows, tokens)) / 2)
    # A lone request waits for nobody, and repeats no weight reads.
    alone = ((1,), [30_000.0])
    assert idle.step_seconds(*alone) == full.step_seconds(*alone)
    assert full.terms(*alone)["dense"] == pytest.approx(layout("dp").terms(*alone)["dense"])


def test_every_stage_reads_its_weights_for_every_microbatch() -> None:
    pp, hw = layout("pp", 4), setting().hardware
    terms = pp.terms((64,), [64 * 30_000.0])
    assert terms["dense"] == layout("dp").terms((16,), [0.0])["dense"], "a quarter of the batch"
    assert terms["step overhead"] == 4 * hw.step_overhead
    hop = hw.message_latency + 2 * 16 * 16_384 * 2 / 8 / hw.message_bandwidth
    assert terms["hops"] == pytest.approx(lecture.pipeline_hops(4, hop) + hop), "and back again"
    pipelines = layout("pp2", 4)
    assert isinstance(pipelines, Pp) and (pipelines.stages, len(pipelines.capacity)) == (2, 2)


def test_attention_dp_pads_to_the_largest_batch() -> None:
    found = layout("attention-dp")
    assert found.fixed((8, 1, 0, 3)) == found.fixed((8, 8, 8, 8)) > found.fixed((4, 4, 4, 4))
    assert lecture.lockstep_padding((8, 1, 0, 3)) == 1 - 12 / 32
    assert found.groups == ((0, 1, 2, 3),) and found.queues == ((0,), (1,), (2,), (3,))


def test_all_reduces_are_two_a_layer() -> None:
    hw = setting().hardware
    message = lecture.activation_bytes(128, 16_384, 2)
    assert message == 4 << 20
    inside = hw.node_allreduce_latency + message / hw.node_allreduce_bandwidth
    found = layout("dp").fixed_terms((128,))["all-reduce"]
    assert found == pytest.approx(lecture.tpot_floor(126, inside))
    latency = hw.cross_allreduce_latency + 2 * hw.cross_allreduce_doubling  # 1 to 4 nodes
    across = latency + message / hw.cross_allreduce_bandwidth
    found = layout("tp").fixed_terms((128,))["all-reduce"]
    assert found == pytest.approx(lecture.tpot_floor(126, across))
    one_rank = setting().hardware.with_values("test", gpus_per_node=1)
    alone = build("dp", replace(setting(), hardware=one_rank))
    assert alone.fixed_terms((128,))["all-reduce"] == 0
