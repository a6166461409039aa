"""Every private name of SGLang that this project touches; its hook targets are in hook_table.

`install` registers, applies and verifies hooks: the signature a hook was written against must be
the installed one, and SGLang must have patched the target with our hook; anything else raises
IncompatibleSglangError, and the caller ends the process.
"""

import contextlib
import importlib
import importlib.metadata
import inspect
import os
import pkgutil
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from sglang_tknp.hook_table import CLI_HOOKS, CPU_HOOKS, LAUNCHER_HOOKS, POOL_HOOKS, Hook

__all__ = ["CLI_HOOKS", "CPU_HOOKS", "LAUNCHER_HOOKS", "POOL_HOOKS", "Hook"]

SGLANG_VERSIONS = ("0.5.23",)


class IncompatibleSglangError(RuntimeError):
    """The installed SGLang is not the one that this version was written against."""


def check_versions() -> None:
    """Raise IncompatibleSglangError unless the installed SGLang is a supported one."""
    found = importlib.metadata.version("sglang")
    if found.split("+")[0] not in SGLANG_VERSIONS:
        raise IncompatibleSglangError(
            f"sglang {found} is installed; this sglang-tknp supports {', '.join(SGLANG_VERSIONS)}: "
            f"pip install sglang=={SGLANG_VERSIONS[-1]}"
        )


def cpu_platform_active() -> bool:
    """Whether the CPU platform is ours: no accelerator, and SGLang's CPU engine not asked for."""
    import torch

    if os.environ.get("SGLANG_USE_CPU_ENGINE") == "1":
        return False
    accelerators = (torch.cuda, torch.xpu, torch.mps, getattr(torch, "npu", None))
    return not any(a is not None and a.is_available() for a in accelerators)


def resolve(name: str) -> Any:
    """Import `module:attribute` of ours."""
    module, _, attribute = name.partition(":")
    return getattr(importlib.import_module(module), attribute)


def check_signature(hook: Hook) -> None:
    """Raise IncompatibleSglangError unless the target exists with the parameters we know."""
    owner_path, _, attribute = hook.target.rpartition(".")
    try:
        owner = pkgutil.resolve_name(owner_path)
        target = inspect.getattr_static(owner, attribute)
    except (ImportError, AttributeError) as error:
        raise IncompatibleSglangError(f"{hook.target} is gone ({error})") from error
    function = inspect.unwrap(getattr(target, "__func__", target))
    found = tuple(inspect.signature(function).parameters)
    if found[: len(hook.params)] != hook.params:
        raise IncompatibleSglangError(
            f"{hook.target} takes {found}, expected it to start with {hook.params}"
        )


_installed: set[tuple[str, str]] = set()  # (target, function) of this process


def install(hooks: Sequence[Hook]) -> None:
    """Register, apply and verify hooks; those already installed are left alone."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    new = [hook for hook in hooks if (hook.target, hook.function) not in _installed]
    for hook in new:
        if hook.target in HookRegistry._patched:
            raise IncompatibleSglangError(
                f"another plugin has hooked {hook.target} already, and SGLang would drop ours; "
                "leave that plugin out with SGLANG_PLUGINS"
            )
        check_signature(hook)
        HookRegistry.register(hook.target, resolve(hook.function), HookType(hook.kind))
    HookRegistry.apply_hooks()
    missing = [hook.target for hook in hooks if hook.target not in HookRegistry._patched]
    if missing:
        raise IncompatibleSglangError(f"SGLang did not apply the hooks on {', '.join(missing)}")
    _installed.update((hook.target, hook.function) for hook in new)


_resolution_hooks_installed = False


def install_resolution_hooks() -> None:
    """Put TKNP's checks and defaults into SGLang's argument resolution, once in a process."""
    global _resolution_hooks_installed
    if _resolution_hooks_installed:
        return
    _resolution_hooks_installed = True
    from sglang_tknp import resolution

    register_resolution_hooks(resolution.STEPS)


def register_resolution_hooks(steps: dict[str, Callable[..., None]]) -> None:
    """Register `fn(server_args, previous)` for named steps; SGLang raises on an unknown step."""
    from sglang.srt.arg_groups.resolution_hooks import register_resolution_hook

    for name, step in steps.items():
        register_resolution_hook(name)(step)


# Private names of SGLang. Each function is the only place that knows its name.


def parallel() -> Any:
    """SGLang's parallel configuration of this process."""
    from sglang.srt.runtime_context import get_parallel

    return get_parallel()


