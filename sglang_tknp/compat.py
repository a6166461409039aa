"""Every hook target and private name of SGLang that this project touches, and nothing else.

Each hook says why it exists and when it may go. `install` registers, applies and verifies: the
signature a hook was written against must be the installed one, and SGLang must have patched the
target; anything else raises IncompatibleSglangError, and the caller ends the process.
"""

import importlib
import importlib.metadata
import inspect
import os
import pkgutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

SGLANG_VERSIONS = ("0.5.23",)


class IncompatibleSglangError(RuntimeError):
    """The installed SGLang is not the one that this version was written against."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Hook:
    """One target of SGLang, wrapped by one function of ours."""

    target: str  # dotted path of a function or method
    kind: str  # "before", "after" or "around", as SGLang's HookType names them
    function: str  # "module:function" of ours, imported when the hook is installed
    params: tuple[str, ...]  # the parameters that the hook was written against
    reason: str
    delete_when: str


CLI_HOOKS = (
    Hook(
        target="sglang.srt.server_args.ServerArgs.add_cli_args",
        kind="after",
        function="sglang_tknp.hooks:after_add_cli_args",
        params=("parser",),
        reason="adds the --tknp flags; SGLang has no registry for flags",
        delete_when="SGLang lets a plugin register flags",
    ),
    Hook(
        target="sglang.srt.server_args.ServerArgs.from_cli_args",
        kind="after",
        function="sglang_tknp.hooks:after_from_cli_args",
        params=("cls", "args"),
        reason="reads the --tknp flags and switches TKNP on",
        delete_when="SGLang lets a plugin register flags",
    ),
)

CPU_HOOKS = (
    Hook(
        target="sglang.srt.distributed.bootstrap._init_cpu_threads_env",
        kind="around",
        function="sglang_tknp.hooks:around_init_cpu_threads_env",
        params=("local_omp_cpuid", "dist_init_method"),
        reason="binds a rank's threads without SGLang's AMX build, whose operators PyPI lacks",
        delete_when="SGLang binds threads without sgl_kernel",
    ),
    Hook(
        target="sglang.srt.utils.common.get_available_gpu_memory",
        kind="around",
        function="sglang_tknp.hooks:around_get_available_gpu_memory",
        params=("device", "gpu_id", "distributed", "empty_cache", "cpu_group"),
        reason="on a CPU SGLang reads the machine's memory and never asks the platform",
        delete_when="the cpu branch asks current_platform",
    ),
)

LAUNCHER_HOOKS = (
    Hook(
        target="sglang.srt.entrypoints.engine.Engine._launch_scheduler_processes",
        kind="after",
        function="sglang_tknp.scheduler_ext.guard:after_launch_scheduler_processes",
        params=("cls", "server_args", "port_args", "run_scheduler_process_func"),
        reason="a killed rank must take the pool down at once and be named, at start too",
        delete_when="SGLang's watchdog names ranks and watches from the start",
    ),
    Hook(
        target="sglang.srt.utils.watchdog.SubprocessWatchdog.stop",
        kind="before",
        function="sglang_tknp.scheduler_ext.guard:before_watchdog_stop",
        params=("self",),
        reason="SGLang stops its watchdog before it ends its processes; ours must stop with it",
        delete_when="SGLang's watchdog names ranks and watches from the start",
    ),
)

_WEIGHT_UPDATES = (
    "sglang.srt.managers.scheduler_components.weight_updater.SchedulerWeightUpdaterManager."
)

POOL_HOOKS = (
    *(
        Hook(
            target=_WEIGHT_UPDATES + method,
            kind="around",
            function="sglang_tknp.scheduler_ext.info:around_weight_update",
            params=("self", "recv_req"),
            reason="an update would miss the other nodes' blocks, so it is refused",
            delete_when="TKNP loads updates block by block",
        )
        for method in (
            "update_weights_from_disk",
            "update_weights_from_ipc",
            "begin_weight_update",  # opens every other kind of update
        )
    ),
    Hook(
        target="sglang.srt.utils.common.get_available_gpu_memory",
        kind="around",
        function="sglang_tknp.hooks:around_get_available_gpu_memory",
        params=("device", "gpu_id", "distributed", "empty_cache", "cpu_group"),
        reason="a node's KV capacity is its own: the minimum is over its ranks, not the pool's",
        delete_when="SGLang sizes attention-DP pools by node",
    ),
    Hook(
        target="sglang.srt.distributed.parallel_state.GroupCoordinator.__init__",
        kind="before",
        function="sglang_tknp.hooks:before_group_coordinator_init",
        params=("self", "group_ranks", "local_rank", "torch_distributed_backend"),
        reason="SGLang's gloo groups wait two hours for a lost rank",
        delete_when="--dist-timeout reaches the gloo groups",
    ),
    Hook(
        target="sglang.srt.model_executor.model_runner.ModelRunner.load_model",
        kind="around",
        function="sglang_tknp.model_ext.stage:around_load_model",
        params=("self",),
        reason="builds and loads the node's layer block as a pipeline stage inside the node",
        delete_when="permanent",
    ),
    Hook(
        target=(
            "sglang.srt.model_executor.model_runner_components.layer_setup.resolve_layer_indices"
        ),
        kind="around",
        function="sglang_tknp.model_ext.stage:around_resolve_layer_indices",
        params=("model", "model_config", "is_draft_worker", "draft_model_idx"),
        reason="a node's KV pool holds all layers, although it computes only its block",
        delete_when="permanent",
    ),
    Hook(
        target="sglang.srt.model_executor.model_runner.ModelRunner._prepare_eager_forward_batch",
        kind="around",
        function="sglang_tknp.model_ext.step:around_prepare_eager_forward_batch",
        params=("self", "forward_batch"),
        reason="attention DP pads to equal rows; an ownership layout has exact rows",
        delete_when="permanent",
    ),
    Hook(
        target="sglang.srt.managers.scheduler.Scheduler.init_idle_sleeper",
        kind="after",
        function="sglang_tknp.scheduler_ext.idle:after_init_idle_sleeper",
        params=("self",),
        reason="an idle pool sleeps, and one node's request wakes all nodes",
        delete_when="SGLang's attention DP can sleep when idle",
    ),
    Hook(
        target="sglang.srt.managers.scheduler.Scheduler.on_idle",
        kind="before",
        function="sglang_tknp.scheduler_ext.idle:before_on_idle",
        params=("self",),
        reason="a node with waiting requests must not leave its peers asleep",
        delete_when="SGLang's attention DP can sleep when idle",
    ),
    Hook(
        target="sglang.srt.managers.scheduler.Scheduler.__init__",
        kind="around",
        function="sglang_tknp.scheduler_ext.guard:around_scheduler_init",
        params=("self", "server_args", "port_args"),
        reason="names the rank that a failure stopped at start",
        delete_when="permanent",
    ),
    Hook(
        target="sglang.srt.managers.scheduler.Scheduler.run_event_loop",
        kind="around",
        function="sglang_tknp.scheduler_ext.guard:around_run_event_loop",
        params=("self",),
        reason="arms the pool's time-outs, and names the rank that a failure stopped",
        delete_when="permanent",
    ),
    Hook(
        target=(
            "sglang.srt.managers.scheduler_components.internal_state."
            "SchedulerInternalStateController._add_topology"
        ),
        kind="after",
        function="sglang_tknp.scheduler_ext.info:after_add_topology",
        params=("self", "state"),
        reason="/server_info shows TKNP's layout",
        delete_when="SGLang lets a plugin contribute to /server_info",
    ),
    Hook(
        target="sglang.srt.managers.data_parallel_controller.DataParallelController.event_loop",
        kind="before",
        function="sglang_tknp.scheduler_ext.idle:before_controller_event_loop",
        params=("self",),
        reason="the controller busy-loops on its socket",
        delete_when="SGLang's controller blocks when idle",
    ),
)


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


def install(hooks: Sequence[Hook]) -> None:
    """Register, apply and verify hooks; those already installed are left alone."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    new = [hook for hook in hooks if hook.target not in HookRegistry._patched]
    for hook in new:
        check_signature(hook)
        HookRegistry.register(hook.target, resolve(hook.function), HookType(hook.kind))
    HookRegistry.apply_hooks()
    missing = [hook.target for hook in hooks if hook.target not in HookRegistry._patched]
    if missing:
        raise IncompatibleSglangError(f"SGLang did not apply the hooks on {', '.join(missing)}")


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
