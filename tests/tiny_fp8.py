"""Tiny FP8 checkpoints, made from tiny.py's: quantised layer matrices with their scales.

The formats that FP8 models are published in: quant_method "fp8" with one scale per matrix or per
block, and compressed-tensors with one scale per matrix or per output channel.
"""

import json
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from tests.tiny import make_tiny

FP8_MAX = torch.finfo(torch.float8_e4m3fn).max
BLOCK = (8, 8)  # square, as SGLang wants it on a CPU
Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True, kw_only=True)
class Format:
    """How matrices are stored: by the name of SGLang's method, and the shape of the scales."""

    method: str  # quant_method of the configuration
    scales: str  # "tensor", "channel" or "block"
    static: bool = False  # a stored scale of the activations too
    head: bool = False  # the head too
    family: str = "llama"

    @property
    def scale_name(self) -> str:
        return "weight_scale_inv" if self.scales == "block" else "weight_scale"


FORMATS = {
    "fp8-tensor": Format(method="fp8", scales="tensor"),
    "fp8-static": Format(method="fp8", scales="tensor", static=True),
    # SGLang's Llama drops the scales of blocks, its Qwen3 loads them (Qwen publishes such models).
    "fp8-block": Format(method="fp8", scales="block", family="qwen3"),
    "compressed-tensor": Format(method="compressed-tensors", scales="tensor"),
    "compressed-static": Format(method="compressed-tensors", scales="tensor", static=True),
    "compressed-channel": Format(method="compressed-tensors", scales="channel"),
    "compressed-head": Format(method="compressed-tensors", scales="channel", head=True),
}


def make_tiny_fp8(
    name: str,
    out: Path,
    *,
    plain_layers: Collection[int] = (),
    kv_scales: bool = False,
    **overrides: Any,
) -> Path:
    """Write a checkpoint in FORMATS[name] to `out`, and return `out`.

    `plain_layers` stay unquantised. `kv_scales` stores other scales of K and V for each layer.
    """
    form = FORMATS[name]
    make_tiny(form.family, out, **{"tie_word_embeddings": False, **overrides})
    (file,) = out.glob("*.safetensors")
    tensors: Tensors = {}
    for key, value in load_file(file).items():
        layer = layer_of(key)
        in_layer = layer is not None and layer not in plain_layers and value.dim() == 2
        if in_layer or (form.head and key == "lm_head.weight"):
            tensors.update(quantised(form, key.removesuffix(".weight"), value))
        else:
            tensors[key] = value
    config = json.loads((out / "config.json").read_text())
    if kv_scales:
        tensors.update(stored_kv_scales(form, config["num_hidden_layers"]))
    save_file(tensors, file, metadata={"format": "pt"})
    config["quantization_config"] = quantization_config(form, plain_layers, kv_scales)
    (out / "config.json").write_text(json.dumps(config))
    return out


def layer_of(key: str) -> int | None:
    return int(key.split(".")[2]) if key.startswith("model.layers.") else None


def quantised(form: Format, name: str, weight: torch.Tensor) -> Tensors:
    """[N, K] float32 -> FP8 and float32 scales: [], [N, 1] or one per block."""
    if form.scales == "block":
        n, k = (size // block for size, block in zip(weight.shape, BLOCK, strict=True))
        blocks = weight.view(n, BLOCK[0], k, BLOCK[1])
        scale = blocks.abs().amax(dim=(1, 3), keepdim=True) / FP8_MAX
        stored, scale = (blocks / scale).view_as(weight), scale.view(n, k)
    elif form.scales == "channel":
        scale = weight.abs().amax(dim=1, keepdim=True) / FP8_MAX
        stored = weight / scale
    else:
        scale = weight.abs().amax() / FP8_MAX
        stored = weight / scale
    tensors = {
        f"{name}.weight": stored.to(torch.float8_e4m3fn),
        f"{name}.{form.scale_name}": scale,
    }
    if form.static:
        tensors[f"{name}.input_scale"] = torch.tensor(0.05)
    return tensors


def kv_scale(layer: int, which: str) -> float:
    """Exact in float32, and no two alike."""
    return (layer + 2) / 8 + (1 / 16 if which == "v" else 0)


def stored_kv_scales(form: Format, num_layers: int) -> Tensors:
    """Under the names that each format's tools write."""
    where = "self_attn.{}_proj" if form.method == "fp8" else "self_attn"
    return {
        f"model.layers.{layer}.{where.format(which)}.{which}_scale": torch.tensor(
            kv_scale(layer, which)
        )
        for layer in range(num_layers)
        for which in "kv"
    }


def quantization_config(
    form: Format, plain_layers: Collection[int], kv_scales: bool
) -> dict[str, Any]:
    if form.method == "fp8":
        parts = [f"self_attn.{which}_proj" for which in "qkvo"]
        parts += [f"mlp.{which}_proj" for which in ("gate", "up", "down")]
        left_out = [f"model.layers.{layer}.{part}" for layer in plain_layers for part in parts]
        return {
            "quant_method": "fp8",
            "activation_scheme": "static" if form.static else "dynamic",
            "modules_to_not_convert": [*left_out, "lm_head"],
            **({"weight_block_size": list(BLOCK)} if form.scales == "block" else {}),
        }
    # SGLang matches the fused layers, which have other names than the stored matrices.
    ignored = [rf"re:model\.layers\.{layer}\..*" for layer in plain_layers]
    ignored += [] if form.head else ["lm_head"]
    fp8 = {"num_bits": 8, "type": "float", "symmetric": True}
    inputs = {"strategy": "tensor" if form.static else "token", "dynamic": not form.static}
    group = {
        "targets": ["Linear", "re:.*lm_head"] if form.head else ["Linear"],
        "weights": {**fp8, "strategy": form.scales, "dynamic": False},
        "input_activations": {**fp8, **inputs},
    }
    return {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": ignored,
        "kv_cache_scheme": {**fp8, "strategy": "tensor", "dynamic": False} if kv_scales else None,
    }
