"""Proves the paper's figures as simulated: numbers, published markers, bands, bytes."""

import csv
import hashlib
import io
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest

from sglang_tknp.launch.planner import figures, figures_layer, figures_pool, sweep
from sglang_tknp.launch.planner.hardware import Hardware, load
from sglang_tknp.launch.planner.layout_stock import Dp, Pp
from sglang_tknp.launch.planner.layout_tknp import Tknp
from sglang_tknp.launch.planner.layouts import Setting
from sglang_tknp.launch.planner.metrics import measure
from sglang_tknp.launch.planner.paper_pools import paper_setting
from sglang_tknp.launch.planner.plotting import STYLES, style_of
from sglang_tknp.launch.planner.series import Figure, Panel, Series, published, to_csv
from sglang_tknp.launch.planner.simulate import Simulation
from sglang_tknp.launch.planner.trace import fixed


@pytest.fixture(scope="module")
def hardware() -> Hardware:
    return load("h100-paper")


@pytest.fixture(scope="module")
def setting(hardware: Hardware) -> Setting:
    return paper_setting(hardware)


def named(panel: Panel, label: str, kind: str) -> Series:
    (found,) = [s for s in panel.series if s.label == label and s.kind == kind]
    return found


def claims(panel: Panel) -> list[Series]:
    return [s for s in panel.series if s.kind == "published"]


def throughput(layout: Tknp | Dp, batch: int, context: int) -> float:
    return measure(Simulation(layout, fixed(batch, context, 1024)).simulate()).throughput


def test_figure_1_has_attention_by_hand_and_the_papers_share(setting: Setting) -> None:
    (panel,) = figures_layer.figure_1(setting, (1, 128)).panels
    # One KV head of 128 elements for K and V in BF16, at 93 % of 3,350 GB/s, and 14 us.
    by_hand = [14e-3 + b * 32768 * 512 / (0.93 * 3350e9) * 1e3 for b in (1, 128)]
    assert named(panel, "attention", "bar").y == pytest.approx(by_hand, rel=1e-9)
    total = sum(s.y[-1] for s in panel.series if s.kind == "bar")
    (claim,) = claims(panel)
    assert claim.y == pytest.approx([0.7 * total])
    assert claim.simulated == pytest.approx(by_hand[-1] / total)


def test_figure_1_parts_are_those_of_a_dense_layer(setting: Setting) -> None:
    layout = Tknp(setting)
    layer = figures_layer.middle_layer(setting)
    parts = figures_layer.layer_parts(setting, 32, 1000, 8)
    dense = layout.costs.dense_layer(layer, 32, 8).seconds
    assert sum(parts.values()) - parts["attention"] == pytest.approx(dense)


def test_figure_3_grows_as_published_markers_compare(setting: Setting) -> None:
    mlp, attention = figures_layer.figure_3(setting, (1, 32, 128), (1, 128), (1, 8, 64)).panels
    one, some, many = named(mlp, "TP8", "line").y
    growth, repeats = claims(mlp)
    assert (growth.x, growth.y) == ((128,), (pytest.approx(1.24 * one),))
    assert growth.simulated == pytest.approx(many / one)
    assert (repeats.x, repeats.y) == ((32,), (pytest.approx(3.17 / 4 * many),))
    assert repeats.simulated == pytest.approx(4 * some / many)
    tp1, tp8, ratio = claims(attention)
    assert (tp1.y, tp8.y) == ((5.38,), (0.71,))
    assert tp8.difference == pytest.approx(0, abs=0.01)
    assert ratio.y[0] == pytest.approx(22 * named(attention, "TP8", "line").y[0])
    assert named(attention, "TP8", "line").y == named(attention, "TP64", "line").y


def test_figure_4_all_reduces_by_hand(setting: Setting) -> None:
    (panel,) = figures_layer.figure_4(setting).panels
    bars = named(panel, "all-reduce", "bar").y
    size = 128 * 16384 * 2
    assert bars[0] == 0
    assert bars[3] == pytest.approx(1e3 * (5e-6 + size / 150e9))
    assert bars[6] == pytest.approx(1e3 * (30e-6 + 3 * 50e-6 + size / 120e9))
    far = claims(panel)[0]
    assert far.y[0] == pytest.approx(named(panel, "MLP compute", "bar").y[6] + 6.5 * bars[3])
    assert [claim.published for claim in claims(panel)] == [6.5, 1.55, 3.1]


