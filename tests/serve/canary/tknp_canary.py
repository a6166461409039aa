"""A test's own SGLang plugin: KV slots that no request owns hold NaN.

The whole pool is poisoned when it is allocated, and slots again when they are freed. An attention
that reads a slot of another request, or a stale one, then spreads NaN into the tokens.
"""

import os
import sys


def load() -> None:
    if "sglang.srt.managers.scheduler" not in sys.modules:
        return
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    target = "sglang.srt.model_executor.model_runner.ModelRunner.alloc_memory_pool"
    HookRegistry.register(target, after_alloc_memory_pool, HookType.AFTER)


def after_alloc_memory_pool(result, runner, *args, **kwargs):
    pool, allocator = runner.token_to_kv_pool, runner.token_to_kv_pool_allocator
    buffers = [*pool.k_buffer, *pool.v_buffer]
    for buffer in buffers:
        buffer.fill_(float("nan"))
    free, freed = allocator.free, 0

    def poison_and_free(indices):
        nonlocal freed
        for buffer in buffers:
            buffer[indices] = float("nan")
        freed += int(indices.numel())
        # So that a test sees that the canary lived in this process.
        path = os.environ["TKNP_CANARY_LOG"] + f".{runner.gpu_id}"
        # Whole or not at all: the test may read it while the last request's slots are freed.
        with open(path + "~", "w") as out:
            out.write(f"{len(buffers)} {freed}")
        os.replace(path + "~", path)
        return free(indices)

    allocator.free = poison_and_free
