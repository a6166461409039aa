"""A plan as one HTML file: no script, no network, readable on paper and on a phone.

The page is templates/report.html.j2; plots are SVG inside it. jinja2 and matplotlib are optional
and imported inside functions only.
"""

import html
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import resources
from pathlib import Path
from typing import Any

from sglang_tknp.launch.planner import report_data
from sglang_tknp.launch.planner.compare import Outcome
from sglang_tknp.launch.planner.hardware import CONSTANTS, GIB, Hardware
from sglang_tknp.launch.planner.heatmap import compose_map
from sglang_tknp.launch.planner.layouts import Setting
from sglang_tknp.launch.planner.model import PlannedModel
from sglang_tknp.launch.planner.plotting import compose, saved, styled
from sglang_tknp.launch.planner.report_data import Cell, Shape, mean_shape
from sglang_tknp.launch.planner.series import Figure, to_csv
from sglang_tknp.launch.planner.trace import Arrival

MISSING = "reports need jinja2, which is not installed; run: pip install jinja2 matplotlib"
Pairs = list[tuple[str, str]]
# Of the table of layouts, between their titles and their notes.
COLUMNS = (
    *("weights", "kv", "resident"),
    *("low", "given", "high"),
    *("wait", "itl", "p95_itl", "completion", "slo"),
)


@dataclass(frozen=True, slots=True)
class Plot:
    """One picture of the page, and its numbers."""

    title: str
    caption: str
    svg: str
    table: str  # CSV


def write(path: Path, *arguments: Any, **options: Any) -> None:
    """`render` into a file."""
    path.write_text(render(*arguments, **options), encoding="utf-8")


def check_libraries() -> Any:
    """The page's template; ImportError, with what to install, if a library is missing."""
    page = _page()
    with styled("check"):
        pass
    return page


def render(
    setting: Setting,
    trace: Sequence[Arrival],
    outcomes: Sequence[Outcome],
    recommendation: str,
    *,
    workload: str = "",
    slo_per_token: float | None = None,
    names: Sequence[str] | None = None,
    contexts: Sequence[int] = report_data.CONTEXTS,
    batches: Sequence[int] = report_data.BATCHES,
    on_progress: Callable[[str], None] = lambda name: None,
) -> str:
    """The page of a plan.

    Args:
        outcomes: of `compare.compare` on this setting and trace.
        recommendation: plain text; an empty line parts paragraphs.
        workload: where the trace is from.
        slo_per_token: seconds, as it was given to `compare`.
        names: layouts of the map and the crossover; None for all that can be built.
        contexts, batches: input tokens and requests of the map.
        on_progress: hears what is simulated or drawn next.

    Raises:
        ImportError: jinja2 or matplotlib is not installed; it says what to install.
    """
    page = check_libraries()  # before anything is simulated
    shape = mean_shape(trace)
    built = {o.name: o.title for o in outcomes if o.layout is not None}
    titles = {name: built.get(name, name) for name in names or built}
    plots = _plots(setting, outcomes, titles, shape, contexts, batches, on_progress)
    return page.render(
        title=f"{setting.model.name} on {setting.num_nodes} nodes",
        recommendation=[part for part in recommendation.split("\n\n") if part.strip()],
        assumptions=(
            ("Model", model_facts(setting.model)),
            ("Pool", pool_facts(setting)),
            ("Workload", workload_facts(trace, workload, slo_per_token)),
        ),
        hardware=setting.hardware,
        fitted=setting.hardware.fitted(),
        constants=constant_rows(setting.hardware),
        layouts=[layout_row(outcome, shape) for outcome in outcomes],
        shape=shape,
        has_slo=slo_per_token is not None,
        plots=plots,
    )


def _plots(
    setting: Setting,
    outcomes: Sequence[Outcome],
    titles: Mapping[str, str],
    shape: Shape,
    contexts: Sequence[int],
    batches: Sequence[int],
    on_progress: Callable[[str], None],
) -> list[Plot]:
    """All plots of the page; only here is anything simulated."""
    grid = report_data.make_grid(
        setting,
        list(titles),
        shape.output_tokens,
        contexts=contexts,
        batches=batches,
        on_progress=on_progress,
    )
    on_progress("crossover")
    crossing = report_data.crossover_figure(setting, titles, grid.contexts, shape.output_tokens)
    on_progress("plots")
    return [
        _plot(report_data.memory_figure(setting, outcomes)),
        _plot(report_data.step_figure(outcomes, shape)),
        _map_plot(report_data.best_of(grid)),
        _plot(report_data.user_figure(outcomes, shape)),
        _plot(crossing),
    ]


def _page() -> Any:
    """The template; ImportError if jinja2 is not installed."""
    try:
        import jinja2
    except ImportError:
        raise ImportError(MISSING) from None
    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    text = resources.files(__package__).joinpath("templates", "report.html.j2").read_text()
    return environment.from_string(text)


def model_facts(model: PlannedModel) -> Pairs:
    return [
        ("name", model.name),
        ("weights of one copy", f"{model.weight_bytes / GIB:,.1f} GiB, from {model.sizes_from}"),
        ("parameters", f"{model.parameters / 1e9:,.1f} billion"),
        ("layers", f"{model.num_layers} of hidden size {model.hidden_size}"),
        ("heads", f"{model.num_heads}, {model.num_kv_heads} of KV, {model.head_dim} wide"),
        (
            "KV of one token",
            f"{model.kv_token_bytes(1) / 1024:,.1f} KiB, {model.kv_element_bytes} bytes an element",
        ),
    ]


