"""A test's own SGLang plugin: the first step of rank 1, which is one that is captured, fails."""

import sys


def load():
    if "sglang.srt.managers.scheduler" not in sys.modules:
        return
    from sglang_tknp.model_ext.step import Step

    run = Step.run

    def failing(step, *args):
        if step.node == 1:
            raise RuntimeError("the device ran out of memory")
        return run(step, *args)

    Step.run = failing
