"""The comparison's own SGLang plugin: two things that only a machine of few CPU cores needs.

Dense products: torch's float32 product on a CPU is bound by arithmetic from a few rows on, and
slower for two rows than for four; dense work on a GPU is bound by reading weights. With "medium"
torch rounds the operands to bfloat16 inside the product, and a CPU reads weights at full speed up
to some 8 rows. The same in every system. Attention stays as it is: torch's is slower with it.

DP's controller: SGLang's asks its socket without pause and so takes half a core from the ranks,
here a quarter of all. It waits instead, to DP's advantage; TKNP's own controller waits anyway.
"""

import os
import sys

LINEAR = "sglang.srt.layers.quantization.unquant.UnquantizedLinearMethod.apply"
CONTROLLER = "sglang.srt.managers.data_parallel_controller"
POLL_MS = 1000


def load():
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    if "sglang.srt.managers.scheduler" in sys.modules and matmul() != "highest":
        HookRegistry.register(LINEAR, around_linear, HookType.AROUND)
    if CONTROLLER in sys.modules and "TKNP_COMPARE_STOCK_DP" in os.environ:
        target = f"{CONTROLLER}.DataParallelController.event_loop"
        HookRegistry.register(target, before_event_loop, HookType.BEFORE)


def matmul():
    return os.environ.get("TKNP_COMPARE_MATMUL", "highest")


def around_linear(original, *args, **kwargs):
    import torch

    torch.set_float32_matmul_precision(matmul())
    try:
        return original(*args, **kwargs)
    finally:
        torch.set_float32_matmul_precision("highest")


class WaitingWatchdog:
    """The loop feeds its watchdog before it asks its socket: wait for a message there."""

    def __init__(self, watchdog, socket):
        self.watchdog, self.socket = watchdog, socket

    def feed(self):
        self.socket.poll(POLL_MS)
        self.watchdog.feed()


def before_event_loop(controller):
    controller.soft_watchdog = WaitingWatchdog(
        controller.soft_watchdog, controller.recv_from_tokenizer
    )
