"""Plans, runs and assumptions as plain text and as JSON."""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from sglang_tknp.launch.planner.hardware import GIB, Hardware
from sglang_tknp.launch.planner.layouts import Setting
from sglang_tknp.launch.planner.metrics import Metrics
from sglang_tknp.launch.planner.plan import Crossover, Plan
from sglang_tknp.launch.planner.recommend import Row, Workload
from sglang_tknp.tables import table

NEVER_MEASURED = (
    "simulated: nothing here was measured on such a pool; times between nodes come from other "
    "people's machines"
)


def assumptions(setting: Setting, workload: Workload) -> list[str]:
    """The head of every output: what the numbers below rest on."""
    model, hw = setting.model, setting.hardware
    room = f"{setting.node_memory / GIB:.0f} GiB a node for weights and KV"
    known = ", ".join(f"{name} {tokens} tokens" for name, tokens in setting.measured.items())
    return [
        "assumed",
        f"  model      {model.name}: {model.parameters / 1e9:.1f} billion weights, "
        f"{model.weight_bytes / GIB:.1f} GiB (from its {model.sizes_from}), {model.num_layers} "
        f"layers, {model.num_heads} heads and {model.num_kv_heads} KV heads of {model.head_dim}",
        f"  KV         {model.kv_token_bytes(1) / 1024:.0f} KiB per token",
        f"  hardware   {hw.name}: {hw.description}",
        f"  fitted     {'; '.join(hw.fitted()) or 'nothing'}",
        f"  pool       {setting.num_nodes} nodes of {setting.tp_size} ranks, {room}"
        + (f"; measured: {known}" if known else f" ({_memory_range(hw)})"),
        f"  workload   {workload.description}",
        f"  as given   DCP groups {'in a node' if setting.dcp_span == 'node' else 'over nodes'}, "
        f"pipeline overlap {setting.pp_overlap:g}; worst and best: over the ranges of memory "
        "and network, both places of DCP groups, and overlap 0 and 1, but for what an option fixes",
        *(f"  note       {note}" for note in (*model.notes, *_too_long(setting, workload))),
        f"  note       {NEVER_MEASURED}",
    ]


def _too_long(setting: Setting, workload: Workload) -> list[str]:
    longest = max(a.input_tokens + a.output_tokens for a in workload.trace)
    context = setting.model.max_context
    if not context or longest <= context:
        return []
    return [f"requests of up to {longest} tokens are longer than the model's context of {context}"]


def _memory_range(hw: Hardware) -> str:
    memory = hw.constants["usable_memory"]
    if memory.low is None or memory.high is None:
        return "as given"
    ranks = hw.node_size
    return f"an estimate, {memory.low * ranks:.0f} to {memory.high * ranks:.0f}; measured is better"


def plan_text(plan: Plan) -> str:
    """All but the assumptions, which come first."""
    parts = [
        _memory(plan.rows),
        _speed(plan),
        _steps(plan.rows),
        _why_not(plan.rows),
        _verdict(plan),
    ]
    return "\n\n".join("\n".join(part) for part in parts if part)


def _memory(rows: Sequence[Row]) -> list[str]:
    lines = [["layout", "weights/node", "KV tokens", "range", "KV/pool", "resident", "per owner"]]
    for row in (r for r in rows if r.outcome.layout is not None):
        layout = row.outcome.layout
        assert layout is not None
        held = row.kv_tokens * layout.model.kv_token_bytes(1)
        lines.append(
            [
                row.outcome.title,
                f"{row.weights / GIB:.1f} GiB",
                f"{row.kv_tokens}",
                _range(row.kv_range),
                f"{held / GIB:.0f} GiB",
                f"{sum(row.resident)}",
                _per_owner(row.resident),
            ]
        )
    return ["memory, and requests of mean length that it holds", *_indented(lines)]


def _range(tokens: tuple[int, int]) -> str:
    low, high = tokens
    return f"{low} to {high}" if low < high else ""


