"""What a report's plots show: numbers only, as series (series.py) or cells of a map.

Throughputs are simulated as in compare.py; steps and the throughput per user are single steps at
full batches, without waits, waves or drain.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from sglang_tknp.launch.planner.compare import Outcome, build, compare, flips, least_regret
from sglang_tknp.launch.planner.crossing import first_and_for_good
from sglang_tknp.launch.planner.hardware import GIB
from sglang_tknp.launch.planner.layout_stock import Dp
from sglang_tknp.launch.planner.layouts import Layout, Setting
from sglang_tknp.launch.planner.metrics import measure
from sglang_tknp.launch.planner.recommend import simplest_first
from sglang_tknp.launch.planner.series import Figure, Panel, Series
from sglang_tknp.launch.planner.simulate import Simulation
from sglang_tknp.launch.planner.trace import Arrival, fixed

CONTEXTS = (4096, 8192, 16_384, 32_768, 65_536, 98_304, 131_072)
BATCHES = (4, 8, 16, 32, 64, 96, 128, 256)
# Finer, for only one scenario is simulated.
CROSSOVER_BATCHES = (*range(2, 32, 2), *range(32, 64, 4), *range(64, 128, 8), *range(128, 257, 16))
CROSSOVER = "Crossover against DP"
CROSSOVER_NOTE = (
    "Lines: ahead at this and at every larger batch; bands begin where a layout is first ahead, "
    "for waves let it fall back. Lines that coincide are drawn a little apart. As given."
)
NO_CROSSOVER = "DP does not fit this pool: its weights leave no room for KV."
STEP_NOTE = (
    "Every layout with as many requests as it holds, so of different batches. Of two active roots "
    "the dense part hides behind attention, and only what shows is drawn. As given."
)


@dataclass(frozen=True, slots=True)
class Shape:
    """Tokens of the workload's mean request."""

    input_tokens: int
    output_tokens: int

    @property
    def length(self) -> int:
        """What its owner reserves for it."""
        return self.input_tokens + self.output_tokens

    @property
    def context(self) -> float:
        """In the middle of its output."""
        return self.input_tokens + self.output_tokens / 2


def mean_shape(trace: Sequence[Arrival]) -> Shape:
    count = len(trace)
    return Shape(
        round(sum(a.input_tokens for a in trace) / count),
        max(1, round(sum(a.output_tokens for a in trace) / count)),
    )


def memory_figure(setting: Setting, outcomes: Sequence[Outcome]) -> Figure:
    """Bytes of one node by layout: weights of the fullest node, KV, and what neither can use."""
    built = [(o, o.layout) for o in outcomes if o.layout is not None]
    weights = [max(layout.weights) / GIB for _, layout in built]
    token = setting.model.kv_token_bytes(1) / GIB / setting.num_nodes
    room = [layout.kv_tokens * token for _, layout in built]
    total = setting.node_memory / GIB
    rest = [max(0.0, total - w - kv) for w, kv in zip(weights, room, strict=True)]
    places = tuple(float(i) for i in range(len(built)))
    parts = (("weights", weights), ("KV", room), ("unusable", rest))
    names = [o.title if layout.fits else f"{o.title} (does not fit)" for o, layout in built]
    panel = Panel(
        title=f"memory of one node: {total:.0f} GiB for weights and KV",
        x_label="GiB",
        y_label="",
        series=tuple(
            Series(label=name, kind="bar", style=name, x=places, y=tuple(values))
            for name, values in parts
        ),
        ticks=tuple(zip(places, names, strict=True)),
        stacked=True,
        horizontal=True,
    )
    return Figure(
        name="memory",
        title="Memory of one node",
        panels=(panel,),
        notes=(
            "Unusable: KV heads that ranks repeat, what uneven stages leave over, and a node too "
            "small for its weights. Activations and graphs are outside the usable memory.",
        ),
    )


def step_figure(outcomes: Sequence[Outcome], shape: Shape) -> Figure:
    """One step of each layout with as many mean requests as it holds, by what takes the time."""
    steps = []
    for outcome in outcomes:
        layout = outcome.layout
        if layout is None or not layout.fits or not any(layout.resident(shape.length)):
            continue
        held = layout.resident(shape.length)
        rows = max((tuple(held[owner] for owner in group) for group in layout.groups), key=sum)
        terms = layout.terms(rows, [n * shape.context for n in rows])
        steps.append((f"{outcome.title}: {sum(held)} requests", terms))
    places = tuple(float(i) for i in range(len(steps)))
    kinds = list(dict.fromkeys(kind for _, terms in steps for kind in terms))
    panel = Panel(
        title="one step at the edge of the KV capacity",
        x_label="ms",
        y_label="",
        series=tuple(
            Series(
                label=kind,
                kind="bar",
                style=kind,
                x=places,
                y=tuple(1e3 * terms.get(kind, 0.0) for _, terms in steps),
            )
            for kind in kinds
        ),
        ticks=tuple((place, name) for place, (name, _) in zip(places, steps, strict=True)),
        stacked=True,
        horizontal=True,
    )
    return Figure(name="step", title="Step time", panels=(panel,), notes=(STEP_NOTE,))


@dataclass(frozen=True, slots=True)
class Grid:
    """Every layout over batches of equal requests, released at once."""

    contexts: tuple[int, ...]  # input tokens
    batches: tuple[int, ...]
    cells: Mapping[tuple[int, int], tuple[Outcome, ...]]  # by (context, batch)


@dataclass(frozen=True, slots=True)
class Cell:
    """One context and batch in the map of the best layout."""

    context: int
    batch: int
    best: Outcome | None  # by throughput as given; None: nothing can serve it
    undecided: bool  # some scenario ranks another first