def test_figure_5_is_memory_less_weights(setting: Setting) -> None:
    (panel,) = figures_layer.figure_5(setting).panels
    free = 560 - 453.77
    assert named(panel, "DP", "bar").y == pytest.approx([n * free for n in (1, 2, 4, 8)], rel=1e-3)
    tknp = named(panel, "TKNP", "bar")
    assert tknp.x == (1, 2, 3)  # a node alone is DP's
    assert tknp.y == pytest.approx([n * 560 - 453.77 for n in (2, 4, 8)], rel=2e-3)
    for claim, ratio, alone in zip(
        claims(panel), (3.3, 4.4, 5.0), named(panel, "DP", "bar").y[1:], strict=True
    ):
        assert claim.y == pytest.approx([ratio * alone])


def test_figure_8_points_are_runs_and_the_ratio_stands_on_our_dp(setting: Setting) -> None:
    short, long = figures_pool.figure_8(setting, (32_768, 98_304), (8, 32)).panels
    for panel, context in ((short, 32_768), (long, 98_304)):
        for kind in (Tknp, Dp):
            runs = [throughput(kind(setting), b, context) for b in (8, 32)]
            assert named(panel, kind.title, "line").y == pytest.approx(runs)
    assert claims(short) == []  # the largest ratio is in the other panel
    (claim,) = claims(long)
    dp = named(long, "DP", "line").y[1]
    assert (claim.x, claim.y) == ((32,), (pytest.approx(2.06 * dp),))
    assert claim.simulated == pytest.approx(named(long, "TKNP", "line").y[1] / dp)


def test_pp_is_a_band_alone_and_dcp_a_line_in_its_band(setting: Setting) -> None:
    panel = figures_pool.figure_10(setting, (16, 32)).panels[0]
    assert [s.kind for s in panel.series if s.label == "PP"] == ["band"]
    band, line = named(panel, "DCP", "band"), named(panel, "DCP", "line")
    for low, given, high in zip(band.low, line.y, band.high, strict=True):
        assert low < given < high
    assert [s.kind for s in panel.series if s.label == "DP"] == ["band", "line"]  # its memory


def test_the_networks_range_is_a_band(setting: Setting) -> None:
    uncertain = replace(setting.hardware.constants["exchange_latency"], low=20, high=120)
    constants = {**setting.hardware.constants, "exchange_latency": uncertain}
    wide = replace(setting, hardware=replace(setting.hardware, constants=constants))
    (curve,) = sweep.sweep(wide, [(8.0, [fixed(8, 32_768, 64)])], ("tknp",)).values()
    band, line = sweep.series_of(curve, figures_pool.throughput)
    assert band.kind == "band" and band.low[0] < line.y[0] < band.high[0]