def _per_owner(resident: Sequence[int]) -> str:
    if len(resident) == 1:
        return "one owner"
    low, high = min(resident), max(resident)
    return f"{len(resident)} x {low}" + (f" to {high}" if high > low else "")


def _speed(plan: Plan) -> list[str]:
    slo = plan.workload.slo_per_token
    header = ["layout", "tok/s", "worst", "best", "wait", "p95 ITL", "completion", "p95", "binds"]
    lines = [header[:-1] + (["SLO"] if slo else []) + header[-1:]]
    for row in plan.rows:
        metrics, outcome = row.outcome.given, row.outcome
        if metrics is None:
            continue
        worst, best = outcome.low, outcome.high
        attained = [f"{metrics.attainment:.0%}"] if metrics.attainment is not None else []
        lines.append(
            [
                outcome.title,
                f"{metrics.throughput:.0f}",
                f"{worst:.0f}" if outcome.by_scenario else "",
                f"{best:.0f}" if outcome.by_scenario else "",
                f"{metrics.mean_wait:.1f} s",
                f"{metrics.p95_itl * 1e3:.1f} ms",
                f"{metrics.mean_completion:.1f} s",
                f"{metrics.p95_completion:.1f} s",
                *attained,
                row.binds + (" (saturated)" if metrics.saturated else ""),
            ]
        )
    return [
        "completion throughput (release to last finish), mean wait for an owner, ITL without it",
        *_indented(lines, left=(0, len(lines[0]) - 1)),
    ]


def _steps(rows: Sequence[Row]) -> list[str]:
    """A step at the run's peak, in ms by what takes them."""
    able = [row for row in rows if row.terms]
    names = list(dict.fromkeys(name for row in able for name in row.terms or {}))
    lines = [["layout", "rows", *names, "step"]]
    for row in able:
        terms = row.terms or {}
        cells = [f"{terms[name] * 1e3:.1f}" if name in terms else "" for name in names]
        total = f"{sum(terms.values()) * 1e3:.1f}"
        lines.append([row.outcome.title, f"{row.step_rows}", *cells, total])
    return ["a step at the peak of the run, in ms", *_indented(lines)] if able else []


def _why_not(rows: Sequence[Row]) -> list[str]:
    lines = [
        f"  {row.outcome.title}: {why}"
        for row in rows
        if (why := "; ".join(text for text in (row.outcome.reason, row.launchable) if text))
    ]
    return ["not to be had", *lines] if lines else []


def _verdict(plan: Plan) -> list[str]:
    return ["recommendation", *(f"  {line}" for line in verdict(plan))]


def verdict(plan: Plan) -> list[str]:
    """What to run, why, and how sure that is."""
    chosen = plan.recommendation
    lines = list(chosen.reasons)
    if chosen.undecided:
        others = [title for title in chosen.undecided if title not in chosen.faster]
        parts = [f"{', '.join(chosen.faster)} is faster as given" if chosen.faster else ""]
        parts.append(f"{', '.join(others)} may be faster" if others else "")
        lines.append(
            f"Undecided: {', and '.join(part for part in parts if part)}, within the range of what "
            "nobody has measured. Measure your network (sglang-tknp calibrate), your KV capacity "
            "(--kv-tokens-per-node), or both layouts."
        )
    if plan.crossover is not None:
        lines.append(f"Crossover: {_crossover(plan.crossover)}.")
    return lines + [f"Launch: {command}" for command in chosen.commands]


def _crossover(crossover: Crossover) -> str:
    if crossover.first is None:
        return f"DP is ahead of TKNP up to {crossover.most} requests at once"
    text = f"TKNP is first ahead of DP with {crossover.first} requests at once"
    if crossover.always is None:
        return f"{text}, and not for good up to {crossover.most}"
    if crossover.always > crossover.first:
        return f"{text}, and for good from {crossover.always} (tried up to {crossover.most})"
    return f"{text}, and stays so (tried up to {crossover.most})"


def _indented(rows: Sequence[Sequence[str]], left: Sequence[int] = (0,)) -> list[str]:
    return [f"  {line}" for line in table(rows, left=left)]