def make_grid(
    setting: Setting,
    names: Sequence[str],
    output_tokens: int,
    *,
    contexts: Sequence[int] = CONTEXTS,
    batches: Sequence[int] = BATCHES,
    on_progress: Callable[[str], None] = lambda name: None,
) -> Grid:
    """Simulate every cell; contexts beyond the model's own are left out."""
    longest = setting.model.max_context or max(contexts)
    kept = tuple(c for c in contexts if c + output_tokens <= longest) or tuple(contexts[:1])
    cells = {}
    for context in kept:
        on_progress(f"map at {context} tokens")
        for batch in batches:
            trace = fixed(batch, context, output_tokens)
            cells[context, batch] = tuple(compare(setting, trace, names=names))
    return Grid(kept, tuple(batches), cells)


def best_of(grid: Grid) -> list[Cell]:
    """The layout of least regret in every cell, as the plan recommends it."""
    cells = []
    for (context, batch), outcomes in grid.cells.items():
        able = [outcome for outcome in outcomes if outcome.given is not None]
        best = least_regret(able, simplest_first) if able else None
        undecided = best is not None and any(
            flips(best, other) for other in able if other is not best
        )
        cells.append(Cell(context, batch, best, undecided))
    return cells


def crossover_figure(
    setting: Setting,
    titles: Mapping[str, str],
    contexts: Sequence[int],
    output_tokens: int,
    batches: Sequence[int] = CROSSOVER_BATCHES,
) -> Figure:
    """The batch from which each layout is ahead of DP, as given, over the context."""
    if not (base := Dp(setting)).fits:
        return Figure(name="crossover", title=CROSSOVER, panels=(), notes=(NO_CROSSOVER,))
    points: dict[str, list[tuple[int, int, int]]] = {name: [] for name in titles}
    layouts = {name: build(name, setting) for name in titles if name.split("-tp")[0] != Dp.name}
    for context in contexts:
        traces = [fixed(batch, context, output_tokens) for batch in batches]
        alone = [throughput(base, trace) for trace in traces]
        for name, layout in layouts.items():
            pairs = zip(traces, alone, strict=True)
            first, good = first_and_for_good(
                [throughput(layout, trace) > other for trace, other in pairs]
            )
            if first is not None and good is not None:
                points[name].append((context, batches[first], batches[good]))
    series = tuple(s for name, title in titles.items() for s in _crossings(name, title, points))
    panel = Panel(
        title="ahead of DP from this batch on",
        x_label="context (input tokens)",
        y_label="batch (requests released at once)",
        series=series,
        ticks=tuple((float(c), f"{c / 1024:g}K") for c in contexts),
        x_log=True,
        y_log=True,
        dodge=True,
    )
    return Figure(
        name="crossover",
        title=CROSSOVER,
        panels=(panel,),
        notes=(f"Batches up to {batches[-1]} were tried.", CROSSOVER_NOTE),
    )


def _crossings(
    name: str, title: str, points: Mapping[str, Sequence[tuple[int, int, int]]]
) -> list[Series]:
    if not points[name]:
        return []
    x, low, high = (tuple(map(float, values)) for values in zip(*points[name], strict=True))
    line = Series(label=title, kind="line", style=name, x=x, y=high)
    if low == high:
        return [line]
    return [Series(label=title, kind="band", style=name, x=x, low=low, high=high), line]


def throughput(layout: Layout, trace: Sequence[Arrival]) -> float:
    """Completion throughput; 0 if an owner cannot hold the longest request."""
    longest = max(a.input_tokens + a.output_tokens for a in trace)
    if not layout.fits or max(layout.capacity) < longest:
        return 0.0
    return measure(Simulation(layout, trace).simulate()).throughput


def step_points(layout: Layout, shape: Shape) -> list[tuple[int, float, float]]:
    """(requests, tokens/s of one user, tokens/s of one GPU) from one request to a full pool.

    Requests lie evenly on the owners, so that all owners hold what the first does.
    """
    owners = len(layout.capacity)
    most = owners * min(layout.resident(shape.length))
    batches = [2**i for i in range(most.bit_length()) if 2**i < most] + [most] * bool(most)
    points = []
    for batch in batches:
        held = [batch // owners + (owner < batch % owners) for owner in range(owners)]
        seconds, tokens = 0.0, 0.0
        for group in layout.groups:
            rows = tuple(held[owner] for owner in group)
            if sum(rows):
                step = layout.step_seconds(rows, [n * shape.context for n in rows])
                seconds, tokens = max(seconds, step), tokens + sum(rows) / step
        points.append((batch, 1 / seconds, tokens / layout.num_ranks))
    return points


def user_figure(outcomes: Sequence[Outcome], shape: Shape) -> Figure:
    """Throughput of a GPU against that of a user, as the batch grows to the capacity."""
    series = []
    for outcome in outcomes:
        if outcome.layout is None or not outcome.layout.fits:
            continue
        if points := step_points(outcome.layout, shape):
            _, user, gpu = zip(*points, strict=True)
            series.append(
                Series(label=outcome.title, kind="line", style=outcome.name, x=user, y=gpu)
            )
    panel = Panel(
        title=f"steady steps at {shape.context:.0f} context tokens",
        x_label="tokens per second of one user",
        y_label="tokens per second of one GPU",
        series=tuple(series),
    )
    return Figure(
        name="users",
        title="Throughput per GPU against speed per user",
        panels=(panel,),
        notes=(
            "As given, without waits. Markers double the batch from 1 request, on the right, to "
            "what the KV capacity holds, on the left.",
        ),
    )
