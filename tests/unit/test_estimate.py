"""Proves the bytes of built-in shapes and of FP8 configurations, against sums done by hand."""

import pytest

from sglang_tknp import placement, shapes
from sglang_tknp.estimate import estimate_model_bytes

GIB = 1 << 30
# Parameters of a layer: attention and MLP.
LLAMA_ATTENTION = 16384 * 128 * (2 * 128 + 2 * 8)
LLAMA_MLP = 3 * 16384 * 53248
NEMOTRON_LAYER = 18432 * 192 * (2 * 96 + 2 * 8) + 2 * 18432 * 73728 + 2 * 2 * 18432
PARAMETERS = {
    "llama-3.1-405b": 405_853_388_800,
    "nemotron-4-340b": 96 * NEMOTRON_LAYER + 2 * 256000 * 18432 + 2 * 18432,
}


@pytest.mark.parametrize("name", PARAMETERS)
def test_a_shape_has_the_parameters_of_its_model(name: str) -> None:
    found = estimate_model_bytes(shapes.shape(name), 2)
    assert found.one_copy == 2 * PARAMETERS[name]


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


def test_a_configuration_without_sizes_is_refused() -> None:
    config = {**TINY, "hidden_size": None, "vocab_size": 0}
    with pytest.raises(ValueError, match="names no hidden_size, vocab_size, so its weights cannot"):
        estimate_model_bytes(config, 2)


def test_a_shape_is_a_copy() -> None:
    shapes.shape("llama-3.1-405b")["rope_scaling"]["factor"] = 1
    assert shapes.shape("llama-3.1-405b")["rope_scaling"]["factor"] == 8.0


def test_an_unknown_shape_names_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"^no built-in shape is named llama; use llama-3.1-405b,"):
        shapes.shape("llama")
