"""Model shapes that need no checkpoint: the fields of their config.json. Pure data.

For the dry run and for planning: a shape has sizes, not weights. The names are what
`--model-path` takes in their place.
"""

import copy
from collections.abc import Mapping
from typing import Any

Config = dict[str, Any]

# What a family's models share.
_LLAMA: Config = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 128256,
    "rms_norm_eps": 1e-05,
    "max_position_embeddings": 131072,
    "rope_theta": 500000.0,
    "rope_scaling": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
}
_QWEN2: Config = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "vocab_size": 152064,
    "rms_norm_eps": 1e-06,
    "max_position_embeddings": 32768,
    "rope_theta": 1000000.0,
    "use_sliding_window": False,
}
_QWEN3: Config = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": 151936,
    "rms_norm_eps": 1e-06,
    "max_position_embeddings": 40960,
    "rope_theta": 1000000.0,
    "attention_bias": False,
    "use_sliding_window": False,
}
_MISTRAL: Config = {
    "architectures": ["MistralForCausalLM"],
    "model_type": "mistral",
    "vocab_size": 32768,
    "rms_norm_eps": 1e-05,
    "max_position_embeddings": 32768,
    "rope_theta": 1000000.0,
    "sliding_window": None,  # left out, it would be 4096
}


def _sized(
    family: Config, hidden: int, inner: int, layers: int, heads: int, **others: object
) -> Config:
    """A gated decoder with 8 KV heads of 128 and an untied head, but for what `others` says."""
    return {
        **family,
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        **others,
    }


# The model's report (arXiv:2402.16819, table 1), in the fields of transformers' NemotronConfig.
_NEMOTRON_340B: Config = {
    "architectures": ["NemotronForCausalLM"],
    "model_type": "nemotron",
    "hidden_size": 18432,
    "intermediate_size": 73728,
    "num_hidden_layers": 96,
    "num_attention_heads": 96,
    "num_key_value_heads": 8,
    "head_dim": 192,
    "vocab_size": 256000,
    "hidden_act": "relu2",
    "norm_eps": 1e-05,
    "max_position_embeddings": 4096,
    "partial_rotary_factor": 0.5,
    "rope_theta": 10000.0,
    "attention_bias": False,
    "mlp_bias": False,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}


def with_fp8(config: Mapping[str, Any], keep: tuple[str, ...] = ()) -> Config:
    """The shape as a checkpoint in FP8: one byte for each weight of the layers' projections.

    A scale per tensor; embedding, norms and head stay in the model's dtype, and so do the
    projections that `keep` names ("model.layers.0.mlp.up_proj").
    """
    quantization: Config = {"quant_method": "fp8", "activation_scheme": "dynamic"}
    if keep:
        quantization["modules_to_not_convert"] = list(keep)
    return {**copy.deepcopy(dict(config)), "quantization_config": quantization}


def _with_llama_fp8(config: Mapping[str, Any]) -> Config:
    """Meta's recipe: attention stays in BF16 everywhere, the MLP in the first and last layer."""
    count = config["num_hidden_layers"]
    attention = (f"{i}.self_attn.{p}_proj" for i in range(count) for p in "qkvo")
    ends = (f"{i}.mlp.{p}_proj" for i in (0, count - 1) for p in ("gate", "up", "down"))
    return with_fp8(config, tuple(f"model.layers.{name}" for name in (*attention, *ends)))


_LLAMA_70B = _sized(_LLAMA, 8192, 28672, 80, 64)
_LLAMA_405B = _sized(_LLAMA, 16384, 53248, 126, 128)
_NEMO = {"vocab_size": 131072, "max_position_embeddings": 131072}
_SMALL = {"vocab_size": 131072, "rope_theta": 100000000.0}

# Hugging Face: meta-llama/Llama-3.1-*, Qwen/Qwen2.5-*-Instruct, Qwen/Qwen3-*, and mistralai's
# 7B-v0.3, Nemo-2407, Small-24B-2501 and Large-2407.
SHAPES: Mapping[str, Config] = {
    "llama-3.1-405b": _LLAMA_405B,
    # The paper's 454 GiB (section 3.2): "FP8 with selected parameters retained in BF16".
    "llama-3.1-405b-fp8": _with_llama_fp8(_LLAMA_405B),
    "llama-3.1-70b": _LLAMA_70B,
    # Meta published the recipe for 405B only.
    "llama-3.1-70b-fp8": _with_llama_fp8(_LLAMA_70B),
    "llama-3.1-8b": _sized(_LLAMA, 4096, 14336, 32, 32),
    "nemotron-4-340b": _NEMOTRON_340B,
    # Assumed: the paper says no more of Nemotron's weights than of Llama's.
    "nemotron-4-340b-fp8": _with_llama_fp8(_NEMOTRON_340B),
    "qwen2.5-7b": _sized(_QWEN2, 3584, 18944, 28, 28, num_key_value_heads=4),
    "qwen2.5-14b": _sized(_QWEN2, 5120, 13824, 48, 40),
    "qwen2.5-32b": _sized(_QWEN2, 5120, 27648, 64, 40),
    "qwen2.5-72b": _sized(_QWEN2, 8192, 29568, 80, 64),
    "qwen3-8b": _sized(_QWEN3, 4096, 12288, 36, 32),
    "qwen3-14b": _sized(_QWEN3, 5120, 17408, 40, 40),
    "qwen3-32b": _sized(_QWEN3, 5120, 25600, 64, 64),
    "mistral-7b": _sized(_MISTRAL, 4096, 14336, 32, 32),
    "mistral-nemo-12b": _sized(_MISTRAL, 5120, 14336, 40, 32, **_NEMO),
    "mistral-small-24b": _sized(_MISTRAL, 5120, 32768, 40, 32, **_SMALL),
    "mistral-large-123b": _sized(_MISTRAL, 12288, 28672, 88, 96, max_position_embeddings=131072),
}


def shape(name: str) -> Config:
    """A copy of a built-in shape; ValueError names those that exist."""
    if name not in SHAPES:
        raise ValueError(f"no built-in shape is named {name}; use {', '.join(SHAPES)}")
    return copy.deepcopy(SHAPES[name])
