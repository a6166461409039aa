"""The bench's own SGLang plugin: where the time of a decode step goes, in every rank.

Each section's time is its own, without the sections inside it, so that they add up to the time
from one step's end to the next one's. One JSON line per decode step goes to the file that
TKNP_STEP_PROFILE names, with the rank's number appended.
"""

import json
import os
import sys
import time
from pathlib import Path

from sections import Sections


def load():
    if "sglang.srt.managers.scheduler" not in sys.modules or "TKNP_STEP_PROFILE" not in os.environ:
        return
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    target = "sglang.srt.managers.scheduler.Scheduler.init_overlap"
    HookRegistry.register(target, after_init_overlap, HookType.AFTER)


def after_init_overlap(result, scheduler, *args, **kwargs):
    """All is loaded, and the event loop has not begun."""
    from sglang_tknp.model_ext import attention
    from sglang_tknp.model_ext.stage import current_stage

    step, clock = current_stage().step, Sections()
    last_end = None
    exchange = step.exchange
    attention.attend = clock.wrap("attention", attention.attend)
    exchange.gather_end = clock.wrap("exchange wait", exchange.gather_end)
    exchange.receive_rows_end = clock.wrap("other root", exchange.receive_rows_end)
    exchange.scatter_begin = clock.wrap("exchange post", exchange.scatter_begin)
    exchange.receive_rows_begin = clock.wrap("exchange post", exchange.receive_rows_begin)
    exchange.return_outputs = clock.wrap("exchange post", exchange.return_outputs)
    exchange.finish_step = clock.wrap("exchange wait", exchange.finish_step)
    exchange.send_handoff = clock.wrap("handoff", exchange.send_handoff)
    exchange.receive_handoff = clock.wrap("handoff", exchange.receive_handoff)
    exchange.collect = clock.wrap("inputs", exchange.collect)
    step.logits.run = clock.wrap("logits", step.logits.run)
    step.stage_forward = clock.wrap("dense", step.stage_forward)
    path = Path(f"{os.environ['TKNP_STEP_PROFILE']}.{step.stage.topology.rank}")
    out = path.open("w", buffering=1)
    forward = clock.wrap("host", step.forward)

    def measured(ids, positions, batch):
        nonlocal last_end
        if last_end is not None:
            clock.totals["scheduler"] = time.perf_counter() - last_end
        output = forward(ids, positions, batch)
        last_end = time.perf_counter()
        if not batch.is_extend_in_batch:
            rows = list(batch.global_num_tokens_cpu)
            out.write(json.dumps({"rows": rows, **clock.totals}) + "\n")
        clock.totals.clear()
        return output

    step.forward = measured
