"""Which layout to run, and why: the lecture's decision procedure over simulated numbers.

Its three inputs are the model's structure, the load with its SLO, and the topology. Of the layouts
that can be launched and meet the SLO it takes the one of least regret (compare.py): never far from
the best in any scenario. It names every layout that some scenario ranks clearly before that.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from sglang_tknp.launch.planner.commands import Server, launch
from sglang_tknp.launch.planner.compare import EQUAL, Outcome, flips, least_regret, regret, score
from sglang_tknp.launch.planner.hardware import GIB
from sglang_tknp.launch.planner.layouts import Setting, Terms
from sglang_tknp.launch.planner.trace import Arrival

# Simple layouts first: of equally good ones the simplest is taken.
WAITING = 0.05  # of the completion time, from which the wait counts
_SIMPLE = ("dp", "dp-tp", "pp", "tp", "attention-dp", "dcp", "tknp", "tknp-dual")


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """What the pool is to serve."""

    trace: Sequence[Arrival]
    description: str
    slo_per_token: float | None = None  # seconds from arrival to completion, per output token
    slo_target: float = 0.9  # the share of requests that is to meet it

    @property
    def mean_input(self) -> float:
        return sum(a.input_tokens for a in self.trace) / len(self.trace)

    @property
    def mean_output(self) -> float:
        return sum(a.output_tokens for a in self.trace) / len(self.trace)

    @property
    def is_burst(self) -> bool:
        """All at once."""
        return len({a.seconds for a in self.trace}) == 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One layout in the plan."""

    outcome: Outcome
    weights: int = 0  # bytes, of the fullest node
    kv_tokens: int = 0
    kv_range: tuple[int, int] = (0, 0)  # over that of the memory
    resident: tuple[int, ...] = ()  # requests of mean length that each owner holds
    step_rows: int = 0  # of the step whose terms follow
    terms: Terms | None = None
    binds: str = ""
    launchable: str | None = None  # why SGLang cannot run it; None if it can


@dataclass(frozen=True, slots=True, kw_only=True)
class Recommendation:
    name: str | None  # None: nothing fits
    reasons: tuple[str, ...]
    undecided: tuple[str, ...] = ()  # titles of layouts that some scenario ranks before it
    faster: tuple[str, ...] = ()  # of these, those that are ahead as given
    meets_slo: bool | None = None
    commands: tuple[str, ...] = ()


def recommend(
    setting: Setting, workload: Workload, rows: Sequence[Row], server: Server
) -> Recommendation:
    """Choose among the layouts of a plan; `name` is None where none can serve the workload."""
    able = [row for row in rows if row.outcome.given is not None and row.launchable is None]
    reasons = [*_structure(setting), *_load(setting, workload, rows), *_topology(setting, rows)]
    if not able:
        reasons.append(_nothing(rows))
        return Recommendation(name=None, reasons=tuple(reasons))
    good = [row for row in able if _meets_slo(row.outcome, workload)]
    meets = bool(good) if workload.slo_per_token is not None else None
    among = good or able
    best = least_regret([row.outcome for row in among], simplest_first)
    chosen = next(row for row in among if row.outcome is best)
    undecided = [row for row in able if row is not chosen and flips(row.outcome, best)]
    if meets is not None:
        reasons.append(_slo(able, workload))
    reasons.append(_choice(chosen, among, workload))
    if meets is False:
        reasons.append(
            "SLO: no layout meets it for the target share of requests; this one is "
            "chosen all the same. Use more nodes or a lower load."
        )
    return Recommendation(
        name=chosen.outcome.name,
        reasons=tuple(reasons),
        undecided=tuple(row.outcome.title for row in undecided),
        faster=tuple(
            row.outcome.title
            for row in undecided
            if score(row.outcome.given) > score(best.given) * (1 + EQUAL)
        ),
        meets_slo=meets,
        commands=launch(best.name, setting, server),
    )


def _meets_slo(outcome: Outcome, workload: Workload) -> bool:
    """Memory and network as given, wherever DCP groups lie and however pipeline stages overlap."""
    as_given = [m for s, m in outcome.by_scenario.items() if s.network == s.memory == "given"]
    runs = as_given or [outcome.given]
    attained = [0.0 if run is None else run.attainment for run in runs]
    return all(a is None or a >= workload.slo_target for a in attained)


def simplest_first(name: str) -> tuple[int, str]:
    """A key that sorts layouts by how much there is to run."""
    kind = name.rstrip("0123456789")
    return _SIMPLE.index("pp" if kind == "pp" else kind), name