def pool_facts(setting: Setting) -> Pairs:
    per_rank = setting.node_memory / setting.tp_size / GIB
    facts = [
        ("nodes", f"{setting.num_nodes} of {setting.tp_size} GPUs"),
        ("for weights and KV", f"{per_rank:.1f} GiB of each GPU"),
        ("DCP groups, as given", f"{setting.dcp_span} (node: inside one; cross: across nodes)"),
        ("PP overlap, as given", f"{setting.pp_overlap:g} (0: none, 1: full)"),
    ]
    for name, tokens in setting.measured.items():
        facts.append((f"measured KV of {name}", f"{tokens:,} tokens of each owner"))
    return facts


def workload_facts(
    trace: Sequence[Arrival], description: str, slo_per_token: float | None
) -> Pairs:
    inputs, outputs = ([a[i] for a in trace] for i in (1, 2))
    last = max(a.seconds for a in trace)
    facts = [("from", description)] if description else []
    facts += [
        ("requests", f"{len(trace):,}"),
        ("input tokens", _spread(inputs)),
        ("output tokens", _spread(outputs)),
        ("arrivals", f"over {last:,.1f} s" if last else "all at once"),
    ]
    if slo_per_token is not None:
        facts.append(("SLO", f"{1e3 * slo_per_token:g} ms per output token, arrival to completion"))
    return facts


def _spread(values: Sequence[float]) -> str:
    low, high = min(values), max(values)
    if low == high:
        return f"{low:,}"
    return f"{low:,} to {high:,}, mean {sum(values) / len(values):,.0f}"


def constant_rows(hardware: Hardware) -> list[dict[str, str]]:
    """Every number of the hardware file, with its meaning."""
    rows = []
    for name, constant in hardware.constants.items():
        ends = [end for end in (constant.low, constant.high) if end is not None]
        rows.append(
            {
                "name": name,
                "meaning": CONSTANTS[name][2],
                "value": f"{constant.value:g}",
                "range": " to ".join(f"{end:g}" for end in ends),
                "unit": constant.unit,
                "status": constant.status,
                "source": constant.source or "none stated",
            }
        )
    return rows


def layout_row(outcome: Outcome, shape: Shape) -> dict[str, str]:
    """One line of the table of layouts; what is not known is empty."""
    row = dict.fromkeys(COLUMNS, "")
    row |= {"title": outcome.title, "reason": outcome.reason or ""}
    if (layout := outcome.layout) is not None:
        held = sum(layout.resident(shape.length))
        row["weights"] = f"{max(layout.weights) / GIB:,.1f}"
        row["kv"] = f"{layout.kv_tokens:,}"
        owners = len(layout.capacity)
        row["resident"] = f"{held:,} ({owners} owner{'s' if owners > 1 else ''})"
    if (given := outcome.given) is not None:
        slo = "" if given.attainment is None else f"{100 * given.attainment:.1f}%"
        row |= {
            "low": f"{outcome.low:,.0f}" if outcome.by_scenario else "",
            "given": f"{given.throughput:,.0f}",
            "high": f"{outcome.high:,.0f}" if outcome.by_scenario else "",
            "wait": f"{given.mean_wait:,.1f}",
            "itl": f"{1e3 * given.mean_itl:,.1f}",
            "p95_itl": f"{1e3 * given.p95_itl:,.1f}",
            "completion": f"{given.mean_completion:,.1f}",
            "slo": slo,
        }
        if given.saturated:
            row["reason"] = "saturated: arrivals outpace completions"
    return row


def _plot(figure: Figure) -> Plot:
    if not figure.panels:
        return Plot(figure.title, " ".join(figure.notes), "", "")
    with styled(figure.name):
        svg = saved(compose(replace(figure, notes=()), title=False), "svg")
    inlined = inline_svg(svg.decode(), figure.name, figure.title)
    return Plot(figure.title, " ".join(figure.notes), inlined, to_csv(figure))


def _map_plot(cells: Sequence[Cell]) -> Plot:
    title = "Best layout by context and concurrency"
    caption = (
        "Completion throughput as given, in output tokens per second. Hatched: a scenario inside "
        "the uncertainty ranks another layout first."
    )
    with styled("map"):
        svg = saved(compose_map(cells), "svg")
    lines = ["context,batch,best,tokens_per_second,undecided"]
    for cell in cells:
        name, speed = "", ""
        if cell.best is not None and cell.best.given is not None:
            name, speed = cell.best.name, f"{cell.best.given.throughput:.6g}"
        lines.append(f"{cell.context},{cell.batch},{name},{speed},{int(cell.undecided)}")
    return Plot(title, caption, inline_svg(svg.decode(), "map", title), "\n".join(lines) + "\n")


def inline_svg(text: str, prefix: str, label: str) -> str:
    """An SVG file as a part of a page: ids of its own, as wide as the page, no comments."""
    body = text[text.index("<svg") : text.rindex("</svg>") + len("</svg>")]
    body = re.sub(r"<!--.*?-->", "", body, flags=re.DOTALL)
    body = re.sub(r'(\bid="|href="#|url\(#)', rf"\g<1>{prefix}-", body)
    head, rest = body.split(">", 1)
    head = re.sub(r' (width|height|version)="[^"]*"', "", head)
    return f'{head} role="img" aria-label="{html.escape(label)}">{rest}'
