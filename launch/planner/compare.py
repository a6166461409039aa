"""All layouts of one pool on equal terms, over the range of what nobody has measured.

A **scenario** fixes what is uncertain: a node's memory, and the network's constants, at the low or
slow end of their ranges, as given, or at the other end; where DCP's groups lie; how far pipeline
stages overlap. What all layouts share (kernels inside a node) stays as given, because it moves
them together; memory does not, since a full copy of the weights leaves little of it.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Any

from sglang_tknp.launch.planner.hardware import GIB, SPANS
from sglang_tknp.launch.planner.layout_stock import AttentionDp, Dcp, Dp, Pp, Tp
from sglang_tknp.launch.planner.layout_tknp import Tknp, TknpDualRoot
from sglang_tknp.launch.planner.layouts import Layout, Setting
from sglang_tknp.launch.planner.metrics import Metrics, measure
from sglang_tknp.launch.planner.simulate import AS_SERVED, Options, Simulation
from sglang_tknp.launch.planner.trace import Arrival
from sglang_tknp.scheduler_ext.ledger import whole_pages

LAYOUTS: Mapping[str, type[Layout]] = {
    layout.name: layout for layout in (Tknp, TknpDualRoot, Dp, Tp, Pp, Dcp, AttentionDp)
}
# Constants between nodes, and whether more of them is slower.
_NETWORK = {
    "exchange_latency": True,
    "message_latency": True,
    "message_bandwidth": False,
    "cross_allreduce_latency": True,
    "cross_allreduce_doubling": True,
    "cross_allreduce_bandwidth": False,
}
NETWORKS = ("slow", "given", "fast")
MEMORIES = ("low", "given", "high")
OVERLAPS = (0.0, 1.0)


# Two scores nearer than this are equal: nobody knows such small differences.
EQUAL = 0.02


@dataclass(frozen=True, slots=True)
class Scenario:
    memory: str  # of MEMORIES
    network: str  # of NETWORKS
    dcp_span: str
    pp_overlap: float

    def applied(self, setting: Setting) -> Setting:
        """The same pool in this scenario; what the user has fixed stays."""
        hardware = setting.hardware
        values = {}
        for name, more_is_slower in _NETWORK.items():
            constant = hardware.constants[name]
            end = constant.high if (self.network == "slow") == more_is_slower else constant.low
            if self.network != "given" and end is not None:
                values[name] = end
        if values:
            hardware = hardware.with_values(f"{self.network} end of its range", **values)
        return replace(
            setting,
            hardware=hardware,
            node_memory=setting.node_memory + self._more_memory(setting),
            dcp_span=self.dcp_span,
            pp_overlap=self.pp_overlap,
        )

    def _more_memory(self, setting: Setting) -> int:
        constant = setting.hardware.constants["usable_memory"]
        end = {"low": constant.low, "high": constant.high}.get(self.memory)
        return 0 if end is None else int((end - constant.value) * GIB) * setting.tp_size


@dataclass(slots=True, kw_only=True)
class Outcome:
    """One layout of the pool, serving one trace."""

    name: str
    title: str
    layout: Layout | None  # as given; None where it cannot be built
    reason: str | None = None  # why it cannot serve
    given: Metrics | None = None
    # None where it cannot serve.
    by_scenario: dict[Scenario, Metrics | None] = field(default_factory=dict)

    @property
    def low(self) -> float:
        """Completion throughput in the worst scenario, output tokens per second."""
        return min((m.throughput if m else 0.0 for m in self.by_scenario.values()), default=0.0)

    @property
    def high(self) -> float:
        return max((m.throughput if m else 0.0 for m in self.by_scenario.values()), default=0.0)

    def scores(self) -> dict[Scenario | None, float]:
        """`score` in every scenario; under None as given."""
        found: dict[Scenario | None, float] = {s: score(m) for s, m in self.by_scenario.items()}
        if self.given is not None:
            found[None] = score(self.given)
        return found


def score(metrics: Metrics | None) -> float:
    """What layouts are ranked by; more is better, 0 if it does not serve.

    Of a burst completion throughput. Of arrivals over time throughput is mostly the offered load,
    so there it is how soon requests are complete.
    """
    if metrics is None or not metrics.completed:
        return 0.0
    return metrics.throughput if metrics.is_burst else 1 / metrics.mean_completion


def regret(outcome: Outcome, others: Sequence[Outcome]) -> float:
    """How many times better the best of `others` is, in the scenario where that is worst."""
    mine = outcome.scores()
    return max(
        max(other.scores().get(scenario, 0.0) for other in others) / value if value else math.inf
        for scenario, value in mine.items()
    )


def least_regret(outcomes: Sequence[Outcome], order: Callable[[str], Any] = str) -> Outcome:
    """The layout that is never far from the best; of equally good ones the first in `order`.

    Worst cases alone would choose what is poor everywhere but sure.
    """
    found = {o.name: regret(o, outcomes) for o in outcomes}
    limit = min(found.values()) * (1 + EQUAL)
    return min((o for o in outcomes if found[o.name] <= limit), key=lambda o: order(o.name))


def build(name: str, setting: Setting) -> Layout:
    """A layout by its name; `dp-tp2` is DP of two-rank replicas, `pp2` is pipelines of two stages.

    Raises:
        ValueError: there is no such layout, or this pool cannot have it.
    """
    kind, number = kind_of(name)
    if reason := LAYOUTS[kind].why_not(setting):
        raise ValueError(reason)
    if number is None:
        return LAYOUTS[kind](setting)
    check_name(name, setting)
    return Dp(setting, number) if kind == "dp" else Pp(setting, number)


def kind_of(name: str) -> tuple[str, int | None]:
    """A layout's key in LAYOUTS, and the number behind it; ValueError for an unknown name."""
    kind, number = name, None
    for prefix in ("dp-tp", "pp"):
        rest = name.removeprefix(prefix)
        if rest != name and rest.isdigit():
            kind, number = prefix.removesuffix("-tp"), int(rest)
    if kind not in LAYOUTS:
        raise ValueError(f"no layout is named {name}; use {', '.join(LAYOUTS)}, dp-tp1, pp2, ...")
    return kind, number


