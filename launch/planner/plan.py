"""The plan of a pool: every layout's room and speed, where TKNP overtakes DP, and what to run."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from sglang_tknp.launch.planner import commands
from sglang_tknp.launch.planner.commands import PLAIN, Server
from sglang_tknp.launch.planner.compare import Outcome, build, compare, scenarios
from sglang_tknp.launch.planner.crossing import batches_up_to, first_and_for_good
from sglang_tknp.launch.planner.layouts import Layout, Setting, Terms
from sglang_tknp.launch.planner.metrics import Metrics, measure
from sglang_tknp.launch.planner.recommend import WAITING, Recommendation, Row, Workload, recommend
from sglang_tknp.launch.planner.simulate import ANY_LENGTH, AS_SERVED, Options, Simulation
from sglang_tknp.launch.planner.trace import fixed
from sglang_tknp.scheduler_ext.ledger import whole_pages

LARGEST_BATCH = 2048  # of the sweep for the crossover


@dataclass(frozen=True, slots=True, kw_only=True)
class Crossover:
    """Where TKNP overtakes DP, in requests released at once."""

    first: int | None  # the smallest batch at which it is ahead; None: nowhere
    always: int | None  # ahead at this and at every larger batch that was tried
    most: int  # the largest batch that was tried


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    setting: Setting
    workload: Workload
    rows: tuple[Row, ...]
    crossover: Crossover | None  # None where TKNP or DP cannot serve
    recommendation: Recommendation

    @property
    def fits(self) -> bool:
        return self.recommendation.name is not None


def make_plan(
    setting: Setting,
    workload: Workload,
    *,
    names: Sequence[str] | None = None,
    options: Options = AS_SERVED,
    server: Server = PLAIN,
    bands: bool = True,
    on_progress: Callable[[str], None] = lambda name: None,
) -> Plan:
    """Simulate every layout and choose.

    Args:
        names: layouts to compare; None for all that are worth it.
        server: what the launch command is to say beside the layout.
        on_progress: hears the layout that is simulated next.
    """
    outcomes = compare(
        setting,
        workload.trace,
        names=names,
        slo_per_token=workload.slo_per_token,
        options=options,
        bands=bands,
        on_progress=on_progress,
    )
    rows = tuple(_row(outcome, setting, workload, options) for outcome in outcomes)
    on_progress("crossover")
    both = {"tknp", "dp"} <= {row.outcome.name for row in rows if row.outcome.given is not None}
    return Plan(
        setting=setting,
        workload=workload,
        rows=rows,
        crossover=find_crossover(setting, workload, options) if both else None,
        recommendation=recommend(setting, workload, rows, server),
    )


def _row(outcome: Outcome, setting: Setting, workload: Workload, options: Options) -> Row:
    layout, metrics = outcome.layout, outcome.given
    if layout is None:
        return Row(outcome=outcome)
    length = max(1, round(workload.mean_input + workload.mean_output))
    limit = layout.running_limit(options.max_running)
    whole = whole_pages(length, options.page_size)
    resident = tuple(min(held, limit) for held in layout.resident(whole))
    row = Row(
        outcome=outcome,
        weights=max(layout.weights),
        kv_tokens=layout.kv_tokens,
        kv_range=_kv_range(outcome.name, setting),
        resident=resident,
        launchable=commands.why_not_launched(outcome.name, setting),
    )
    if metrics is None:
        return row
    rows, terms = typical_step(layout, metrics, workload)
    binds = what_binds(metrics, terms, limit)
    return replace(row, step_rows=rows, terms=terms, binds=binds)


def _kv_range(name: str, setting: Setting) -> tuple[int, int]:
    """KV tokens over the range of the memory."""
    found = [
        build(name, scenario.applied(setting)).kv_tokens
        for scenario in scenarios(setting)
        if scenario.network == "given"
    ]
    return min(found), max(found)


def typical_step(layout: Layout, metrics: Metrics, workload: Workload) -> tuple[int, Terms]:
    """Rows and terms of a step of one group at the run's peak, its contexts half written."""
    group = max(layout.groups, key=lambda owners: sum(metrics.peak_requests[o] for o in owners))
    rows = tuple(metrics.peak_requests[owner] for owner in group)
    context = workload.mean_input + workload.mean_output / 2
    return sum(rows), layout.terms(rows, [n * context for n in rows])


def what_binds(metrics: Metrics, terms: Terms, max_running: int = ANY_LENGTH) -> str:
    """What to have more of: room if requests wait for an owner, else what takes most of a step."""
    if metrics.mean_wait > WAITING * metrics.mean_completion:
        limited = max(metrics.peak_requests) >= max_running
        return "--max-running-requests" if limited else "KV capacity"
    network = ("exchange", "handoff", "hops", "attention merge")
    dense = ("dense", "elementwise", "not hidden")
    shares = {
        "attention bandwidth": terms.get("attention", 0.0),
        "dense products": sum(terms.get(name, 0.0) for name in dense),
        "all-reduces": terms.get("all-reduce", 0.0),
        "messages between nodes": sum(terms.get(name, 0.0) for name in network),
        "step overhead": terms.get("step overhead", 0.0),
    }
    return max(shares, key=lambda name: shares[name])


def find_crossover(
    setting: Setting, workload: Workload, options: Options = AS_SERVED, most: int = 256
) -> Crossover:
    """Sweep batches of requests of mean length, released at once, on TKNP and DP as given.

    Waves make both curves rise and fall, so there are two answers: first ahead, and ahead ever
    after.
    """
    length = (round(workload.mean_input), max(1, round(workload.mean_output)))
    if workload.is_burst:
        most = max(most, 2 * len(workload.trace))
    batches = batches_up_to(min(most, LARGEST_BATCH))
    speeds = {}
    for name in ("tknp", "dp"):
        layout = build(name, setting)
        runs = (Simulation(layout, fixed(b, *length), options).simulate() for b in batches)
        speeds[name] = [measure(run).throughput for run in runs]
    ahead = [one > other for one, other in zip(speeds["tknp"], speeds["dp"], strict=True)]
    first, always = first_and_for_good(ahead)
    return Crossover(
        first=None if first is None else batches[first],
        always=None if always is None else batches[always],
        most=batches[-1],
    )
