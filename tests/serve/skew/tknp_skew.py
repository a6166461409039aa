"""A test's own SGLang plugin: every scheduler's clock is off by its own, large amount.

SGLang measures waiting and running times with perf_counter. Ranks that decided on time-outs by
their own clocks would then disagree (prior art, case 9).
"""

import os
import sys
import time


def load() -> None:
    if "sglang.srt.managers.scheduler" not in sys.modules:
        return
    real, skew = time.perf_counter, os.getpid() * 1000.0
    time.perf_counter = lambda: real() + skew
    with open(os.environ["TKNP_SKEW_LOG"], "a") as out:
        out.write(f"{skew}\n")
