"""Proves what the CPU platform's FP8 products compute, and what they refuse."""

import re
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytestmark = [pytest.mark.upstream, pytest.mark.filterwarnings("ignore")]


@pytest.fixture(scope="module")
def fp8_cpu() -> Any:
    from sglang_tknp import fp8_cpu

    return fp8_cpu


def stored(rows: int, columns: int) -> torch.Tensor:
    torch.manual_seed(rows)
    return torch.randn(rows, columns).to(torch.float8_e4m3fn)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_scales_of_fused_matrices(fp8_cpu: Any, dtype: torch.dtype) -> None:
    """[3, 4] rows times matrices of 2 and 6 rows with scales 0.5 and 2, plus a bias."""
    weight, x, bias = stored(8, 4), torch.randn(3, 4).to(dtype), torch.randn(8).to(dtype)
    plain = torch.cat((weight[:2].float() * 0.5, weight[2:].float() * 2)).to(dtype)
    found = fp8_cpu.product(x, weight, torch.tensor([0.5, 2.0]), [2, 6], None, bias)
    assert found.dtype is dtype
    assert torch.equal(found, torch.nn.functional.linear(x, plain, bias))


def test_one_scale_of_a_matrix_quantised_on_load(fp8_cpu: Any) -> None:
    weight, x = stored(6, 4), torch.randn(2, 4)
    found = fp8_cpu.product(x, weight, torch.tensor(0.25), [2, 4], None, None)
    assert torch.equal(found, x @ (weight.float() * 0.25).T)


def test_blocks_that_do_not_fill_the_matrix(fp8_cpu: Any) -> None:
    weight, x, scale = stored(3, 5), torch.randn(2, 5), torch.rand(2, 3)
    full = torch.kron(scale, torch.ones(2, 2))[:3, :5]
    found = fp8_cpu.product(x, weight, scale, [3], [2, 2], None)
    assert torch.equal(found, x @ (weight.float() * full).T)


def test_a_scale_that_was_not_loaded_is_refused(fp8_cpu: Any) -> None:
    """Of any part: the K of a fused layer may be left out, and its plain weights loaded as FP8."""
    fp8_cpu.check_loaded(torch.tensor([0.5, 0.25]))
    none = torch.full((4, 1), fp8_cpu.NOT_LOADED)
    one = torch.tensor([0.5, fp8_cpu.NOT_LOADED, 0.25])
    for scale in (none, one, one.view(3, 1), torch.stack([one, one])):
        with pytest.raises(ValueError, match="SGLang found no weight scale for a layer"):
            fp8_cpu.check_loaded(scale)


def test_other_compressed_tensors_are_refused(fp8_cpu: Any) -> None:
    weights = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel"}
    group = {"targets": ["Linear"], "weights": weights, "input_activations": None}
    config = fp8_cpu.CpuCompressedTensorsConfig.from_config(
        {"format": "int-quantized", "config_groups": {"group_0": group}}
    )
    message = "model.layers.0.o_proj has 8-bit int weights by channel: of compressed-tensors"
    with pytest.raises(ValueError, match=re.escape(message)):
        config.get_linear_scheme(torch.nn.Linear(2, 2), "model.layers.0.o_proj")


def test_the_platform_names_them_and_leaves_the_rest_to_sglang(fp8_cpu: Any) -> None:
    from sglang_tknp.platform_cpu import TknpCpuPlatform

    platform: Any = SimpleNamespace()
    named = {
        name: TknpCpuPlatform.get_quantization_config(platform, name)
        for name in ("fp8", "compressed-tensors", "awq")
    }
    assert named == {**fp8_cpu.CONFIGS, "awq": None}


def test_the_weight_loader_that_sglang_chooses_by_name(fp8_cpu: Any) -> None:
    from sglang.srt.layers.linear import WEIGHT_LOADER_V2_SUPPORTED

    assert fp8_cpu.Fp8LinearMethod.__name__ in WEIGHT_LOADER_V2_SUPPORTED
