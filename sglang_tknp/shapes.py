"""Model shapes that need no checkpoint: the fields of their config.json. Pure data.

For the dry run and for planning: a shape has sizes, not weights. The names are what
`--model-path` takes in their place.
"""

import copy
from collections.abc import Mapping
from typing import Any

Config = dict[str, Any]

# Hugging Face, meta-llama/Llama-3.1-405B.
_LLAMA_405B: Config = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 16384,
    "intermediate_size": 53248,
    "num_hidden_layers": 126,
    "num_attention_heads": 128,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 128256,
    "hidden_act": "silu",
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
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
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


def _kept_by_llama_fp8(num_layers: int) -> tuple[str, ...]:
    """Meta's FP8 release keeps attention everywhere, and all of the first and the last layer."""
    attention = (f"{i}.self_attn.{p}_proj" for i in range(num_layers) for p in "qkvo")
    ends = (f"{i}.mlp.{p}_proj" for i in (0, num_layers - 1) for p in ("gate", "up", "down"))
    return tuple(f"model.layers.{name}" for name in (*attention, *ends))


SHAPES: Mapping[str, Config] = {
    "llama-3.1-405b": _LLAMA_405B,
    # The paper's 454 GiB (section 3.2): "FP8 with selected parameters retained in BF16".
    "llama-3.1-405b-fp8": with_fp8(_LLAMA_405B, _kept_by_llama_fp8(126)),
    "nemotron-4-340b": _NEMOTRON_340B,
}


def shape(name: str) -> Config:
    """A copy of a built-in shape; ValueError names those that exist."""
    if name not in SHAPES:
        raise ValueError(f"no built-in shape is named {name}; use {', '.join(SHAPES)}")
    return copy.deepcopy(SHAPES[name])