def _structure(setting: Setting) -> list[str]:
    model, tp = setting.model, setting.tp_size
    heads = model.kv_heads_per_rank(tp)
    repeated = f", each repeated on {tp // model.num_kv_heads}" if tp > model.num_kv_heads else ""
    copy, node = model.weight_bytes / GIB, setting.node_memory / GIB
    fits = f"and a node has {node:.0f} GiB for weights and KV"
    if copy >= node:
        fits += ": it does not fit one, so plain DP is out"
    return [
        f"Structure: a dense model with {model.num_kv_heads} KV heads; TP {tp} gives each rank "
        f"{heads}{repeated}. One copy is {copy:.0f} GiB, {fits}."
    ]


def _load(setting: Setting, workload: Workload, rows: Sequence[Row]) -> list[str]:
    token = setting.model.kv_token_bytes(1)
    tokens = sum(a.input_tokens + a.output_tokens for a in workload.trace)
    text = (
        f"Load: {workload.description}. All at once they need {tokens * token / GIB:.0f} GiB of KV"
    )
    held = [f"{r.outcome.title} {sum(r.resident)}" for r in rows if r.resident and r.kv_tokens]
    if held:
        text += f"; of {len(workload.trace)} requests there is room for: {', '.join(held)}"
    return [text + "."]


def _nothing(rows: Sequence[Row]) -> str:
    planned = [row for row in rows if row.outcome.given is not None]
    if planned:
        names = ", ".join(row.outcome.title for row in planned)
        return f"Nothing fits that SGLang can launch: {names} would, but cannot be launched here."
    return "Nothing fits: use more nodes, a smaller model or dtype, or shorter requests."


def _slo(rows: Sequence[Row], workload: Workload) -> str:
    """Who meets the SLO as given, and who is ruled out for what is not known of it."""
    shares = [
        f"{row.outcome.title} {row.outcome.given.attainment:.0%}"
        + ("" if _meets_slo(row.outcome, workload) else " (not sure, or too few)")
        for row in rows
        if row.outcome.given is not None and row.outcome.given.attainment is not None
    ]
    return f"SLO: for {workload.slo_target:.0%} of the requests; as given {', '.join(shares)}."


def _topology(setting: Setting, rows: Sequence[Row]) -> list[str]:
    if setting.num_nodes == 1:
        return []
    tp = next((r for r in rows if r.outcome.name == "tp" and r.terms), None)
    if tp is None or not tp.terms:
        return []
    share = tp.terms["all-reduce"] / sum(tp.terms.values())
    return [
        f"Topology: TP over all nodes puts its all-reduces on the network, {share:.0%} of its step."
    ]


def _choice(chosen: Row, among: Sequence[Row], workload: Workload) -> str:
    outcome = chosen.outcome
    others = sorted((r for r in among if r is not chosen), key=lambda r: -_given(r))
    text = f"Choice: {outcome.title}, {_speed(chosen)}"
    if others:
        text += f"; {', '.join(f'{r.outcome.title} {_speed(r)}' for r in others)}"
        behind = 1 - 1 / regret(outcome, [row.outcome for row in among])
        where = "any scenario" if outcome.by_scenario else "as given"
        what = "throughput" if workload.is_burst else "mean completion time"
        text += f". It is at most {behind:.0%} behind the best in {where}, by {what}"
    if why := _WHY.get(outcome.name.rstrip("0123456789").removesuffix("-tp")):
        text += f": {why}"
    return f"{text}. {_waits(outcome)}"


_WHY = {
    "dp": "replicas send nothing between nodes",
    "pp": "messages between stages are few, and no layer's weights are held twice in a pipeline",
    "tp": "one step reads every weight once, on all ranks",
    "dcp": "one copy leaves the KV room, and no KV is held twice",
    "attention-dp": "nodes attend their own requests, and MLPs are held once",
    "tknp": "one copy leaves the KV room, dense all-reduces stay in a node, and attention needs no "
    "merging",
}


def _given(row: Row) -> float:
    return row.outcome.given.throughput if row.outcome.given is not None else 0.0


def _speed(row: Row) -> str:
    """Output tokens per second as given, with the range."""
    if not row.outcome.by_scenario:
        return f"{_given(row):.0f} tokens/s"
    return f"{_given(row):.0f} tokens/s ({row.outcome.low:.0f} to {row.outcome.high:.0f})"


def _waits(outcome: Outcome) -> str:
    assert outcome.given is not None, outcome.name
    if outcome.given.mean_wait > WAITING * outcome.given.mean_completion:
        return f"Requests wait {outcome.given.mean_wait:.1f} s for an owner on average."
    return "Hardly a request waits for an owner."