def check_name(name: str, setting: Setting) -> None:
    """Raise ValueError for a layout that no pool of this size can mean."""
    kind, number = kind_of(name)
    whole = setting.tp_size if kind == "dp" else setting.num_nodes
    if number is not None and (number < 1 or whole % number):
        what = "ranks of a node" if kind == "dp" else "nodes"
        raise ValueError(f"layout {name}: {number} does not divide the {whole} {what}")


def candidates(setting: Setting) -> list[str]:
    """What is worth comparing: all layouts, smaller DP replicas, and the shallowest pipelines."""
    model, names = setting.model, list(LAYOUTS)
    smaller = [t for t in range(1, setting.tp_size) if setting.tp_size % t == 0]
    names += [f"dp-tp{t}" for t in smaller if model.num_heads % t == 0 and _holds(Dp(setting, t))]
    if not _holds(Dp(setting)):  # the lecture: the shallowest pipeline that fits
        depths = [s for s in range(2, setting.num_nodes) if setting.num_nodes % s == 0]
        names += [f"pp{s}" for s in depths if _holds(Pp(setting, s))][:1]
    return names


def _holds(layout: Layout) -> bool:
    return layout.fits


def compare(
    setting: Setting,
    trace: Sequence[Arrival],
    *,
    names: Sequence[str] | None = None,
    slo_per_token: float | None = None,
    options: Options = AS_SERVED,
    bands: bool = True,
    on_progress: Callable[[str], None] = lambda name: None,
) -> list[Outcome]:
    """Every layout serving the trace, as given and, with `bands`, in every scenario.

    Args:
        slo_per_token: seconds from arrival to completion, per output token.
        on_progress: hears the layout that is simulated next.

    Raises:
        ValueError: there is no layout of such a name.
    """
    for name in names or ():
        check_name(name, setting)
    outcomes = []
    for name in names or candidates(setting):
        on_progress(name)
        outcomes.append(_outcome(name, setting, trace, slo_per_token, options, bands))
    return outcomes


def _outcome(
    name: str,
    setting: Setting,
    trace: Sequence[Arrival],
    slo_per_token: float | None,
    options: Options,
    bands: bool,
) -> Outcome:
    try:
        layout = build(name, setting)
    except ValueError as error:
        title = LAYOUTS[kind_of(name)[0]].title
        return Outcome(name=name, title=title, layout=None, reason=str(error))
    outcome = Outcome(name=name, title=layout.title, layout=layout)
    if reason := _why_it_cannot_serve(layout, trace, options):
        outcome.reason = reason
        return outcome

    def run(layout: Layout) -> Metrics | None:
        if _why_it_cannot_serve(layout, trace, options):
            return None
        return measure(Simulation(layout, trace, options).simulate(), slo_per_token)

    outcome.given = run(layout)
    known: dict[tuple[Any, ...], Metrics | None] = {}
    for scenario in scenarios(setting) if bands else ():
        # A layout need not be simulated again for what it does not depend on.
        matters = tuple(getattr(scenario, name) for name in sorted(layout.uncertain))
        if matters not in known:
            known[matters] = run(build(name, scenario.applied(setting)))
        outcome.by_scenario[scenario] = known[matters]
    return outcome


def _why_it_cannot_serve(layout: Layout, trace: Sequence[Arrival], options: Options) -> str | None:
    if not layout.fits:
        return "its weights leave no room for KV"
    tokens = max(arrival.input_tokens + arrival.output_tokens for arrival in trace)
    longest = whole_pages(tokens, options.page_size)
    if max(layout.capacity) < longest:
        return (
            f"an owner holds {max(layout.capacity)} KV tokens, and the longest request needs "
            f"{longest}"
        )
    return None


def scenarios(setting: Setting) -> Iterator[Scenario]:
    """All of them, without those that change what the user has fixed."""
    known = setting.known
    memories = ("given",) if "memory" in known or setting.measured else MEMORIES
    spans = (setting.dcp_span,) if "dcp_span" in known else SPANS
    overlaps = (setting.pp_overlap,) if "pp_overlap" in known else OVERLAPS
    for memory, network, span, overlap in product(memories, NETWORKS, spans, overlaps):
        yield Scenario(memory, network, span, overlap)


def flips(one: Outcome, other: Outcome) -> bool:
    """Whether some scenario ranks the one clearly first, and some the other."""
    mine, theirs = one.scores(), other.scores()
    pairs = [(mine[s], theirs[s]) for s in mine.keys() & theirs.keys()]
    return any(a > b * (1 + EQUAL) for a, b in pairs) and any(b > a * (1 + EQUAL) for a, b in pairs)
