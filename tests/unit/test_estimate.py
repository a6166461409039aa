"""Proves the bytes of built-in shapes and of FP8 configurations, against sums done by hand."""

from collections.abc import Callable

import pytest

from sglang_tknp import placement, shapes
from sglang_tknp.estimate import estimate_model_bytes, layer_projections

GIB = 1 << 30
# Parameters of a layer: attention and MLP.
LLAMA_ATTENTION = 16384 * 128 * (2 * 128 + 2 * 8)
LLAMA_MLP = 3 * 16384 * 53248
NEMOTRON_LAYER = 18432 * 192 * (2 * 96 + 2 * 8) + 2 * 18432 * 73728 + 2 * 2 * 18432
PARAMETERS = {
    "llama-3.1-405b": 405_853_388_800,
    "nemotron-4-340b": 96 * NEMOTRON_LAYER + 2 * 256000 * 18432 + 2 * 18432,
}


# As their model pages give them, in billions.
PUBLISHED = {
    "llama-3.1-8b": 8.030,
    "llama-3.1-70b": 70.554,
    "qwen2.5-7b": 7.616,
    "qwen2.5-14b": 14.770,
    "qwen2.5-32b": 32.764,
    "qwen2.5-72b": 72.706,
    "qwen3-8b": 8.191,
    "qwen3-14b": 14.768,
    "qwen3-32b": 32.762,
    "mistral-7b": 7.248,
    "mistral-nemo-12b": 12.248,
    "mistral-small-24b": 23.572,
    "mistral-large-123b": 122.610,
}


@pytest.mark.parametrize("name", PARAMETERS)
def test_a_shape_has_the_parameters_of_its_model(name: str) -> None:
    found = estimate_model_bytes(shapes.shape(name), 2)
    assert found.one_copy == 2 * PARAMETERS[name]


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_shape_has_the_published_parameters(name: str) -> None:
    found = estimate_model_bytes(shapes.shape(name), 2)
    assert found.one_copy / 2e9 == pytest.approx(PUBLISHED[name], abs=0.0006)
    assert not found.tied and found.head == found.embedding


def test_every_shape_is_compared_with_a_published_size() -> None:
    plain = {name.removesuffix("-fp8") for name in shapes.SHAPES}
    assert plain == {*PUBLISHED, *PARAMETERS}


def test_shapes_in_fp8_follow_metas_recipe() -> None:
    """Nemotron's 397.3 GiB is what the recipe would give; its paper does not say what was kept."""
    llama = 2 * 70_553_706_496 - 78 * (3 * 8192 * 28672 - 3 * 4)  # a byte less a weight, scales
    for name, gib in (("llama-3.1-70b-fp8", llama / GIB), ("nemotron-4-340b-fp8", 397.3)):
        config = shapes.shape(name)
        found = estimate_model_bytes(config, 2)
        assert found.one_copy / GIB == pytest.approx(gib, rel=1e-3)
        bits = [
            {p.name.split(".")[0]: p.weight_bits for p in layer_projections(config, layer, 2)}
            for layer in range(config["num_hidden_layers"])
        ]
        assert bits[0] == bits[-1] == {"self_attn": 16, "mlp": 16}
        assert bits[1:-1] == [{"self_attn": 16, "mlp": 8}] * (len(bits) - 2)


def test_nemotron_is_ungated_and_its_norms_have_biases() -> None:
    found = estimate_model_bytes(shapes.shape("nemotron-4-340b"), 2)
    assert found.layers == (2 * NEMOTRON_LAYER,) * 96
    assert found.final_norm == 2 * 2 * 18432
    assert 341e9 < found.one_copy / 2 < 342e9


def test_fp8_is_a_byte_for_each_weight_of_a_projection_and_a_scale() -> None:
    config = shapes.with_fp8(shapes.shape("llama-3.1-405b"))
    found = estimate_model_bytes(config, 2)
    layer = LLAMA_ATTENTION + LLAMA_MLP + 7 * 4 + 2 * 16384 * 2
    assert found.layers == (layer,) * 126
    assert found.embedding == found.head == 128256 * 16384 * 2
    assert found.final_norm == 16384 * 2


