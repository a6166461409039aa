"""What two ranks of a pool load of FP8 checkpoints: run by test_fp8_loading on real processes."""

import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from safetensors.torch import load_file

from tests.tiny_fp8 import BLOCK

NUM_NODES = 2
Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True, kw_only=True)
class Case:
    """A checkpoint, and the arguments that it is loaded with."""

    folder: Path
    arguments: dict[str, Any] = field(default_factory=dict)


def load_all(rank: int, world_size: int, cases: dict[str, Case]) -> dict[str, Any]:
    """Load every case as rank `rank` of NUM_NODES nodes of one rank; reached by all ranks."""
    os.environ.update(SGLANG_TKNP_ENABLE="1", SGLANG_CPU_OMP_THREADS_BIND="0|0")
    import sglang.srt.managers.scheduler  # noqa: F401  the plugin hooks what has been imported
    from sglang.srt.plugins import load_plugins

    load_plugins()
    found = {}
    for number, (name, case) in enumerate(cases.items()):
        stage = load(case, rank, first=number == 0)
        found[name] = describe(stage)
        if case.folder.joinpath("model.safetensors").exists() and not case.arguments:
            found[name]["error"] = largest_error(stage, case.folder)
    return found


def load(case: Case, rank: int, first: bool) -> Any:
    """The Stage that TKNP's hook on ModelRunner.load_model makes."""
    from sglang.srt.configs.device_config import DeviceConfig
    from sglang.srt.configs.load_config import LoadConfig
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.distributed import bootstrap
    from sglang.srt.model_loader import get_model
    from sglang.srt.runtime_context import SpawnRanks, publish
    from sglang.srt.server_args import ServerArgs

    from sglang_tknp.model_ext import stage

    settings: dict[str, Any] = {"tp_size": NUM_NODES, "attn_dp_size": NUM_NODES}
    settings.update(dtype="float32", skip_tokenizer_init=True, **case.arguments)
    args = ServerArgs(model_path=str(case.folder), **settings)
    args.resolve_once()
    publish(args, role="scheduler", ranks=SpawnRanks(world_rank=rank, gpu_id=rank))
    if first:
        bootstrap.init_parallel_runtime(server_args=args, device="cpu", dist_port=0)
    config = ModelConfig.from_server_args(args)
    runner: Any = SimpleNamespace(
        model_config=config, load_config=LoadConfig(load_format=args.load_format)
    )

    def load_model(runner: Any) -> None:
        runner.model = get_model(
            model_config=config, load_config=runner.load_config, device_config=DeviceConfig("cpu")
        )

    stage.around_load_model(load_model, runner)
    return stage.current_stage()


def describe(stage: Any) -> dict[str, Any]:
    own = dict(stage.model.named_parameters())
    whole = list(stage.whole_model.parameters())
    return {
        "blocks": stage.placement.blocks,
        "placed": stage.placement.node_bytes[stage.node],
        "one_copy": stage.model_bytes.one_copy,
        "largest_layer": max(stage.model_bytes.layers),
        "held": sum(p.numel() * p.element_size() for p in own.values()),
        "has_head": any(name.startswith("lm_head") for name in own),
        "fp8": sum(p.dtype is torch.float8_e4m3fn for p in own.values()),
        "fp8_of_whole": sum(p.dtype is torch.float8_e4m3fn for p in whole),
        "whole_is_meta": {p.device.type for p in whole} == {"meta"},
        "kv_scales": [(a.k_scale_float, a.v_scale_float) for a in stage.attention],
        "kv_tensors": [[tensor_value(a.k_scale), tensor_value(a.v_scale)] for a in stage.attention],
    }


def tensor_value(scale: Any) -> Any:
    return scale.item() if torch.is_tensor(scale) else scale


def largest_error(stage: Any, folder: Path) -> float:
    """Of this block's products on random rows, against the stored matrices, relative."""
    stored = load_file(folder / "model.safetensors")
    worst = 0.0
    for layer in stage.placement.block(stage.node):
        for module, names in parts_of(stage.model.model.layers[layer]):
            prefix = f"model.layers.{layer}.{names[0].split('.')[0]}"
            weight = torch.cat([plain(stored, f"model.layers.{layer}.{n}") for n in names])
            x = torch.randn(3, weight.shape[1])
            expected = x @ weight.T
            with torch.no_grad(), stage.scope():
                got = module(x)[0]
            assert got.shape == expected.shape, prefix
            worst = max(worst, ((got - expected).abs().max() / expected.abs().max()).item())
    return worst


def parts_of(layer: Any) -> Iterator[tuple[Any, list[str]]]:
    yield layer.self_attn.qkv_proj, [f"self_attn.{which}_proj" for which in "qkv"]
    yield layer.self_attn.o_proj, ["self_attn.o_proj"]
    yield layer.mlp.gate_up_proj, ["mlp.gate_proj", "mlp.up_proj"]
    yield layer.mlp.down_proj, ["mlp.down_proj"]


def plain(stored: Tensors, name: str) -> torch.Tensor:
    """The matrix [N, K] that a stored one stands for."""
    weight = stored[f"{name}.weight"].float()
    if f"{name}.weight_scale_inv" in stored:
        scale = stored[f"{name}.weight_scale_inv"]
        return weight * torch.kron(scale, torch.ones(BLOCK))
    scale = stored.get(f"{name}.weight_scale", torch.tensor(1.0))
    return weight * scale