def metrics_text(title: str, metrics: Metrics) -> str:
    """One simulated run."""
    peaks = ", ".join(map(str, metrics.peak_requests))
    rows = [
        ["requests served", f"{metrics.completed}"],
        ["refused", f"{metrics.refused}"],
        ["duration", f"{metrics.seconds:.2f} s"],
        ["completion throughput", f"{metrics.throughput:.1f} output tokens/s"],
        ["mean wait for an owner", f"{metrics.mean_wait:.2f} s"],
        ["mean ITL", f"{metrics.mean_itl * 1e3:.2f} ms"],
        ["p95 ITL", f"{metrics.p95_itl * 1e3:.2f} ms"],
        ["mean completion", f"{metrics.mean_completion:.2f} s"],
        ["p95 completion", f"{metrics.p95_completion:.2f} s"],
        ["most requests of an owner", peaks],
        ["most requests waiting", f"{metrics.peak_waiting}"],
    ]
    if metrics.attainment is not None:
        rows.append(["SLO met by", f"{metrics.attainment:.1%}"])
    if metrics.saturated:
        rows.append(["saturated", "arrivals outpace completions: waits grow without end"])
    return "\n".join([title, *_indented(rows, left=(0, 1))])


def plan_json(plan: Plan) -> dict[str, Any]:
    """Everything of a plan; bytes, tokens, seconds."""
    return {
        "assumptions": about(plan.setting, plan.workload),
        "layouts": [_row_json(row) for row in plan.rows],
        "crossover": asdict(plan.crossover) if plan.crossover else None,
        "recommendation": asdict(plan.recommendation),
    }


def about(setting: Setting, workload: Workload) -> dict[str, Any]:
    model = setting.model
    return {
        "model": {
            "name": model.name,
            "architecture": model.architecture,
            "parameters": model.parameters,
            "weight_bytes": model.weight_bytes,
            "sizes_from": model.sizes_from,
            "num_layers": model.num_layers,
            "num_heads": model.num_heads,
            "num_kv_heads": model.num_kv_heads,
            "head_dim": model.head_dim,
            "kv_token_bytes": model.kv_token_bytes(1),
        },
        "hardware": hardware_json(setting.hardware),
        "num_nodes": setting.num_nodes,
        "tp_per_node": setting.tp_size,
        "node_memory_bytes": setting.node_memory,
        "measured_kv_tokens": dict(setting.measured),
        "dcp_span": setting.dcp_span,
        "pp_overlap": setting.pp_overlap,
        "workload": {
            "description": workload.description,
            "requests": len(workload.trace),
            "slo_seconds_per_token": workload.slo_per_token,
            "slo_target": workload.slo_target if workload.slo_per_token else None,
        },
        "notes": [*model.notes, *_too_long(setting, workload), NEVER_MEASURED],
    }


def hardware_json(hardware: Hardware) -> dict[str, Any]:
    return {
        "name": hardware.name,
        "description": hardware.description,
        "constants": {name: asdict(constant) for name, constant in hardware.constants.items()},
        "presets": dict(hardware.presets),
    }


def _row_json(row: Row) -> dict[str, Any]:
    outcome, layout = row.outcome, row.outcome.layout
    return {
        "name": outcome.name,
        "title": outcome.title,
        "reason": outcome.reason,
        "launchable": row.launchable is None and layout is not None,
        "why_not_launchable": row.launchable,
        "weight_bytes_by_node": list(layout.weights) if layout else [],
        "kv_tokens_by_owner": list(layout.capacity) if layout else [],
        "kv_tokens_range": list(row.kv_range),
        "resident_by_owner": list(row.resident),
        "metrics": asdict(outcome.given) if outcome.given else None,
        "worst_throughput": outcome.low if outcome.by_scenario else None,
        "best_throughput": outcome.high if outcome.by_scenario else None,
        "scenarios": [
            {**asdict(scenario), "throughput": metrics.throughput if metrics else 0.0}
            for scenario, metrics in outcome.by_scenario.items()
        ],
        "step_rows": row.step_rows,
        "step_terms": row.terms,
        "binds": row.binds,
    }
