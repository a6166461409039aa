"""Settings and workloads that the planner's tests share."""

from dataclasses import replace
from typing import Any

from sglang_tknp.launch.planner import hardware, trace
from sglang_tknp.launch.planner.layouts import Setting
from sglang_tknp.launch.planner.paper_pools import paper_setting
from sglang_tknp.launch.planner.recommend import Workload


def setting(
    model: str = "llama-3.1-405b-fp8", nodes: int = 4, machine: str = "h100-sxm", **changes: Any
) -> Setting:
    return replace(paper_setting(hardware.load(machine), model, nodes), **changes)


def burst(
    count: int, input_tokens: int = 32_768, output_tokens: int = 1024, **slo: Any
) -> Workload:
    return Workload(
        trace=trace.fixed(count, input_tokens, output_tokens), description=f"{count} at once", **slo
    )
