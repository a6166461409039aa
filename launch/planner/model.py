"""What a plan needs of a model: bytes per layer, its matrix products, and KV per token."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from sglang_tknp.checkpoint import read_model_bytes
from sglang_tknp.estimate import Projection, estimate_model_bytes, layer_projections
from sglang_tknp.launch.model_source import Model
from sglang_tknp.placement import ModelBytes

# Fields of a config.json that are not a dense decoder's with one attention per layer.
_NOT_DENSE = (
    "num_experts",
    "num_local_experts",
    "n_routed_experts",
    "moe_num_experts",
    "kv_lora_rank",
    "linear_attention_config",
    "mamba_config",
    "vision_config",
)
_COUNTS = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "vocab_size",
)
_OPTIONAL_COUNTS = ("num_key_value_heads", "head_dim", "max_position_embeddings", "sliding_window")
_FLOAT32 = ("float32", "float")


@dataclass(frozen=True, slots=True, kw_only=True)
class Product:
    """One matrix product of a layer as engines run it: Q, K and V in one, gate and up in one."""

    rows: int  # output elements
    columns: int  # input elements
    weight_bytes: int
    weight_bits: int
    kv_share: float = 0.0  # of K and V, which ranks beyond the KV heads repeat


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """The dense part of a layer. Layers with the same products are equal."""

    attention: tuple[Product, ...]  # before and after attention
    mlp: tuple[Product, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedModel:
    """A dense decoder; bytes of one copy."""

    name: str
    architecture: str
    hidden_size: int
    inner_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    element_bytes: int  # of an activation
    kv_element_bytes: int
    gated: bool
    layers: tuple[Layer, ...]
    sizes: ModelBytes
    sizes_from: str  # "checkpoint" or "configuration"
    max_context: int
    notes: tuple[str, ...] = ()  # what the plan leaves out of this model

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def weight_bytes(self) -> int:
        """Of one copy on one node; a tied head is not a copy there."""
        return self.sizes.one_copy

    def kv_heads_per_rank(self, tp_size: int) -> int:
        """A rank holds one KV head at least: T beyond Hkv repeats them."""
        return max(1, self.num_kv_heads // tp_size)

    def kv_token_bytes(self, tp_size: int) -> int:
        """KV of one token of one request, of all layers, on one of T ranks."""
        row = 2 * self.kv_heads_per_rank(tp_size) * self.head_dim * self.kv_element_bytes
        return row * self.num_layers

    @property
    def parameters(self) -> int:
        """Weights of the layers' matrices and both endpoints; norms and biases are left out."""
        endpoints = self.vocab_size * self.hidden_size * (1 if self.sizes.tied else 2)
        return endpoints + sum(
            p.rows * p.columns for layer in self.layers for p in (*layer.attention, *layer.mlp)
        )


def planned(model: Model, kv_cache_dtype: str = "auto") -> PlannedModel:
    """Read a model's sizes: of its checkpoint where one is there, else of its config.json.

    Raises:
        ValueError: it is no dense decoder, or its configuration lacks a size.
    """
    config = model.config
    _check(model)
    if wrong := [name for name in _NOT_DENSE if config.get(name)]:
        raise ValueError(
            f"--model-path={model.name}: its config.json has {', '.join(wrong)}, and this planner "
            "is for dense decoders with one attention per layer, as TKNP is; plan it with "
            "SGLang's expert or attention data parallelism instead"
        )
    element = 4 if _dtype(config) in _FLOAT32 else 2
    sizes, source = _sizes(model, element)
    layers = tuple(
        _layer(layer_projections(config, i, element)) for i in range(config["num_hidden_layers"])
    )
    heads = config["num_attention_heads"]
    return PlannedModel(
        name=model.name,
        architecture=str(config["architectures"][0]),
        hidden_size=config["hidden_size"],
        inner_size=config["intermediate_size"],
        num_heads=heads,
        num_kv_heads=config.get("num_key_value_heads") or heads,
        head_dim=config.get("head_dim") or config["hidden_size"] // heads,
        vocab_size=config["vocab_size"],
        element_bytes=element,
        kv_element_bytes=1 if kv_cache_dtype.startswith("fp8") else element,
        gated=layers[0].mlp[0].rows == 2 * config["intermediate_size"],
        layers=layers,
        sizes=sizes,
        sizes_from=source,
        max_context=config.get("max_position_embeddings") or 0,
        notes=tuple(_notes(config)),
    )


