"""FP8 weights on the CPU platform: stored as they are, expanded anew for every product.

SGLang's own FP8 products need a GPU, or AMX and a build that PyPI does not have. SGLang asks its
platform for a method's configuration before it takes its own: these are SGLang's, with another
product. Activations are not quantised, as on SGLang's GPUs without FP8. Slow, and exact in what
it holds: all tensors stay as the checkpoint stores them.
"""

from typing import Any

import torch
from sglang.srt.layers.quantization import fp8
from sglang.srt.layers.quantization.compressed_tensors.compressed_tensors import (
    CompressedTensorsConfig,
)
from sglang.srt.layers.quantization.compressed_tensors.schemes import CompressedTensorsW8A8Fp8
from sglang.srt.layers.quantization.fp8_utils import block_quant_dequant, input_to_float8
from sglang.srt.layers.quantization.utils import convert_to_channelwise

# SGLang fills scales with this before it loads them.
NOT_LOADED = torch.finfo(torch.float32).min


def product(
    x: torch.Tensor,
    weight: torch.Tensor,
    scale: torch.Tensor,
    widths: list[int],
    block: list[int] | None,
    bias: torch.Tensor | None,
) -> torch.Tensor:
    """x [..., K] times an FP8 weight [N, K]: [..., N] of x's type.

    Args:
        scale: float32; one per block [N/n, K/k], per output channel [N, 1], or per matrix [S].
        widths: rows of each of the S matrices that are fused in `weight`; they sum to N.
        block: n and k, or None where scales are not per block.
    """
    if block is not None:
        plain = block_quant_dequant(weight, scale, block, x.dtype)
    else:
        if scale.numel() != weight.shape[0]:
            scale = convert_to_channelwise(scale, widths)
        plain = (weight.float() * scale.view(-1, 1)).to(x.dtype)
    return torch.nn.functional.linear(x, plain, bias)


def check_loaded(scale: torch.Tensor) -> None:
    """Raise ValueError if the checkpoint lacks a scale of a layer that its configuration quantises.

    SGLang's loader skips what fits no parameter, and the layer would compute garbage. One missing
    scale of several is refused too: it can be a part of a fused layer that is not quantised.
    """
    if (scale == NOT_LOADED).any():
        raise ValueError(
            "SGLang found no weight scale for a layer, or for a part of a fused one, that the "
            "checkpoint's quantization_config quantises: SGLang 0.5.23 loads no block scales for "
            "Llama and what derives from it, one scale for matrices that the checkpoint itself "
            "fuses, and does not see that compressed-tensors ignores the parts of a fused layer "
            '(write "ignore" as a regex, "re:model.layers.0..*")'
        )


class Fp8LinearMethod(fp8.Fp8LinearMethod):
    """A linear layer of quant_method "fp8", or one that --quantization fp8 quantises on load.

    SGLang chooses a layer's weight loader by the name of this class, so it keeps SGLang's.
    """

    def process_weights_after_loading(self, layer: Any) -> None:
        if self.is_checkpoint_fp8_serialized:
            check_loaded(layer.weight_scale_inv if self.block_quant else layer.weight_scale)
            return
        weight, scale = input_to_float8(layer.weight.data)
        layer.weight = torch.nn.Parameter(weight, requires_grad=False)
        layer.weight_scale = torch.nn.Parameter(scale, requires_grad=False)

    def apply(self, layer: Any, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        scale = layer.weight_scale_inv if self.block_quant else layer.weight_scale
        block = self.weight_block_size
        return product(x, layer.weight.data, scale.data, layer.logical_widths, block, bias)


class CpuFp8Config(fp8.Fp8Config):
    @classmethod
    def get_supported_act_dtypes(cls) -> list[torch.dtype]:
        return [*super().get_supported_act_dtypes(), torch.float32]

    def get_quant_method(self, layer: torch.nn.Module, prefix: str) -> Any:
        method = super().get_quant_method(layer, prefix)
        return Fp8LinearMethod(self) if isinstance(method, fp8.Fp8LinearMethod) else method


class CpuCompressedFp8(CompressedTensorsW8A8Fp8):
    """A linear layer of a compressed-tensors checkpoint."""

    def process_weights_after_loading(self, layer: Any) -> None:
        check_loaded(layer.weight_scale)

    def apply_weights(
        self, layer: Any, x: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        scale, block = layer.weight_scale.data, self.weight_block_size
        return product(x, layer.weight.data, scale, layer.logical_widths, block, bias)


class CpuCompressedTensorsConfig(CompressedTensorsConfig):
    def get_supported_act_dtypes(self) -> list[torch.dtype]:
        return [*super().get_supported_act_dtypes(), torch.float32]

    def get_linear_scheme(
        self, layer: torch.nn.Module, layer_name: str | None = None, matched_target: Any = None
    ) -> Any:
        """Raises ValueError for other kinds of compressed tensors than FP8."""
        scheme: Any = self.get_scheme_dict(layer, layer_name, matched_target)
        if scheme is None:
            return None
        weights, inputs = scheme["weights"], scheme["input_activations"]
        kind = (weights.type, weights.num_bits, weights.symmetric)
        if kind != ("float", 8, True) or weights.strategy not in ("tensor", "channel"):
            raise ValueError(
                f"{layer_name} has {weights.num_bits}-bit {weights.type} weights by "
                f"{weights.strategy}: of compressed-tensors, sglang-tknp's CPU platform serves "
                "symmetric FP8 by tensor or channel only; use a GPU"
            )
        static = inputs is not None and not inputs.dynamic
        return CpuCompressedFp8(weight_quant=weights, is_static_input_scheme=static)


CONFIGS = {"fp8": CpuFp8Config, "compressed-tensors": CpuCompressedTensorsConfig}
