"""Hooks that belong to no extension: flags, CPU threads, memory queries and group time-outs."""

import argparse
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from sglang_tknp import config
from sglang_tknp.plugin import activate_launcher, fail_closed

# Nodes load their blocks at different speeds, and SGLang's groups wait for the slowest at start.
# Once the pool runs, guard.py lowers every group to --tknp-exchange-timeout.
START_TIMEOUT = timedelta(minutes=30)


def after_add_cli_args(result: Any, parser: argparse.ArgumentParser) -> None:
    """Target: ServerArgs.add_cli_args, in the launcher."""
    config.add_cli_args(parser)


def after_from_cli_args(result: Any, cls: type, args: argparse.Namespace) -> None:
    """Target: ServerArgs.from_cli_args, in the launcher, before arguments are resolved."""
    fail_closed(_apply_flags, args)


def _apply_flags(args: argparse.Namespace) -> None:
    settings = config.from_cli_args(args)
    settings.to_env()
    if settings.enable:
        activate_launcher()
        from sglang_tknp import resolution

        resolution.exit_on_refusal = True


def around_init_cpu_threads_env(original: Callable[..., None], **kwargs: Any) -> None:
    """Target: bootstrap._init_cpu_threads_env, in each rank before its process groups exist."""
    import torch

    if hasattr(torch.ops.sgl_kernel, "init_cpu_threads_env"):
        original(**kwargs)
        return
    from sglang_tknp.platform_cpu import bind_rank

    bind_rank(kwargs["local_omp_cpuid"])


def around_get_available_gpu_memory(
    original: Callable[..., float],
    device: str,
    gpu_id: int,
    distributed: bool = False,
    empty_cache: bool = True,
    cpu_group: Any = None,
) -> float:
    """Target: get_available_gpu_memory, wherever SGLang sizes memory. Returns GiB."""
    from sglang.srt.platforms import current_platform
    from sglang.srt.runtime_context import get_parallel

    if distributed and config.TknpConfig.from_env().enable:
        node_group = get_parallel().attn_tp_group
        distributed, cpu_group = node_group.world_size > 1, node_group.cpu_group
    if device != "cpu" or not current_platform.is_out_of_tree():
        return original(device, gpu_id, distributed, empty_cache, cpu_group)
    free = float(current_platform.get_device_total_memory())
    free -= float(current_platform.get_current_memory_usage())
    if distributed:
        import torch

        smallest = torch.tensor(free, dtype=torch.float64)
        torch.distributed.all_reduce(
            smallest, op=torch.distributed.ReduceOp.MIN, group=cpu_group
        )  # reached by the ranks of one node
        free = smallest.item()
    return free / (1 << 30)


def before_group_coordinator_init(
    *args: Any, **kwargs: Any
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Target: GroupCoordinator.__init__, in each rank."""
    kwargs.setdefault("gloo_timeout", START_TIMEOUT)
    return args, kwargs
