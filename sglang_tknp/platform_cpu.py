"""SGLang's out-of-tree platform for any x86 or Arm CPU (entry point group sglang.srt.platforms).

Stock SGLang on a machine without an accelerator: attention by torch, gloo between ranks. Owns
two choices that a user must not have to make: which cores a rank runs on, and how much memory a
rank takes for its device.
"""

import os
from typing import Any

import psutil
import torch
from sglang.srt.platforms.cpu import CpuDeviceMixin
from sglang.srt.platforms.device_mixin import PlatformEnum
from sglang.srt.platforms.interface import PlatformCapabilities, SRTPlatform

from sglang_tknp.config import TknpConfig

GIB = 1 << 30
# The machine's other processes, the launcher and the allocators' slack stay outside the pools.
SHARE_OF_FREE_MEMORY = 0.8
MEM_FRACTION_STATIC = 0.9
# SGLang waits for a GPU's state before it dumps it: five seconds, py-spy, and up to a minute.
CRASH_DIAGNOSTICS = ("SGLANG_PYSPY_DUMP_BEFORE_CRASH", "SGLANG_CUDA_COREDUMP_BEFORE_CRASH")

THREADS_BIND = "SGLANG_CPU_OMP_THREADS_BIND"


def activate() -> str | None:
    """The platform's class path, or None where SGLang has a platform of its own."""
    from sglang_tknp.compat import cpu_platform_active

    return f"{__name__}.TknpCpuPlatform" if cpu_platform_active() else None


def core_lists(num_ranks: int, cores: list[int]) -> list[list[int]]:
    """One contiguous list of cores per rank; more ranks than cores share them."""
    if num_ranks >= len(cores):
        return [[cores[rank % len(cores)]] for rank in range(num_ranks)]
    base, extra = divmod(len(cores), num_ranks)
    lists, start = [], 0
    for rank in range(num_ranks):
        end = start + base + (rank < extra)
        lists.append(cores[start:end])
        start = end
    return lists


def parse_cores(text: str) -> list[int]:
    """Read one rank's entry of SGLANG_CPU_OMP_THREADS_BIND: "0-3,8" -> [0, 1, 2, 3, 8]."""
    cores: list[int] = []
    for part in text.split(","):
        first, _, last = part.partition("-")
        cores.extend(range(int(first), int(last or first) + 1))
    return cores


def local_ranks(args: Any) -> int:
    """Ranks that the server starts on this host."""
    return max(int(args.tp_size * args.pp_size * args.dp_size) // max(args.nnodes, 1), 1)


def bind_rank(cores: list[int] | str | None) -> None:
    """Give this rank its cores, and as many OpenMP threads as cores.

    SGLang's own binding needs its AMX build; without it every rank runs one spinning OpenMP
    thread for each core of the machine, and N ranks fight for all of them.
    """
    if not cores:
        return
    wanted = parse_cores(cores) if isinstance(cores, str) else list(cores)
    allowed = sorted(set(wanted) & os.sched_getaffinity(0))
    if allowed:
        os.sched_setaffinity(0, allowed)
        torch.set_num_threads(len(allowed))


class TknpCpuPlatform(CpuDeviceMixin, SRTPlatform):
    """One rank's view of the machine: some cores, and a stated amount of device memory."""

    _enum = PlatformEnum.OOT
    capabilities = PlatformCapabilities()
    # Bytes of the weights that this rank has loaded; set by post_load_model.
    weight_bytes = 0

    def get_device(self, device_id: int = 0) -> str:
        """A name: argument resolution takes it for --device, and CpuDeviceMixin's is an object."""
        return "cpu"

    def get_default_attention_backend(self) -> str:
        return "torch_native"

    def get_dispatch_key_name(self) -> str:
        return "native"

    def is_pin_memory_available(self, device: Any = None) -> bool:
        return False

    def get_quantization_config(self, quantization: str) -> Any:
        """FP8 that runs on any CPU; None, which is SGLang's own, for all else."""
        from sglang_tknp.fp8_cpu import CONFIGS  # here, because it imports SGLang's layers

        return CONFIGS.get(quantization)

    def apply_server_args_defaults(self, server_args: Any) -> None:
        """In the launcher, before it spawns ranks: cores and memory for each of them."""
        ranks = local_ranks(server_args)
        lists = core_lists(ranks, sorted(os.sched_getaffinity(0)))
        bind = "|".join(",".join(map(str, cores)) for cores in lists)
        os.environ.setdefault(THREADS_BIND, bind)
        os.environ.setdefault("OMP_NUM_THREADS", str(len(lists[0])))
        for diagnostic in CRASH_DIAGNOSTICS:
            os.environ.setdefault(diagnostic, "0")
        if server_args.attention_backend == "intel_amx":
            server_args.attention_backend = "torch_native"  # PyPI has no AMX build of sgl_kernel
        if server_args.mem_fraction_static is None:
            # SGLang's own rule subtracts gigabytes of GPU activations and graphs.
            server_args.mem_fraction_static = MEM_FRACTION_STATIC
        # A busy scheduler loop takes a core from the ranks that compute.
        server_args.sleep_on_idle = True
        if TknpConfig.from_env().device_memory_gb is None:
            share = psutil.virtual_memory().available * SHARE_OF_FREE_MEMORY / ranks
            os.environ["SGLANG_TKNP_DEVICE_MEMORY_GB"] = f"{share / GIB:.2f}"

    def get_device_total_memory(self, device_id: int = 0) -> int:
        memory_gb = TknpConfig.from_env().device_memory_gb
        return int(memory_gb * GIB if memory_gb else psutil.virtual_memory().total)

    def get_current_memory_usage(self, device: Any = None) -> float:
        """Weights only: SGLang asks before it allocates its KV pool, as on a GPU."""
        return float(self.weight_bytes)

    def post_load_model(self, model: torch.nn.Module) -> None:
        tensors = [*model.parameters(), *model.buffers()]
        storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
        type(self).weight_bytes = sum(storages.values())