def parallel_override(**values: Any) -> Any:
    """Context manager: other values in SGLang's parallel configuration."""
    return parallel().override(**values)


def node_scope(group: Any) -> Any:
    """Context manager: `group` is SGLang's whole tensor-parallel group, attention included."""
    from sglang.srt.distributed.parallel_state import patch_tensor_parallel_group

    return patch_tensor_parallel_group(group, owns_attention=True)


class SingleMemberGroup:
    """Looks like the pipeline group of a model with one stage."""

    rank_in_group = 0
    world_size = 1
    is_first_rank = True
    is_last_rank = True


class PlannedGroup:
    """Looks like a group of ranks to code that only builds; it has no way to communicate."""

    cpu_group = None
    device_group = None

    def __init__(self, rank: int, size: int) -> None:
        self.rank_in_group = rank
        self.world_size = size
        self.is_first_rank = rank == 0
        self.is_last_rank = rank == size - 1


@contextlib.contextmanager
def planning_context(server_args: Any) -> Iterator[None]:
    """In it this process is rank 0 of the pool of `server_args`, without any other process.

    The arguments are resolved, and SGLang's former configuration is back afterwards.
    """
    from sglang.srt.runtime_context import SpawnRanks, create_context, use_context

    context = create_context(server_args, role="scheduler", ranks=SpawnRanks(world_rank=0))
    with use_context(context), parallel_override(moe_tp_group=PlannedGroup(0, server_args.tp_size)):
        yield


def planned_server_args(**values: Any) -> Any:
    """SGLang's arguments of a server that is only planned: dummy weights, no tokenizer."""
    from sglang.srt.server_args import ServerArgs

    return ServerArgs(load_format="dummy", skip_tokenizer_init=True, **values)


def model_and_load_config(server_args: Any) -> tuple[Any, Any]:
    """SGLang's ModelConfig and LoadConfig of resolved arguments, for the model loader."""
    from sglang.srt.configs.load_config import LoadConfig
    from sglang.srt.configs.model_config import ModelConfig

    return ModelConfig.from_server_args(server_args), LoadConfig(load_format="dummy")


def make_group(rank_lists: Sequence[Sequence[int]], name: str) -> Any:
    """One GroupCoordinator per list; returns this rank's. Reached by all ranks, in one order."""
    from sglang.srt.distributed import parallel_state

    world = parallel_state.get_world_group()
    return parallel_state.init_model_parallel_group(
        [list(ranks) for ranks in rank_lists],
        world.local_rank,
        torch_backend(world),
        use_custom_allreduce=False,
        group_name=name,
    )


def torch_backend(group: Any) -> str:
    import torch

    return str(torch.distributed.get_backend(group.device_group))


def nccl_communicator(group: Any) -> Any:
    """A GroupCoordinator's PyNccl communicator, which can be captured; None with one member."""
    if group.world_size > 1 and group.pynccl_comm is None:
        raise RuntimeError(
            f"SGLang made no PyNccl communicator for the group {group.unique_name}, and TKNP's "
            "exchange on CUDA needs it"
        )
    return group.pynccl_comm


def initialize_model(model_config: Any, load_config: Any) -> Any:
    """SGLang's model class built from its configuration, on the current default device."""
    import torch
    from sglang.srt.model_loader import loader

    quant_config = loader._get_quantization_config(model_config, load_config)
    dtype = torch.get_default_dtype()
    torch.set_default_dtype(model_config.dtype)
    try:
        return loader._initialize_model(model_config, load_config, quant_config)
    finally:
        torch.set_default_dtype(dtype)


def missing_layer() -> Any:
    from sglang.srt.layers.utils import PPMissingLayer

    return PPMissingLayer()


