"""Proves the lecture's formulas against the numbers that it works out itself."""

import math
from collections.abc import Callable

import numpy as np
import pytest

from sglang_tknp.launch.planner import lecture

H100 = 3.35e12  # bytes a second
BF16 = 990e12  # FLOP a second
NVLINK, RDMA = 450e9, 50e9  # bytes a second, one direction
US, KIB, MIB, GIB = 1e-6, 1 << 10, 1 << 20, 1 << 30
LLAMA_70B = {"layers": 80, "kv_heads": 8, "head_dim": 128, "dtype_bytes": 2}
EXPERT = lecture.expert_parameters(7168, 2048)  # of DeepSeek-V3; bytes too, in FP8


def about(value: float, digits: int = 2) -> object:
    """What the lecture rounds to `value`, with so many digits that count."""
    return pytest.approx(value, abs=0.5 * 10 ** (math.floor(math.log10(value)) + 1 - digits))


def test_capacity() -> None:
    assert lecture.weight_bytes(70e9, 2) == 140e9
    assert lecture.ranks_to_hold(140e9, 80e9) == 2
    assert lecture.ranks_to_hold(lecture.weight_bytes(671e9, 1), 80e9) == 9, "one node is 8"
    assert lecture.weight_bytes(405e9, 2) / 8 == about(101e9, 3)
    assert lecture.kv_token_bytes(**LLAMA_70B) == 320 * KIB
    assert lecture.kv_token_bytes(**LLAMA_70B) * 131_072 == about(43e9)


def test_one_gpu_streams_70b_in_42_ms() -> None:
    step = lecture.tpot(140e9, 0, 1, bandwidth=H100, layers=80, latency=0)
    assert step == about(42e-3)
    assert 1 / step == about(24)


def test_decode_bytes_fall_with_the_ranks() -> None:
    assert lecture.decode_bytes(140e9, 40e9, 4) == 45e9
    assert lecture.decode_bytes(140e9, 40e9, 8, kv_heads=8) == 140e9 / 8 + 40e9 / 8
    # Past one KV head each, weights go on shrinking and the KV of a rank does not.
    assert lecture.decode_bytes(140e9, 40e9, 16, kv_heads=8) == 140e9 / 16 + 40e9 / 8


def lab(ranks: int) -> float:
    """Lab 6: an 8B model, 32 requests of 1024 tokens."""
    kv = 32 * 1024 * lecture.kv_token_bytes(32, 8, 128, 2)
    return lecture.tpot(16e9, kv, ranks, bandwidth=H100, layers=32, latency=10 * US)


def test_the_labs_step_halves_then_bends() -> None:
    floor = lecture.tpot_floor(32, 10 * US)
    assert floor == about(0.64e-3)
    assert [lab(t) for t in (1, 2, 4, 8)] == [about(ms / 1e3, 3) for ms in (6.70, 3.67, 2.15, 1.40)]
    assert floor / lab(8) == about(0.46)
    assert lecture.tpot_floor(80, 10 * US) == about(1.6e-3)
    assert lab(10**9) == pytest.approx(floor, rel=1e-4)


def test_only_one_rank_is_overstated() -> None:
    assert lecture.tpot_overstatement(1, 32, 10 * US) == pytest.approx(0.64e-3)
    assert lecture.tpot_overstatement(2, 32, 10 * US) == 0
    true = lab(1) - lecture.tpot_overstatement(1, 32, 10 * US)
    assert true == pytest.approx((16e9 + 32 * 1024 * 128 * KIB) / H100)


def test_heads_of_a_rank() -> None:
    assert lecture.heads_per_rank(64, 8) == 8
    assert [lecture.kv_replication(8, t) for t in (1, 4, 8, 16, 64)] == [1, 1, 1, 2, 8]
    assert lecture.kv_replication(1, 8) == 8, "MLA"


def test_decode_waits_for_latency_and_prefill_for_bandwidth() -> None:
    prefill, decode = (lecture.activation_bytes(n, 8192, 2) for n in (4096, 32))
    assert (prefill, decode) == (64 * MIB, 512 * KIB)
    assert prefill / RDMA == about(1.3e-3)
    assert decode / NVLINK == about(1.2 * US)
    assert decode / RDMA == about(10 * US, 1)
    regime = lecture.collective_regime
    assert regime(decode, bandwidth=NVLINK, latency=10 * US) == "latency"
    assert regime(prefill, bandwidth=RDMA, latency=10 * US) == "bandwidth"
    assert regime(decode, bandwidth=RDMA, latency=10 * US) == "neither"
    assert regime(decode, bandwidth=RDMA, latency=10 * US, margin=1) == "bandwidth"
    assert lecture.activation_bytes(32, 4096, 2) == 256 * KIB, "the lab's"


