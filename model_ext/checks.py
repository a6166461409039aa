"""Which models TKNP serves: dense decoders with one attention per layer, else a clear refusal."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any


def one_attention_per_layer(
    model_name: str, attention: Mapping[int, Sequence[Any]], num_layers: int
) -> None:
    """Raise ValueError unless layers 0..L-1 have exactly one RadixAttention each."""
    wrong = [layer for layer in range(num_layers) if len(attention.get(layer, ())) != 1]
    extra = sorted(set(attention) - set(range(num_layers)))
    if wrong or extra:
        raise ValueError(
            f"{model_name} is not served with --enable-tknp: TKNP needs exactly one attention per "
            f"layer, and layers {(wrong + extra)[:8]} of {num_layers} have another number; serve "
            "it without --enable-tknp"
        )


def dense(model_name: str, model: Any) -> None:
    """Raise ValueError if the model holds a mixture of experts."""
    experts = next((n for n, m in model.named_modules() if type(m).__name__.endswith("MoE")), None)
    if experts is not None:
        raise ValueError(
            f"{model_name} is not served with --enable-tknp: {experts} is a mixture of experts, "
            "and TKNP is for dense models; use SGLang's expert parallelism"
        )


def refusal(model_config: Any, architectures: Iterable[str]) -> str | None:
    """Why TKNP refuses a model, by its configuration alone; None if it may serve it."""
    hf_config = model_config.hf_text_config
    name = ", ".join(architectures) or type(hf_config).__name__
    reasons = (
        (_has_experts(hf_config), "a mixture of experts"),
        (_kind(model_config) == "MLA", "multi-head latent attention (MLA)"),
        (_has_state(hf_config), "state-space or linear attention layers"),
        (model_config.is_encoder_decoder, "an encoder-decoder"),
        (not model_config.is_generation, "an embedding or reward model"),
        (model_config.is_multimodal, "multimodal"),
    )
    reason = next((text for refused, text in reasons if refused), None)
    if reason is None:
        return None
    return (
        f"--enable-tknp does not serve {name}: it is {reason}, and TKNP is for dense text "
        "decoders; serve it without --enable-tknp"
    )


def _kind(model_config: Any) -> str:
    return str(getattr(model_config.attention_arch, "name", model_config.attention_arch))


def _has_experts(hf_config: Any) -> bool:
    names = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
    return any((getattr(hf_config, name, None) or 0) > 1 for name in names)


def _has_state(hf_config: Any) -> bool:
    names = ("ssm_state_size", "mamba_d_state", "state_size", "linear_num_key_heads", "mamba_d_ssm")
    kinds = getattr(hf_config, "layer_types", None) or ()
    return any(getattr(hf_config, name, None) for name in names) or any(
        "linear" in kind or "mamba" in kind or "recurrent" in kind for kind in kinds
    )
