"""The paper's figures of one layer and of one pool's memory: 1, 3, 4 and 5. Numbers only.

Nothing here is a simulation in time: kernels' and collectives' seconds from costs.py, and layouts'
room from layout_*.py.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

from sglang_tknp.launch.planner.costs import Costs
from sglang_tknp.launch.planner.hardware import GIB
from sglang_tknp.launch.planner.layout_stock import Dcp, Dp, Pp
from sglang_tknp.launch.planner.layout_tknp import Tknp
from sglang_tknp.launch.planner.layouts import Layout, Setting
from sglang_tknp.launch.planner.model import Layer
from sglang_tknp.launch.planner.series import Figure, Panel, Series, published

CONTEXT = 32_768
BATCHES = (1, 2, 4, 8, 16, 32, 64, 128)
MLP_BATCHES = (*BATCHES, 256, 512)
TP_SIZES = (1, 2, 4, 8, 16, 32, 64)
MS = 1e3


def attention_seconds(costs: Costs, rows: int, context: int, tp_size: int) -> float:
    """One layer's attention of `rows` requests with `context` tokens each."""
    return costs.attention_rows(rows) + rows * context * costs.attention_token(tp_size)


def middle_layer(setting: Setting) -> Layer:
    """Recipes keep more bits in the first and the last layer."""
    return setting.model.layers[setting.model.num_layers // 2]


def layer_parts(setting: Setting, rows: int, context: int, tp_size: int) -> dict[str, float]:
    """Seconds of one layer by the names of the paper's figure 1, attention first."""
    costs, layer = Costs(setting.model, setting.hardware), middle_layer(setting)
    qkv, output = layer.attention
    attention, mlp = (half(layer, rows, tp_size) for half in (costs.attention_half, costs.mlp_half))
    return {
        "attention": attention_seconds(costs, rows, context, tp_size),
        "MLP compute": mlp.products,
        "QKV projection": costs.product(qkv, rows, tp_size),
        "output projection": costs.product(output, rows, tp_size),
        "all-reduce": attention.allreduce + mlp.allreduce,
        "other": attention.elementwise + mlp.elementwise,
    }


def _ticks(values: Sequence[int]) -> tuple[tuple[float, str], ...]:
    return tuple((float(i), str(value)) for i, value in enumerate(values))


def _bars(parts: Sequence[dict[str, float]], scale: float) -> list[Series]:
    """One series of bars per part, at 0, 1, 2, ...; a part's name is its style."""
    return [
        Series(
            label=name,
            kind="bar",
            style=name,
            x=tuple(float(i) for i in range(len(parts))),
            y=tuple(scale * part[name] for part in parts),
        )
        for name in parts[0]
    ]


def figure_1(setting: Setting, batches: Sequence[int] = BATCHES) -> Figure:
    """Components of one layer over the batch, TP inside one node, 32K context."""
    tp = setting.tp_size
    parts = [layer_parts(setting, rows, CONTEXT, tp) for rows in batches]
    last = {name: MS * seconds for name, seconds in parts[-1].items()}
    total = sum(last.values())
    claim = published(
        f"attention's share at batch {batches[-1]}",
        "attention",
        (len(batches) - 1, 0.70 * total),
        published=0.70,
        simulated=last["attention"] / total,
        show=lambda share: f"{100 * share:.1f} %",
        bound="nearly",
    )
    panel = Panel(
        title=f"one layer, TP{tp}, {CONTEXT // 1024}K context",
        x_label="batch size (requests)",
        y_label="latency (ms)",
        series=(*_bars(parts, MS), claim),
        ticks=_ticks(batches),
        stacked=True,
    )
    return Figure(
        name="figure-1", title="Figure 1, simulated: one layer's decode latency", panels=(panel,)
    )


def figure_3(
    setting: Setting,
    mlp_batches: Sequence[int] = MLP_BATCHES,
    batches: Sequence[int] = BATCHES,
    tp_sizes: Sequence[int] = (1, 4, 8, 16, 64),
) -> Figure:
    """One layer's MLP with its all-reduce, and its attention, over the batch."""
    costs, layer = Costs(setting.model, setting.hardware), middle_layer(setting)

    def mlp(rows: int, tp: int) -> float:
        return MS * costs.mlp(layer, rows, tp).seconds

    def attention(rows: int, tp: int) -> float:
        return MS * attention_seconds(costs, rows, CONTEXT, tp)

    panels = (
        _tp_panel("(a) MLP with its all-reduce", mlp, mlp_batches, tp_sizes, _mlp_claims(mlp)),
        _tp_panel(
            f"(b) attention, {CONTEXT // 1024}K context",
            attention,
            batches,
            tp_sizes,
            _attention_claims(attention),
        ),
    )
    return Figure(
        name="figure-3",
        title="Figure 3, simulated: one layer's MLP and attention latency",
        panels=panels,
        notes=("Logarithmic latencies; the paper's axes end at 2 ms.",),
    )


def _tp_panel(
    title: str,
    milliseconds: Callable[[int, int], float],
    batches: Sequence[int],
    tp_sizes: Sequence[int],
    claims: Sequence[Series],
) -> Panel:
    """One line per tensor-parallel degree, over the batch."""
    lines = tuple(
        Series(
            label=f"TP{tp}",
            kind="line",
            style=f"TP{tp}",
            x=tuple(map(float, batches)),
            y=tuple(milliseconds(rows, tp) for rows in batches),
        )
        for tp in tp_sizes
    )
    return Panel(
        title=title,
        x_label="batch size (requests)",
        y_label="latency (ms)",
        series=(*lines, *claims),
        ticks=tuple((float(b), str(b)) for b in batches),
        x_log=True,
        y_log=True,
    )


def _mlp_claims(mlp: Callable[[int, int], float]) -> list[Series]:
    """The paper's section 3.1, of TP8."""
    return [
        published(
            "TP8 MLP, batch 128 over batch 1",
            "TP8",
            (128, 1.24 * mlp(1, 8)),
            published=1.24,
            simulated=mlp(128, 8) / mlp(1, 8),
        ),
        published(
            "TP8 MLP, 4 of batch 32 over 1 of 128",
            "TP8",
            (32, 3.17 / 4 * mlp(128, 8)),
            published=3.17,
            simulated=4 * mlp(32, 8) / mlp(128, 8),
        ),
    ]


def _attention_claims(attention: Callable[[int, int], float]) -> list[Series]:
    """The paper's section 3.1."""
    absolute = [
        published(
            f"TP{tp} attention at batch 128",
            f"TP{tp}",
            (128, value),
            published=value,
            simulated=attention(128, tp),
            show="{:.2f} ms".format,
        )
        for tp, value in ((1, 5.38), (8, 0.71))
    ]
    growth = published(
        "TP8 attention, batch 128 over batch 1",
        "TP8",
        (128, 22 * attention(1, 8)),
        published=22,
        simulated=attention(128, 8) / attention(1, 8),
    )
    return [*absolute, growth]


def figure_4(setting: Setting, tp_sizes: Sequence[int] = TP_SIZES, rows: int = 128) -> Figure:
    """One layer's MLP and one all-reduce over the tensor-parallel degree."""
    costs, layer = Costs(setting.model, setting.hardware), middle_layer(setting)
    parts = []
    for tp in tp_sizes:
        mlp = costs.mlp(layer, rows, tp)
        compute = mlp.products + mlp.elementwise
        parts.append({"MLP compute": MS * compute, "all-reduce": MS * mlp.allreduce})
    series = _bars(parts, 1)
    if {1, 8, 64} <= set(tp_sizes):
        series += _mlp_size_claims(dict(zip(tp_sizes, parts, strict=True)))
    panel = Panel(
        title=f"one layer, batch {rows}",
        x_label="tensor-parallel degree (GPUs)",
        y_label="latency (ms)",
        series=tuple(series),
        ticks=_ticks(tp_sizes),
        y_top=1.2,
        stacked=True,
    )
    return Figure(
        name="figure-4",
        title="Figure 4, simulated: MLP compute and all-reduce",
        panels=(panel,),
        notes=(
            "The 6.5x is an input: constants of the all-reduce over nodes were derived with it.",
            "TP1 is a known miss: no precision of the weights gives the paper's 3.1 ms.",
        ),
    )


def _mlp_size_claims(parts: dict[int, dict[str, float]]) -> list[Series]:
    """The paper's section 3.1 and the one label in its figure 4."""
    places = {tp: place for place, tp in enumerate(parts)}
    one, node, pool = (sum(parts[tp].values()) for tp in (1, 8, 64))
    near, far = (parts[tp]["all-reduce"] for tp in (8, 64))
    return [
        published(
            "all-reduce, TP64 over TP8",
            "all-reduce",
            (places[64], parts[64]["MLP compute"] + 6.5 * near),
            published=6.5,
            simulated=far / near,
        ),
        published(
            "MLP with all-reduce, TP64 over TP8",
            "MLP compute",
            (places[64], 1.55 * node),
            published=1.55,
            simulated=pool / node,
        ),
        published(
            "TP1",
            "MLP compute",
            (places[1], 3.1),
            published=3.1,
            simulated=one,
            show="{:.2f} ms".format,
        ),
    ]


def kv_gib(layout: Layout) -> float:
    """KV of every request once, however often ranks repeat it."""
    return layout.kv_tokens * layout.model.kv_token_bytes(1) / GIB


def figure_5(setting: Setting, nodes: Sequence[int] = (1, 2, 4, 8)) -> Figure:
    """KV capacity over the nodes of the pool."""
    series = []
    room: dict[str, dict[int, float]] = {}
    for kind in (Dp, Tknp, Pp, Dcp):
        settings = {n: replace(setting, num_nodes=n) for n in nodes}
        if kind is not Dp:  # a single node is DP's
            settings.pop(1, None)
        held = {n: kv_gib(kind(s)) for n, s in settings.items() if not kind.why_not(s)}
        room[kind.name] = held
        places = tuple(float(nodes.index(n)) for n in held)
        series.append(
            Series(
                label=kind.title,
                kind="bar",
                style=kind.name,
                x=places,
                y=tuple(held.values()),
            )
        )
    for number, ratio in ((2, 3.3), (4, 4.4), (8, 5.0)):
        if room["dp"].get(number) and number in room["tknp"]:
            series.append(_capacity_claim(room, number, ratio, nodes.index(number)))
    panel = Panel(
        title="usable KV capacity",
        x_label=f"nodes of {setting.tp_size} GPUs",
        y_label="KV capacity (GiB)",
        series=tuple(series),
        ticks=_ticks(nodes),
    )
    return Figure(
        name="figure-5",
        title="Figure 5, simulated: KV capacity of the pool",
        panels=(panel,),
        notes=(
            "The paper's ratios would fit with about 22 GiB more per node where layers are split "
            "(sharded_extra); it gives no cause.",
        ),
    )


def _capacity_claim(
    room: dict[str, dict[int, float]], nodes: int, ratio: float, place: int
) -> Series:
    alone = room["dp"][nodes]
    return published(
        f"{nodes} nodes, TKNP over DP",
        "tknp",
        (place, ratio * alone),
        published=ratio,
        simulated=room["tknp"][nodes] / alone,
    )