def test_a_layout_that_cannot_serve_has_no_points(setting: Setting) -> None:
    small = replace(setting, node_memory=setting.node_memory // 2)
    curves = sweep.sweep(small, [(4.0, [fixed(4, 32_768, 16)])], ("tknp", "dp"))
    assert len(curves["tknp"].points) == 1 and curves["dp"].points == ()
    assert sweep.series_of(curves["dp"], figures_pool.throughput) == []
    assert sweep.best_ratio(curves["tknp"], curves["dp"], figures_pool.throughput) is None


def test_figure_11_growth_is_over_half_the_nodes(hardware: Hardware) -> None:
    setting = paper_setting(hardware, num_nodes=8)
    (panel,) = figures_pool.figure_11(setting, (64, 128)).panels
    half = throughput(Tknp(replace(setting, num_nodes=4)), 128, 32_768)
    (claim,) = [c for c in claims(panel) if c.published == 1.81]
    assert claim.y == pytest.approx([1.81 * half])
    assert claim.simulated == pytest.approx(throughput(Tknp(setting), 128, 32_768) / half)
    assert {c.published for c in claims(panel)} == {1.53, 1.7, 1.111, 1.81, 1.37, 2.0}


def test_figure_12_takes_means_over_seeds(setting: Setting) -> None:
    requests = fixed(6, 8192, 32)
    attainment, tokens, _ = figures_pool.figure_12(setting, (1,), (1, 2), requests).panels
    assert [text for _, text in tokens.ticks] == ["1", "burst"]
    bars = named(tokens, "TKNP", "bar")
    alone = [figures_pool.figure_12(setting, (1,), (seed,), requests).panels[1] for seed in (1, 2)]
    each = [named(panel, "TKNP", "bar").y[0] for panel in alone]
    assert bars.y[0] == pytest.approx(sum(each) / 2)
    # Over scenarios too.
    assert bars.low[0] <= min(each) and max(each) <= bars.high[0]
    assert [(c.published, c.bound) for c in claims(attainment)] == [
        (100, ""),
        (90, "below"),
        (90, "below"),
    ]


def test_published_labels_say_what_differs() -> None:
    claim = published("A over B", "tknp", (1, 2), published=2, simulated=1.9, bound="up to")
    assert claim.label == "paper: A over B: up to 2.00x; here 1.90x (-5.0 %)"
    bound = published("A", "dp", (1, 2), published=90, simulated=95, bound="below")
    assert bound.label.endswith("(does not hold)")
    equal = published("A", "dp", (1, 2), published=3, simulated=3 - 1e-9)
    assert equal.label.endswith("(+0.0 %)")


def test_csv_has_every_point_and_the_difference() -> None:
    line = Series(label="A, b", kind="line", style="tknp", x=(0.0, 1.0), y=(1 / 3, 2e6 / 3))
    claim = published("A", "tknp", (1.0, 4.0), published=2, simulated=2.5)
    panel = Panel(
        title="p",
        x_label="",
        y_label="",
        series=(line, claim),
        ticks=((0.0, "zero"), (1.0, "one")),
    )
    rows = list(csv.DictReader(io.StringIO(to_csv(Figure(name="f", title="", panels=(panel,))))))
    assert [(r["series"], r["x"], r["y"]) for r in rows[:2]] == [
        ("A, b", "zero", "0.333333"),
        ("A, b", "one", "666667"),
    ]
    assert (rows[2]["published"], rows[2]["simulated"], rows[2]["difference_percent"]) == (
        "2",
        "2.5",
        "25.0",
    )


DRAW = """
import sys
from pathlib import Path
from sglang_tknp.launch.planner import figures, hardware
for path in figures.draw(Path(sys.argv[1]), hardware.load("h100-sxm"), ["3", "5"]):
    print(path.name)
"""


def test_two_fresh_processes_write_the_same_bytes(tmp_path: Path) -> None:
    found = []
    for seed in ("1", "2"):
        folder = tmp_path / seed
        environment = {**os.environ, "PYTHONHASHSEED": seed}
        command = [sys.executable, "-c", DRAW, str(folder)]
        run = subprocess.run(command, capture_output=True, text=True, env=environment)
        assert run.returncode == 0, run.stderr
        names = run.stdout.split()
        assert sorted(names) == sorted(path.name for path in folder.iterdir())
        assert {Path(name).suffix for name in names} == {".png", ".svg", ".csv"}
        found.append({n: hashlib.sha256((folder / n).read_bytes()).hexdigest() for n in names})
    assert found[0] == found[1]


def test_files_say_simulated_name_the_hardware_and_have_no_date(
    tmp_path: Path, hardware: Hardware
) -> None:
    png, svg, _ = figures.draw(tmp_path, hardware, ["1"])
    text = svg.read_text()
    ElementTree.fromstring(text)
    comments = " ".join(re.findall("<!-- (.*?) -->", text))  # what the glyphs read
    assert "Figure 1, simulated" in comments and "h100-paper" in comments
    assert "exchange_latency = 63.6 us (fitted to the paper's" in comments
    assert "dc:date" not in text and "Matplotlib v" not in text
    assert b"Software" not in png.read_bytes()


def test_unknown_figures_are_refused(tmp_path: Path, hardware: Hardware) -> None:
    with pytest.raises(ValueError, match="no figure 2, 7 is simulated; those that are: 1, 3, 4"):
        figures.draw(tmp_path, hardware, ["2", "1", "7"])


def test_without_matplotlib_the_error_says_what_to_install(
    tmp_path: Path, hardware: Hardware, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ImportError, match=r"pip install matplotlib"):
        figures.draw(tmp_path, hardware, ["1"])
    assert list(tmp_path.iterdir()) == []


def test_systems_look_different_in_grey() -> None:
    systems = ("tknp", "tknp-dual", "dp", "dcp", "tp", "pp", "attention-dp")
    assert len({STYLES[name].marker for name in systems}) == len(systems)
    assert len({STYLES[name].colour for name in systems}) == len(systems)
    assert style_of("dp-tp2").colour == STYLES["dp"].colour
    assert style_of("pp2").marker != STYLES[Pp.name].marker