def _check(model: Model) -> None:
    """Raise ValueError for a config.json whose fields are not what they must be."""

    def wrong(name: str, must: str) -> ValueError:
        found = f"{name} = {model.config.get(name)!r}"
        return ValueError(f"--model-path={model.name}: its config.json has {found}; {must}")

    config = model.config
    names = config.get("architectures")
    if not isinstance(names, list) or not names or not all(isinstance(n, str) for n in names):
        raise wrong("architectures", "a list with one name is needed")
    for name in (*_COUNTS, *_OPTIONAL_COUNTS):
        value = config.get(name)
        if value is None and (name in _OPTIONAL_COUNTS or name not in config):
            continue  # the estimate names what is missing
        if type(value) is not int or value < 1:
            raise wrong(name, "a whole number above 0 is needed")
    if not isinstance(config.get("quantization_config") or {}, dict):
        raise wrong("quantization_config", "an object is needed")
    heads, kv_heads = config.get("num_attention_heads") or 1, config.get("num_key_value_heads")
    if kv_heads and heads % kv_heads:
        raise wrong("num_key_value_heads", f"it must divide {heads} heads")
    if not config.get("head_dim") and (config.get("hidden_size") or heads) % heads:
        raise wrong("hidden_size", f"without head_dim it must divide over {heads} heads")


def _notes(config: Mapping[str, Any]) -> Iterator[str]:
    window = config.get("sliding_window")
    if window and config.get("use_sliding_window", True):
        yield (
            f"its attention windows of {window} tokens are planned as full attention: KV and "
            "attention come out too large"
        )
    method = (config.get("quantization_config") or {}).get("quant_method", "fp8")
    if method not in ("fp8", "compressed-tensors"):
        yield f"its {method} weights are timed as unquantised ones, which is too slow"


def _dtype(config: Mapping[str, Any]) -> str:
    return str(config.get("torch_dtype") or config.get("dtype") or "bfloat16")


def _sizes(model: Model, element: int) -> tuple[ModelBytes, str]:
    config = model.config
    if model.folder is not None:
        tied = bool(config.get("tie_word_embeddings", False))
        try:
            num_layers = config.get("num_hidden_layers") or 0
            return read_model_bytes(model.folder, num_layers, tied), "checkpoint"
        except FileNotFoundError:
            pass  # a config.json alone
    method = (config.get("quantization_config") or {}).get("quant_method", "fp8")
    if method not in ("fp8", "compressed-tensors"):
        raise ValueError(
            f"--model-path={model.name}: {method} weights cannot be sized from a config.json; use "
            "the checkpoint's folder with its safetensors files"
        )
    return estimate_model_bytes(config, element), "configuration"


def _layer(parts: Iterable[Projection]) -> Layer:
    """Engines fuse what reads the same input."""
    by_name = {part.name.rsplit(".", 1)[1]: part for part in parts}
    first = [by_name[name] for name in ("gate_proj", "up_proj") if name in by_name]
    return Layer(
        attention=(
            _qkv(by_name["q_proj"], by_name["k_proj"], by_name["v_proj"]),
            _fused([by_name["o_proj"]]),
        ),
        mlp=(_fused(first), _fused([by_name["down_proj"]])),
    )


def _qkv(query: Projection, key: Projection, value: Projection) -> Product:
    rows = query.rows + key.rows + value.rows
    return replace(_fused([query, key, value]), kv_share=(key.rows + value.rows) / rows)


def _fused(parts: list[Projection]) -> Product:
    return Product(
        rows=sum(part.rows for part in parts),
        columns=parts[0].columns,
        weight_bytes=sum(part.stored_bytes for part in parts),
        weight_bits=max(part.weight_bits for part in parts),
    )