def test_pipelines() -> None:
    bubbles = [lecture.pipeline_bubble(*of) for of in ((4, 8), (8, 32), (8, 4))]
    assert [round(100 * bubble) for bubble in bubbles] == [27, 18, 64]
    assert lecture.pipeline_bubble(8, 1) == 7 / 8
    assert lecture.pipeline_bubble(1, 5) == 0
    assert lecture.pipeline_bubble(4, 10**9) < 1e-8
    assert lecture.pipeline_hops(8, 20 * US) == about(0.14e-3)


def test_experts_of_deepseek_v3() -> None:
    assert about(44.0e6, 3) == EXPERT
    assert lecture.expert_bytes(256, 8, EXPERT) == about(1.41e9, 3)
    assert lecture.resident_experts(256, 8) == 32
    assert lecture.resident_experts(256, 144) == 2
    assert lecture.expert_bytes(256, 144, EXPERT) == about(88e6)


def test_expert_products_need_a_wide_pool() -> None:
    assert lecture.ridge(BF16, H100) == pytest.approx(295, abs=1)
    assert lecture.ridge(BF16, H100) / 2 == about(148, 3)
    tokens = [lecture.tokens_per_expert(batch, 8, 256) for batch in (8, 1024, 18_432)]
    assert tokens == [0.25, 32, 576]
    assert [lecture.expert_intensity(t) for t in tokens] == [0.5, 64, 1152]
    assert lecture.expert_intensity(4 * 576) == about(4600)
    assert lecture.expert_intensity(4 * 576, parameter_bytes=2) == 4 * 576


def test_all_to_all_of_kimi_k3() -> None:
    assert lecture.all_to_all_bytes(16, 7168) == about(344e3, 3)
    assert lecture.all_to_all_bytes(1, 7168) == 21_504
    assert lecture.all_to_all_bytes(1, 3584) == 10_752
    # What LatentMoE is for: 16 experts for the bytes of 8.
    assert lecture.all_to_all_bytes(16, 3584) == lecture.all_to_all_bytes(8, 7168)


def test_lockstep_padding() -> None:
    padding = lecture.lockstep_padding([120, 118, 126, 90, 122, 124, 119, 121])
    assert padding == 1 - 940 / 1008
    assert round(100 * padding) == 7
    assert lecture.lockstep_padding([3, 0]) == 0.5
    assert lecture.lockstep_padding([5, 5]) == 0


def test_the_ring_hides_in_long_prefills() -> None:
    kv_layer = lecture.kv_token_bytes(1, 8, 128, 2)
    assert kv_layer == 4096

    def threshold(kv: float, hidden: int, bandwidth: float) -> float:
        return lecture.cp_threshold(8, kv, hidden, flops=BF16, bandwidth=bandwidth)

    assert threshold(kv_layer, 8192, RDMA) == about(17.3e3, 3)
    assert threshold(kv_layer, 8192, NVLINK) == about(1.9e3)
    assert threshold(576, 7168, RDMA) == about(2.8e3), "MLA's latent in FP8"
    received, flop = lecture.cp_received_bytes(131_072, 8, 4096), lecture.cp_flop(131_072, 8, 8192)
    assert (received, received / RDMA) == (about(470e6), about(9.4e-3))
    assert (flop, flop / BF16) == (about(70e12), about(71e-3))
    assert (flop / BF16) / (received / RDMA) == about(7.6)
    length = 17_325
    hidden_at = lecture.cp_flop(length, 8, 8192) / BF16
    assert hidden_at == pytest.approx(lecture.cp_received_bytes(length, 8, 4096) / RDMA)


def test_dcp_cuts_what_tp_repeats() -> None:
    assert [lecture.dcp_kv_bytes(16 * GIB, 4, 8, d) / GIB for d in (1, 2)] == [4, 2]
    assert [lecture.dcp_kv_bytes(8 * GIB, 1, 8, d) / GIB for d in (1, 8)] == [8, 1]
    assert lecture.dcp_degrees(4, 8) == (1, 2)
    assert lecture.dcp_degrees(1, 8) == (1, 2, 4, 8)
    assert lecture.dcp_degrees(8, 8) == lecture.dcp_degrees(8, 4) == (1,)


def test_dcp_pays_where_reading_kv_takes_long() -> None:
    ms = 1e-3
    long, short = 8 * ms, 0.4 * ms
    before, after = (lecture.dcp_step(6 * ms, long, d, 0.6 * ms) for d in (1, 4))
    assert (before, after) == (pytest.approx(14 * ms), pytest.approx(8.6 * ms))
    assert before / after == about(1.63, 3)
    slow = [lecture.dcp_step(6 * ms, short, d, 0.6 * ms) for d in (1, 4)]
    assert slow == [pytest.approx(6.4 * ms), pytest.approx(6.7 * ms)]
    assert lecture.dcp_pays(long, 4, 0.6 * ms) and not lecture.dcp_pays(short, 4, 0.6 * ms)
    assert not lecture.dcp_pays(long, 1, 0.0)


