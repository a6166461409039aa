"""The dry run's report, as text and as JSON. Pure: what is in it, pool_plan.py computed."""

import json
from dataclasses import asdict, dataclass

from sglang_tknp.placement import human, tied_note
from sglang_tknp.pool_plan import GIB, PoolPlan
from sglang_tknp.tables import table
from sglang_tknp.traffic import StepTraffic


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """The model, and what the plans assume."""

    model: str
    model_class: str
    sglang: str  # version
    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    dtype: str  # of weights that are not quantised, activations and logits
    quantization: str | None
    kv_cache_dtype: str
    sizes_from: str  # "checkpoint" or "configuration": the bytes that are placed
    stored_dtypes: tuple[str, ...]  # of the checkpoint, by bytes, most first
    tp_per_node: int
    batch: int
    device_memory_gb: float  # GiB, of one rank
    mem_fraction_static: float

    @property
    def casts_weights(self) -> bool:
        """Whether loading changes the dtype of the checkpoint's unquantised tensors."""
        return bool(self.stored_dtypes) and self.dtype not in self.stored_dtypes


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    facts: Facts
    plans: tuple[PoolPlan, ...]  # by the number of nodes

    @property
    def fits(self) -> bool:
        """Whether any of the pools would start."""
        return any(plan.fits for plan in self.plans)


def to_json(report: Report) -> str:
    """All numbers in bytes, rows and tokens."""
    plans = [
        {
            "num_nodes": plan.num_nodes,
            "fits": plan.fits,
            "kv_tokens": plan.kv_tokens,
            **asdict(plan),
            "traffic": {**asdict(plan.traffic), "peer_group": plan.traffic.peer_group},
        }
        for plan in report.plans
    ]
    return json.dumps({"facts": asdict(report.facts), "plans": plans}, indent=2)


def to_text(report: Report) -> str:
    plans = [_plan_text(plan, report.facts) for plan in report.plans]
    return "\n\n".join([_head(report.facts), *plans])


def why_nothing_fits(report: Report) -> str:
    facts, plan = report.facts, report.plans[-1]
    fullest = max(plan.nodes, key=lambda node: node.weight_bytes + node.buffer_bytes)
    needed = (fullest.weight_bytes + fullest.buffer_bytes) / facts.tp_per_node
    return (
        f"nothing fits: with --nodes {plan.num_nodes} --tp-per-node {facts.tp_per_node} a rank "
        f"of node {fullest.node} holds {human(needed)} of weights and rotary tables, and "
        f"{_budget(facts)} is for them and KV; use more nodes or ranks, or raise "
        "--device-memory-gb or --mem-fraction-static"
    )


def _budget(facts: Facts) -> str:
    gb = facts.device_memory_gb * facts.mem_fraction_static
    return f"{facts.device_memory_gb:g} GiB x {facts.mem_fraction_static:g} = {gb:.2f} GiB"


def _head(facts: Facts) -> str:
    weights = facts.dtype
    if facts.quantization:
        weights = f"{facts.quantization} projections, all else {facts.dtype}"
    source = {"checkpoint": "of the checkpoint's tensors", "configuration": "from its config.json"}
    sizes = source[facts.sizes_from]
    if facts.casts_weights:
        stored = " and ".join(facts.stored_dtypes)
        sizes += f", stored in {stored}; the tables have the bytes held, in {facts.dtype}"
    rest = 1 - facts.mem_fraction_static
    return "\n".join(
        [
            f"{facts.model}: {facts.num_layers} layers, hidden {facts.hidden_size}, "
            f"{facts.num_heads} heads and {facts.num_kv_heads} KV heads of {facts.head_dim}, "
            f"vocabulary {facts.vocab_size}",
            f"{facts.model_class} built from SGLang {facts.sglang}'s modules on the meta device: "
            "nothing was loaded or sent",
            "",
            "assumed",
            f"  weights    {weights}; placed by sizes {sizes}",
            f"  KV         {facts.kv_cache_dtype}, all {facts.num_layers} layers at a request's "
            "owner",
            f"  memory     {_budget(facts)} of a rank for weights and KV",
            f"  left out   activations, graphs and communication buffers (the other {rest:.1%}), "
            "what the driver takes, rounding to KV pages, and the empty slots of captured steps",
            f"  batch      {facts.batch} rows of one decode step, evenly over the owners, "
            f"activations and logits in {facts.dtype}",
        ]
    )