def test_the_papers_fp8_model_takes_454_gib() -> None:
    """Section 3.2: 454 GiB on one node, which leaves 106 GiB of its 560 for KV."""
    found = estimate_model_bytes(shapes.shape("llama-3.1-405b-fp8"), 2)
    assert round(found.one_copy / GIB) == 454
    assert round(560 - found.one_copy / GIB) == 106
    ends, inner = found.layers[0], found.layers[1]
    assert ends == found.layers[-1] == 2 * (LLAMA_ATTENTION + LLAMA_MLP + 2 * 16384)
    assert inner == 2 * (LLAMA_ATTENTION + 2 * 16384) + LLAMA_MLP + 3 * 4


def test_the_papers_fp8_model_balances_its_heavier_ends() -> None:
    found = estimate_model_bytes(shapes.shape("llama-3.1-405b-fp8"), 2)
    for num_nodes in (2, 4, 8):
        chosen = placement.balance(found, num_nodes)
        assert sum(chosen.node_bytes) == found.one_copy
        mean = found.one_copy / num_nodes
        assert max(chosen.node_bytes) - mean <= max(found.layers)


TINY = {
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "vocab_size": 512,
}
TINY_LAYER = 2 * 64 * 64 + 2 * 16 * 64 + 3 * 64 * 160  # Q and O, K and V, MLP
TINY_NORMS = 2 * 64 * 2
QWEN2, QWEN3 = {"model_type": "qwen2"}, {"model_type": "qwen3"}


def compressed(**weights: object) -> dict[str, object]:
    """compressed-tensors in FP8; its format has had several names."""
    group = {"targets": ["Linear"], "weights": {"type": "float", "num_bits": 8, **weights}}
    return {
        "quant_method": "compressed-tensors",
        "format": "naive-quantized",
        "config_groups": {"group_0": group},
    }


COMPRESSED = compressed(strategy="tensor")


@pytest.mark.parametrize(
    ("quantization", "layer"),
    [
        ({"quant_method": "awq", "bits": 4}, 2 * TINY_LAYER),
        ({"quant_method": "fp8"}, TINY_LAYER + 7 * 4),
        ({"quant_method": "fp8", "activation_scheme": "static"}, TINY_LAYER + 2 * 7 * 4),
        # Q and O one block of 128, K and V too; two blocks for each of the MLP's three.
        ({"quant_method": "fp8", "weight_block_size": [128, 128]}, TINY_LAYER + (4 + 6) * 4),
        ({"quant_method": "fp8", "ignored_layers": ["mlp"]}, TINY_LAYER + 30720 + 4 * 4),
        (
            {"quant_method": "fp8", "modules_to_not_convert": ["model.layers.0.mlp.up_proj", "q"]},
            TINY_LAYER + 10240 + 6 * 4,
        ),
        (COMPRESSED, TINY_LAYER + 7 * 4),
        ({**COMPRESSED, "ignore": [r"re:.*\.mlp\..*"]}, TINY_LAYER + 30720 + 4 * 4),
        ({**COMPRESSED, "ignore": ["re:.*lm_head"]}, TINY_LAYER + 7 * 4),
        # A scale for each output channel of Q and O, K and V, the MLP's first two and its last.
        (compressed(strategy="channel"), TINY_LAYER + (2 * 64 + 2 * 16 + 320 + 64) * 4),
        (compressed(strategy="block", block_structure=[128, 128]), TINY_LAYER + (4 + 6) * 4),
        ({"quant_method": "compressed-tensors", "format": "pack-quantized"}, 2 * TINY_LAYER),
        (compressed(type="int", strategy="channel"), 2 * TINY_LAYER),
    ],
)
def test_quantisations(quantization: dict[str, object], layer: int) -> None:
    found = estimate_model_bytes({**TINY, "quantization_config": quantization}, 2)
    assert found.layers[0] == layer + TINY_NORMS