def test_log_sum_exp_weights_of_the_lecture() -> None:
    outputs = np.array([[1.0, 0.0], [0.0, 1.0]])
    merged, lse = lecture.merge_partial(outputs, np.array([math.log(3), 0.0]))
    assert merged.tolist() == pytest.approx([0.75, 0.25])
    assert float(lse) == pytest.approx(math.log(4))


def test_merged_parts_are_the_attention_over_everything() -> None:
    rng = np.random.default_rng(0)
    scores, values = 300 * rng.standard_normal((3, 12)), rng.standard_normal((12, 5))

    def attention(part: slice) -> tuple[np.ndarray, np.ndarray]:
        largest = scores[:, part].max(axis=1, keepdims=True)
        weights = np.exp(scores[:, part] - largest)
        total = weights.sum(axis=1, keepdims=True)
        return weights @ values[part] / total, (largest + np.log(total))[:, 0]

    whole, whole_lse = attention(slice(0, 12))
    parts = [attention(part) for part in (slice(0, 2), slice(2, 7), slice(7, 12))]
    # An empty set's output is whatever was there before.
    parts.append((np.full((3, 5), np.nan), np.full(3, -np.inf)))
    merged, lse = lecture.merge_partial(*(np.stack(arrays) for arrays in zip(*parts, strict=True)))
    np.testing.assert_allclose(merged, whole, rtol=1e-12)
    np.testing.assert_allclose(lse, whole_lse, rtol=1e-12)


def test_the_summarys_expert_bytes_do_not_follow() -> None:
    wide, narrow = lecture.KNOWN_INCONSISTENT
    assert wide.follows == lecture.expert_bytes(256, 144, EXPERT, layers=58) == about(5.1e9)
    assert narrow.follows == lecture.expert_bytes(256, 8, EXPERT, layers=58) == about(81.7e9, 3)
    # Nor by any other reading: all layers, or the mean of the ranks, which hold 256/144 experts.
    for layers in (1, 58, 61):
        for experts in (1, 256 / 144, 2):
            assert abs(layers * experts * EXPERT / wide.stated - 1) > 0.5
    assert narrow.stated / wide.stated > 2 * 144 / 8, "a pool 18 times wider cannot save that"


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: lecture.heads_per_rank(64, 6), "6 TP ranks do not divide 64 query heads"),
        (lambda: lecture.kv_replication(8, 12), "12 TP ranks and 8 KV heads do not divide"),
        (lambda: lecture.decode_bytes(1, 1, 12, kv_heads=8), "do not divide"),
        (lambda: lecture.decode_bytes(1, 1, 0), "ranks is 0, and has to be above 0"),
        (lambda: lecture.decode_bytes(1, -1, 1), "kv is -1, and cannot be below 0"),
        (lambda: lecture.tpot(1, 1, 1, bandwidth=0, layers=1, latency=0), "bandwidth is 0"),
        (lambda: lecture.tpot_floor(1, math.nan), "latency is nan"),
        (lambda: lecture.weight_bytes(math.inf, 2), "parameters is inf"),
        (
            lambda: lecture.collective_regime(1, bandwidth=1, latency=1, margin=0.5),
            "margin is 0.5",
        ),
        (lambda: lecture.pipeline_bubble(4, 0), "microbatches is 0"),
        (lambda: lecture.pipeline_hops(0, 1), "stages is 0"),
        (lambda: lecture.tokens_per_expert(1, 9, 8), "cannot reach 9 of 8 experts"),
        (lambda: lecture.lockstep_padding([]), "has a batch to pad to"),
        (lambda: lecture.lockstep_padding([0, 0]), "has a batch to pad to"),
        (lambda: lecture.lockstep_padding([1, -1]), "has a batch to pad to"),
        (lambda: lecture.cp_flop(0, 8, 8192), "length is 0"),
        (lambda: lecture.dcp_degrees(8, 12), "do not divide"),
        (lambda: lecture.dcp_kv_bytes(1, 4, 8, 4), "DCP of 4 does not fit .*; use one of 1, 2$"),
        (lambda: lecture.dcp_kv_bytes(1, 8, 8, 2), "use one of 1$"),
        (lambda: lecture.dcp_step(1, 1, 0, 1), "degree is 0"),
        (lambda: lecture.merge_partial(np.ones((2, 3)), np.ones(3)), r"\(2, 3\) do not fit"),
        (
            lambda: lecture.merge_partial(np.ones((2, 3)), np.full(2, -np.inf)),
            "no position in any set",
        ),
    ],
)
def test_senseless_input_is_refused(call: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()