def make_head(vocab_size: int, hidden_size: int, model_config: Any) -> Any:
    """An unquantised vocabulary-parallel head in the current scope and on the current device."""
    from sglang.srt.layers.vocab_parallel_embedding import ParallelLMHead

    return ParallelLMHead(vocab_size, hidden_size, params_dtype=model_config.dtype)


def record_loaded_model(model: Any) -> None:
    """Tell the platform again what is loaded: a head may have come or gone after its hook."""
    from sglang.srt.platforms import current_platform

    current_platform.post_load_model(model)


def handoff_tensors(hidden: Any, residual: Any) -> Any:
    """SGLang's pipeline handoff: hidden states and residual, each [R, D]."""
    from sglang.srt.model_executor.forward_batch_info import PPProxyTensors

    return PPProxyTensors({"hidden_states": hidden, "residual": residual})


def is_decode_step(forward_batch: Any) -> bool:
    """Whether no node extends in this step. Known to all ranks alike, from the step's sync."""
    return not forward_batch.is_extend_in_batch


def dense_forward_mode(forward_batch: Any) -> Any:
    """The forward mode of the full batch, whatever this node's own requests do."""
    from sglang.srt.model_executor.forward_batch_info import ForwardMode

    return ForwardMode.DECODE if is_decode_step(forward_batch) else ForwardMode.EXTEND


def host_address() -> str:
    """This host's address as SGLang sees it (SGLANG_HOST_IP, or found)."""
    from sglang.srt.utils.network import get_local_ip_auto

    return str(get_local_ip_auto())


def set_group_timeouts(seconds: float) -> None:
    """Lower the time-out of every process group of this rank."""
    from datetime import timedelta

    import torch
    from torch.distributed import distributed_c10d

    for group in list(distributed_c10d._world.pg_map):
        torch.distributed.set_timeout(timedelta(seconds=seconds), group)


def resolving(server_args: Any) -> Any:
    """The arguments with all decisions made so far."""
    from sglang.srt.arg_groups.overrides import resolving_view

    return resolving_view(server_args)


def declare(server_args: Any, **values: Any) -> None:
    """Decide arguments during resolution."""
    from sglang.srt.arg_groups.overrides import declare_resolution

    declare_resolution(server_args, "sglang-tknp", **values)


def graph_backends(server_args: Any) -> tuple[str, str]:
    """(decode, prefill) graph backends: "full", "breakable" or "disabled"."""
    config = resolving(server_args).cuda_graph_config
    return config.decode.backend, config.prefill.backend


def model_config(server_args: Any) -> Any:
    """SGLang's ModelConfig of arguments under resolution."""
    from sglang.srt.arg_groups.model_override_base import model_config_of

    return model_config_of(server_args)


def kill_process_tree(pid: int) -> None:
    """SIGKILL a process and all of its descendants."""
    from sglang.srt.utils import kill_process_tree as kill

    kill(pid)


def refused_update(request: Any, message: str) -> Any:
    """SGLang's reply to a weight update request, without success."""
    from sglang.srt.managers import io_struct

    reply = getattr(io_struct, type(request).__name__.replace("Input", "Output"))
    return reply(success=False, message=message)


def metrics_enabled() -> bool:
    from sglang.srt.runtime_context import get_observability

    return bool(get_observability().enable_metrics)


def prepare_slots_without_graphs(model_runner: Any) -> None:
    """What SGLang's decode graph runner needs where graphs are off (--tknp-force-slots)."""
    from sglang.srt.model_executor.graph_shared_output import GraphSharedOutput

    if model_runner.graph_shared_output is None:
        rows = model_runner.max_decode_logits_rows()
        device = model_runner.device
        model_runner.graph_shared_output = GraphSharedOutput(device=device, max_rows=rows)
    backend = model_runner.attn_backend
    if type(backend).__name__ == "TorchNativeAttnBackend":
        # It plans nothing and reads the batch itself, so there is nothing to capture.
        backend.get_cuda_graph_seq_len_fill_value = lambda: 1
        backend.init_cuda_graph_state = lambda max_bs, max_num_tokens: None


def with_decode_runner(captured: Any, runner: Any) -> Any:
    """SGLang's result of its graph captures, with another decode runner."""
    from msgspec.structs import replace

    return replace(captured, decode=replace(captured.decode, runner=runner))
