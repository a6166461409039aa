"""Bytes of a model's weights from the fields of its config.json, without a checkpoint. Pure."""

import re
from collections.abc import Mapping
from typing import Any

from sglang_tknp.placement import ModelBytes

# Families with one projection into the MLP, and with a bias beside every norm's weight.
_UNGATED = ("nemotron",)
_NORM_BIAS = ("nemotron",)
_SCALE_BYTES = 4
_FIELDS = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "vocab_size",
)


def estimate_model_bytes(config: Mapping[str, Any], dtype_bytes: int) -> ModelBytes:
    """Bytes of a dense decoder: two norms a layer, a gated MLP except in Nemotron.

    A `quantization_config` of method fp8, or of compressed-tensors in FP8, gives one byte for each
    weight of the layers' projections, and float32 scales, except in the modules that it keeps;
    any other method is read as the model's own dtype. Raises ValueError where a size is missing.

    Args:
        dtype_bytes: bytes of one unquantised weight.
    """
    if missing := [name for name in _FIELDS if not config.get(name)]:
        raise ValueError(
            f"the model's configuration names no {', '.join(missing)}, so its weights cannot be "
            "sized without the checkpoint; use a folder with its safetensors files"
        )
    hidden, norm = config["hidden_size"], _norm_elements(config) * dtype_bytes
    layers = tuple(
        2 * norm
        + sum(
            _projection_bytes(config, f"model.layers.{layer}.{name}", *shape, dtype_bytes)
            for name, shape in _projections(config).items()
        )
        for layer in range(config["num_hidden_layers"])
    )
    vocabulary = config["vocab_size"] * hidden * dtype_bytes
    tied = bool(config.get("tie_word_embeddings", False))
    return ModelBytes(
        embedding=vocabulary,
        layers=layers,
        final_norm=norm,
        head=0 if tied else vocabulary,
        tied=tied,
    )


def _norm_elements(config: Mapping[str, Any]) -> int:
    hidden: int = config["hidden_size"]
    return hidden * (2 if config.get("model_type") in _NORM_BIAS else 1)


def _projections(config: Mapping[str, Any]) -> dict[str, tuple[int, int]]:
    """(output, input) elements of a layer's projections, by their names in a checkpoint."""
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    heads = config["num_attention_heads"]
    kv_heads = config.get("num_key_value_heads") or heads
    head_dim = config.get("head_dim") or hidden // heads
    gate = {} if config.get("model_type") in _UNGATED else {"mlp.gate_proj": (inner, hidden)}
    return {
        "self_attn.q_proj": (heads * head_dim, hidden),
        "self_attn.k_proj": (kv_heads * head_dim, hidden),
        "self_attn.v_proj": (kv_heads * head_dim, hidden),
        "self_attn.o_proj": (hidden, heads * head_dim),
        **gate,
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
    }


def _projection_bytes(
    config: Mapping[str, Any], name: str, rows: int, columns: int, dtype_bytes: int
) -> int:
    quantization = config.get("quantization_config") or {}
    bias = config.get("attention_bias" if ".self_attn." in name else "mlp_bias")
    bias_bytes = rows * dtype_bytes if bias else 0
    if not _is_fp8(quantization) or _is_kept(name, quantization):
        return rows * columns * dtype_bytes + bias_bytes
    scales = _num_scales(quantization, rows, columns)
    return rows * columns + scales * _SCALE_BYTES + bias_bytes


def _is_fp8(quantization: Mapping[str, Any]) -> bool:
    return quantization.get("quant_method") == "fp8" or any(
        (weights.get("type"), weights.get("num_bits")) == ("float", 8)
        for weights in _compressed_weights(quantization)
    )


def _compressed_weights(quantization: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """How compressed-tensors stores the weights of each of its groups."""
    groups = (quantization.get("config_groups") or {}).values()
    return [group.get("weights") or {} for group in groups]


def _num_scales(quantization: Mapping[str, Any], rows: int, columns: int) -> int:
    block = quantization.get("weight_block_size")
    for weights in _compressed_weights(quantization):
        if weights.get("strategy") == "channel":
            return rows
        block = block or weights.get("block_structure")
    scales = -(-rows // block[0]) * -(-columns // block[1]) if block else 1
    return scales + (quantization.get("activation_scheme") == "static")


def _is_kept(name: str, quantization: Mapping[str, Any]) -> bool:
    """Whether a module stays in the model's dtype: the list names it, or a part of its path."""
    lists = ("modules_to_not_convert", "ignored_layers", "ignore")
    kept = next((quantization[key] for key in lists if quantization.get(key)), ())
    return any(
        re.match(part[3:], name) if part.startswith("re:") else f".{part}." in f".{name}."
        for part in kept
    )