def _plan_text(plan: PoolPlan, facts: Facts) -> str:
    fits = "" if plan.fits else ": DOES NOT FIT"
    lines = [
        f"{plan.num_nodes} nodes of {facts.tp_per_node} ranks{fits}",
        *_node_table(plan),
        f"  check      {_check(plan, facts)}",
        f"  KV         {human(plan.kv_token_bytes)} per token on its owner, "
        f"{human(plan.rank_kv_token_bytes)} per rank; {plan.kv_tokens} tokens in the pool "
        f"({plan.kv_tokens * plan.kv_token_bytes / GIB:.0f} GiB)",
        *_traffic_lines(plan.traffic, facts),
    ]
    return "\n".join(lines)


def _node_table(plan: PoolPlan) -> list[str]:
    """All columns are of what SGLang's modules hold, so that they agree with each other."""
    header = ["node", "layers", "weights", "share", "per rank", "KV tokens", ""]
    rows = [header]
    for n in plan.nodes:
        rows.append(
            [
                f"{n.node}",
                f"{n.layers[0]}-{n.layers[1] - 1}",
                human(n.one_copy_bytes),
                f"{n.one_copy_bytes / plan.held_bytes:.1%}",
                human(n.rank_weight_bytes),
                f"{n.kv_tokens}",
                ", ".join(n.endpoints),
            ]
        )
    lines = [f"  {line}" for line in table(rows, left=(len(header) - 1,))]
    if plan.tied_copy_bytes:
        lines.append(f"  tied       {tied_note(plan.tied_copy_bytes, plan.held_bytes)}")
    return lines


def _check(plan: PoolPlan, facts: Facts) -> str:
    beyond = [node.beyond_placement for node in plan.nodes]
    replicated = sum(node.replicated_bytes for node in plan.nodes)
    uneven = sum(node.uneven_bytes for node in plan.nodes)
    if any(beyond):
        size = sum(beyond)
        same = (
            f"the modules hold {human(abs(size))} {'more' if size > 0 else 'less'} than was "
            f"placed ({_why_beyond(facts)})"
        )
    else:
        same = "the modules hold the placed bytes exactly on every node"
    extra = f"; the ranks repeat {human(replicated)} that is not split"
    return same + extra + (f" and {human(uneven)} of KV heads" if uneven else "")


def _why_beyond(facts: Facts) -> str:
    if facts.casts_weights:
        return f"stored in {' and '.join(facts.stored_dtypes)}, held in {facts.dtype}"
    guessed = ", or what config.json does not tell" if facts.sizes_from == "configuration" else ""
    return f"vocabulary padding and KV scales{guessed}"


def _traffic_lines(traffic: StepTraffic, facts: Facts) -> list[str]:
    tp, remote = facts.tp_per_node, len(traffic.rows) - 1
    groups = f"1/{tp} of " if tp > 1 else ""
    most = "up to " if len(set(traffic.rows)) > 1 else ""
    owners = f"each of {remote} remote owners" if remote > 1 else "the remote owner"
    qkv, output = human(max(traffic.qkv)), human(max(traffic.output))
    return [
        f"  a layer    {most}{qkv} of QKV to and {output} of output from {owners}: "
        f"{human(max(traffic.layer))} per peer group",
        f"  a handoff  {human(traffic.handoff)} per rank: {groups}hidden and residual",
        f"  logits     {most}{human(max(traffic.logits))} to an owner's rank",
        f"  a step     per peer group {human(traffic.exchange)} of exchange, "
        f"{human(traffic.handoffs)} of handoffs, {human(sum(traffic.logits))} of logits, "
        f"{human(traffic.inputs)} of ids and positions; {human(traffic.pool)} in the pool",
    ]
