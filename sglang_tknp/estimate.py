"""Bytes of a model's weights from the fields of its config.json, without a checkpoint. Pure."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from sglang_tknp.placement import ModelBytes

# Families with one projection into the MLP, and with a bias beside every norm's weight.
_UNGATED = ("nemotron",)
_NORM_BIAS = ("nemotron",)
# Families with a bias in Q, K and V (not in O) that no field of their config.json names.
_QKV_BIAS = ("qwen2",)
# Families that normalise each head of Q and of K: two more weights of head_dim elements a layer.
_HEAD_NORMS = ("qwen3",)
_SCALE_BYTES = 4
_FIELDS = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "vocab_size",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Projection:
    """One matrix of a layer as it is stored."""

    name: str  # within the layer: "self_attn.q_proj"
    rows: int  # output elements
    columns: int  # input elements
    stored_bytes: int  # with scales and bias
    weight_bits: int  # 8 in FP8, else those of the model's dtype


def estimate_model_bytes(config: Mapping[str, Any], dtype_bytes: int) -> ModelBytes:
    """Bytes of a dense decoder: two norms a layer, a gated MLP except in Nemotron.

    A `quantization_config` of method fp8, or of compressed-tensors in FP8, gives one byte for each
    weight of the layers' projections, and float32 scales, except in the modules that it keeps;
    any other method is read as the model's own dtype. Raises ValueError where a size is missing.

    Args:
        dtype_bytes: bytes of one unquantised weight.
    """
    _check_sizes(config)
    hidden, norm = config["hidden_size"], _norm_elements(config) * dtype_bytes
    norms = 2 * norm + _head_norm_elements(config) * dtype_bytes
    layers = tuple(
        norms + sum(part.stored_bytes for part in layer_projections(config, layer, dtype_bytes))
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


def layer_projections(
    config: Mapping[str, Any], layer: int, dtype_bytes: int
) -> tuple[Projection, ...]:
    """The matrices of one layer, attention's first, as `estimate_model_bytes` counts them.

    Layers differ where a `quantization_config` keeps modules of some of them unquantised.
    Raises ValueError where a size is missing, or for a layer that the model does not have.

    Args:
        layer: from 0.
        dtype_bytes: bytes of one unquantised weight.
    """
    _check_sizes(config)
    if not 0 <= layer < config["num_hidden_layers"]:
        raise ValueError(f"the model has no layer {layer}, only {config['num_hidden_layers']}")
    quantization = config.get("quantization_config") or {}
    fp8 = _is_fp8(quantization)
    parts = []
    for name, (rows, columns) in _projections(config).items():
        quantised = fp8 and not _is_kept(f"model.layers.{layer}.{name}", quantization)
        stored = rows * columns * (1 if quantised else dtype_bytes)
        if quantised:
            stored += _num_scales(quantization, rows, columns) * _SCALE_BYTES
        if _has_bias(config, name):
            stored += rows * dtype_bytes
        parts.append(
            Projection(
                name=name,
                rows=rows,
                columns=columns,
                stored_bytes=stored,
                weight_bits=8 * (1 if quantised else dtype_bytes),
            )
        )
    return tuple(parts)


def _check_sizes(config: Mapping[str, Any]) -> None:
    if missing := [name for name in _FIELDS if not config.get(name)]:
        raise ValueError(
            f"the model's configuration names no {', '.join(missing)}, so its weights cannot be "
            "sized without the checkpoint; use a folder with its safetensors files"
        )


def _norm_elements(config: Mapping[str, Any]) -> int:
    hidden: int = config["hidden_size"]
    return hidden * (2 if config.get("model_type") in _NORM_BIAS else 1)


def _head_norm_elements(config: Mapping[str, Any]) -> int:
    return 2 * _head_dim(config) if config.get("model_type") in _HEAD_NORMS else 0


def _head_dim(config: Mapping[str, Any]) -> int:
    return config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]


def _projections(config: Mapping[str, Any]) -> dict[str, tuple[int, int]]:
    """(output, input) elements of a layer's projections, by their names in a checkpoint."""
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    heads = config["num_attention_heads"]
    kv_heads = config.get("num_key_value_heads") or heads
    head_dim = _head_dim(config)
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


def _has_bias(config: Mapping[str, Any], name: str) -> bool:
    if config.get("model_type") in _QKV_BIAS and name.endswith(("q_proj", "k_proj", "v_proj")):
        return True
    return bool(config.get("attention_bias" if name.startswith("self_attn.") else "mlp_bias"))


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