def test_biases_count_in_the_models_dtype() -> None:
    plain = estimate_model_bytes(TINY, 2).layers[0]
    attention = estimate_model_bytes({**TINY, "attention_bias": True}, 2).layers[0]
    mlp = estimate_model_bytes({**TINY, "mlp_bias": True}, 2).layers[0]
    assert attention - plain == 2 * (64 + 16 + 16 + 64)
    assert mlp - plain == 2 * (160 + 160 + 64)


def test_qwen2_has_biases_in_q_k_and_v_that_its_configuration_does_not_name() -> None:
    plain, qwen2 = (estimate_model_bytes({**TINY, **kind}, 2) for kind in ({}, QWEN2))
    assert [b - a for a, b in zip(plain.layers, qwen2.layers, strict=True)] == [2 * 96, 2 * 96]
    pairs = zip(
        layer_projections(TINY, 0, 2), layer_projections({**TINY, **QWEN2}, 0, 2), strict=True
    )
    extra = {a.name: b.stored_bytes - a.stored_bytes for a, b in pairs}
    assert {name: size for name, size in extra.items() if size} == {
        "self_attn.q_proj": 2 * 64,
        "self_attn.k_proj": 2 * 16,
        "self_attn.v_proj": 2 * 16,
    }


def test_qwen3_normalises_each_head_of_q_and_k() -> None:
    plain, qwen3 = (estimate_model_bytes({**TINY, **kind}, 2) for kind in ({}, QWEN3))
    assert [b - a for a, b in zip(plain.layers, qwen3.layers, strict=True)] == [2 * 16, 2 * 16]
    wide = {**TINY, "head_dim": 32}
    plain, qwen3 = (estimate_model_bytes({**wide, **kind}, 2) for kind in ({}, QWEN3))
    assert qwen3.layers[0] - plain.layers[0] == 2 * 2 * 32


def test_the_projections_of_a_layer_are_its_matrices() -> None:
    parts = layer_projections({**TINY, "attention_bias": True}, 1, 2)
    assert [(p.name, p.rows, p.columns) for p in parts] == [
        ("self_attn.q_proj", 64, 64),
        ("self_attn.k_proj", 16, 64),
        ("self_attn.v_proj", 16, 64),
        ("self_attn.o_proj", 64, 64),
        ("mlp.gate_proj", 160, 64),
        ("mlp.up_proj", 160, 64),
        ("mlp.down_proj", 64, 160),
    ]
    assert [p.stored_bytes for p in parts] == [8320, 2080, 2080, 8320, 20480, 20480, 20480]
    assert {p.weight_bits for p in parts} == {16}


def test_the_projections_of_a_mixed_layer_say_which_are_in_fp8() -> None:
    config = shapes.shape("llama-3.1-405b-fp8")
    ends, inner = layer_projections(config, 0, 2), layer_projections(config, 1, 2)
    assert {p.weight_bits for p in ends} == {16}
    in_fp8 = {p.name: p.stored_bytes for p in inner if p.weight_bits == 8}
    assert in_fp8 == dict.fromkeys(
        ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"), 16384 * 53248 + 4
    )


@pytest.mark.parametrize("layer", [-1, 2])
def test_a_layer_that_is_not_there_is_refused(layer: int) -> None:
    with pytest.raises(ValueError, match=f"has no layer {layer}, only 2"):
        layer_projections(TINY, layer, 2)


@pytest.mark.parametrize("read", [estimate_model_bytes, lambda c, b: layer_projections(c, 0, b)])
def test_a_configuration_without_sizes_is_refused(read: Callable[..., object]) -> None:
    config = {**TINY, "hidden_size": None, "vocab_size": 0}
    with pytest.raises(ValueError, match="names no hidden_size, vocab_size, so its weights cannot"):
        read(config, 2)


def test_a_shape_is_a_copy() -> None:
    shapes.shape("llama-3.1-405b")["rope_scaling"]["factor"] = 1
    assert shapes.shape("llama-3.1-405b")["rope_scaling"]["factor"] == 8.0


def test_an_unknown_shape_names_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"^no built-in shape is named llama; use llama-3.1-405b,"):
        shapes.shape("llama")
