"""What the planner expects of each run: its KV, and completion throughput by its simulator.

Constants come from micro-benchmarks only: dense products and attention of this very model from
compare_machine.py, the server's own time (scheduler, messages, streaming, the client on the same
cores) from the same servers with a model of as many layers that does nothing, all else from the
hardware file cpu-toy (bench/hardware.py). Cores share the memory: where both do dense work at once
(DP, TP, PP) its measured time with two at once counts; in TKNP nodes do it by turns.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
from compare_toy import PAGE_SIZE, Toy

from sglang_tknp.launch.model_source import Model
from sglang_tknp.launch.planner import hardware
from sglang_tknp.launch.planner.compare import build
from sglang_tknp.launch.planner.hardware import GIB, Hardware
from sglang_tknp.launch.planner.layouts import Layout, Setting
from sglang_tknp.launch.planner.metrics import measure
from sglang_tknp.launch.planner.model import PlannedModel, planned
from sglang_tknp.launch.planner.simulate import Options, Simulation
from sglang_tknp.launch.planner.trace import Arrival

Found = Mapping[str, Any]


def planned_model(toy: Toy) -> PlannedModel:
    return planned(Model(name="toy", config=toy.config(), folder=None))


def setting_of(
    toy: Toy, nodes: int, machine: Found | None, system: str, hosts: Found | None
) -> Setting:
    hw = hardware.load("cpu-toy").with_values(
        "bench/compare.py", usable_memory=toy.rank_bytes / GIB
    )
    model = planned_model(toy)
    if machine is not None:
        hw = measured(hw, model, machine, system, nodes)
    if hosts is not None:
        hw = with_host(hw, hosts[system], system, nodes)
    return Setting(model=model, hardware=hw, num_nodes=nodes, node_memory=toy.rank_bytes)


def layout_of(
    toy: Toy, system: str, nodes: int, machine: Found | None = None, hosts: Found | None = None
) -> Layout:
    layout = build(system, setting_of(toy, nodes, machine, system, hosts))
    layout.capacity = tuple(held // PAGE_SIZE * PAGE_SIZE for held in layout.capacity)
    return layout


def expected_kv_tokens(toy: Toy, system: str, nodes: int) -> int | None:
    """KV tokens of the whole pool in whole pages, as the planner counts; None if it cannot be."""
    try:
        return layout_of(toy, system, nodes).kv_tokens
    except ValueError:
        return None


def measured(
    hw: Hardware, model: PlannedModel, machine: Found, system: str, nodes: int
) -> Hardware:
    """The hardware file with the products and the attention of compare_machine.py.

    Products on a CPU grow evenly with the rows: reading weights, and so much for each row, which
    is put to the rows' overhead.
    """
    dense = machine["dense_ms_by_turns" if system == "tknp" else "dense_ms_two_at_once"]
    rows = sorted((int(n), ms * 1e-3) for n, ms in dense.items())
    slope, start = np.polyfit(*zip(*rows, strict=True), 1)
    weights = sum(p.weight_bytes for layer in model.layers for p in (*layer.attention, *layer.mlp))
    bandwidth = weights / start
    stages = nodes if system == "pp" else 1  # their overheads add up in a step
    values = {
        "gemm_efficiency_16bit": min(1.0, bandwidth / hw.memory_bandwidth),
        "compute_16bit": 1e6,
        "gemm_fixed": 0.0,
        "row_overhead": slope / stages * 1e6,
        **_attention(hw, model, machine["attention_ms"]),
        **_elementwise(model, machine["elementwise_ms"]),
    }
    return hw.with_values("bench/compare_machine.py", status="measured", **values)


def _attention(hw: Hardware, model: PlannedModel, ms: Found) -> dict[str, float]:
    """By its slope over context tokens; starting it is in the empty model's step."""
    (few, quick), (many, slow) = sorted((int(n), value * 1e-3) for n, value in ms.items())
    bandwidth = (many - few) * model.kv_token_bytes(1) / (slow - quick)
    efficiency = min(1.0, bandwidth / hw.memory_bandwidth)
    return {
        "attention_efficiency": efficiency,
        "attention_fixed": 0.0,
        "attention_per_request": 0.0,
    }


def _elementwise(model: PlannedModel, ms: Found) -> dict[str, float]:
    """What norms, rotary embedding and activation take beyond those of the empty model."""
    rows = max(map(int, ms))
    width = 4 * model.hidden_size + 3 * model.inner_size
    size = rows * width * model.element_bytes * model.num_layers
    seconds = max(ms[str(rows)] * 1e-3, 1e-6)
    return {"elementwise_fixed": 0.0, "elementwise_bandwidth": size / seconds / 1e9}


def with_host(hw: Hardware, steps: Found, system: str, nodes: int) -> Hardware:
    """What a step of a model that does nothing takes in this system, messages included.

    `steps`: milliseconds of its steps by requests at once; rows are those of a replica in DP, of a
    microbatch in PP (whose stages have their overhead one after the other), else of the pool.
    """
    (few, quick), (many, slow) = sorted((int(n), ms * 1e3) for n, ms in steps.items())
    share = nodes if system in ("dp", "pp") else 1
    stages = nodes if system == "pp" else 1
    row = (slow - quick) / (many - few) * share / stages
    values = {
        "step_overhead": max(0.0, quick / stages - row * few / share),
        "row_overhead": hw.constants["row_overhead"].value + max(0.0, row),
        "exchange_latency": 0.0,
        "message_latency": 0.0,
        "cross_allreduce_latency": 0.0,
        "cross_allreduce_doubling": 0.0,
    }
    return hw.with_values(
        "bench/compare.py, a model that does nothing", status="measured", **values
    )


def predictions(found: Found, toy: Toy, nodes: int) -> list[dict[str, Any]]:
    """(system, point, predicted and measured throughput) of every run's first repeat."""
    rows, seen = [], set()
    for run in found["runs"]:
        key = (run["system"], run["point"]["name"])
        if key in seen:
            continue
        seen.add(key)
        trace = [Arrival(r["arrival"], int(r["input"]), int(r["output"])) for r in run["requests"]]
        layout = layout_of(toy, run["system"], nodes, found["machine_does"], found["empty_step_ms"])
        simulated = Simulation(layout, trace, Options(page_size=PAGE_SIZE)).simulate()
        median = next(m for m in found["medians"] if (m["system"], m["point"]) == key)
        predicted = measure(simulated).throughput
        rows.append(
            {
                "system": run["system"],
                "point": run["point"]["name"],
                "predicted": round(predicted, 2),
                "measured": median["throughput"],
                "error": round(predicted / median["throughput"] - 1, 4),
            }
        )
    return rows
