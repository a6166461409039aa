"""Proves the report: one file without network or script, its numbers, escaping, missing extras."""

import hashlib
import os
import re
import subprocess
import sys
from dataclasses import replace
from html.parser import HTMLParser
from typing import Any

import pytest

from sglang_tknp.launch.planner import report, report_data
from sglang_tknp.launch.planner.compare import Outcome, build, compare, regret
from sglang_tknp.launch.planner.hardware import CONSTANTS, load
from sglang_tknp.launch.planner.layouts import Setting
from sglang_tknp.launch.planner.paper_pools import paper_setting
from sglang_tknp.launch.planner.plotting import compose, saved, styled
from sglang_tknp.launch.planner.report_data import Shape
from sglang_tknp.launch.planner.trace import fixed

SHAPE = Shape(32_768, 1024)
SMALL: dict[str, Any] = {"contexts": (8192, 32_768), "batches": (4, 64)}
HOSTILE = "<script>alert(1)</script>\"'&--><img src=http://evil.example/x>"


@pytest.fixture(scope="module")
def setting() -> Setting:
    hardware = load("h100-sxm").with_values("figure 8", "fitted", exchange_latency=70)
    return paper_setting(hardware)


@pytest.fixture(scope="module")
def outcomes(setting: Setting) -> list[Outcome]:
    return compare(setting, fixed(32, 32_768, 1024), slo_per_token=0.1)


@pytest.fixture(scope="module")
def page(setting: Setting, outcomes: list[Outcome]) -> str:
    hostile = replace(setting, model=replace(setting.model, name=HOSTILE))
    trace = fixed(32, 32_768, 1024)
    text = f"Use TKNP.\n\n{HOSTILE}"
    return report.render(hostile, trace, outcomes, text, slo_per_token=0.1, **SMALL)


class Reader(HTMLParser):
    """Tags with their attributes, ids, and whether every tag is closed."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag != "meta":
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_the_page_is_whole_and_loads_nothing(page: str) -> None:
    reader = Reader()
    reader.feed(page)
    assert reader.open == []
    names = {tag for tag, _ in reader.tags}
    assert not names & {"script", "img", "link", "iframe", "object", "embed", "image"}
    values = [(k, v or "") for _, attributes in reader.tags for k, v in attributes.items()]
    loads = [(k, v) for k, v in values if "//" in v and not k.startswith("xmlns")]
    assert loads == []
    assert all(v.startswith("#") for k, v in values if k.endswith("href"))
    assert not any(k.startswith("on") for k, _ in values)
    assert "@import" not in page and not re.search(r"url\((?!#)", page)


def test_plots_share_no_ids_and_find_their_own(page: str) -> None:
    reader = Reader()
    reader.feed(page)
    ids = [a["id"] for _, a in reader.tags if "id" in a]
    assert len(ids) == len(set(ids)) > 100
    used = set(re.findall(r'href="#([^"]+)"|url\(#([^)]+)\)', page))
    assert {a or b for a, b in used} <= set(ids)
    assert page.count("<svg") == 5


def test_a_hostile_name_is_text(page: str) -> None:
    assert "<script" not in page and "evil.example/x>" not in page
    assert page.count("&lt;script&gt;alert(1)&lt;/script&gt;&#34;&#39;&amp;--&gt;") == 4


def test_every_constant_is_there_with_its_source(page: str, setting: Setting) -> None:
    assert "exchange_latency = 70 us (figure 8)" in page
    for name, constant in setting.hardware.constants.items():
        row = re.search(f"<tr><td>{name}</td>.*?</tr>", page)
        assert row is not None, name
        cells = re.findall(r"<td[^>]*>(.*?)</td>", row.group())
        assert cells[1:3] == [f"{constant.value:g}", constant.unit]
        assert cells[4] == constant.status
    assert len(report.constant_rows(setting.hardware)) == len(CONSTANTS)


def test_the_table_has_each_layouts_numbers(outcomes: list[Outcome]) -> None:
    by_name = {outcome.name: outcome for outcome in outcomes}
    dp = report.layout_row(by_name["dp"], SHAPE)
    given = by_name["dp"].given
    assert given is not None
    assert dp["resident"] == "24 (4 owners)"  # 106 GiB over 16.2 GiB a request: 6 per replica
    assert (dp["low"], dp["given"], dp["high"]) == (f"{given.throughput:,.0f}",) * 3
    pp = report.layout_row(by_name["pp"], SHAPE)
    assert float(pp["low"].replace(",", "")) < float(pp["high"].replace(",", ""))
    missing = Outcome(name="x", title="X", layout=None, reason="too few heads")
    assert report.layout_row(missing, SHAPE) | {"title": "", "reason": ""} == dict.fromkeys(dp, "")


def test_memory_bars_fill_a_node(setting: Setting, outcomes: list[Outcome]) -> None:
    (panel,) = report_data.memory_figure(setting, outcomes).panels
    weights, room, rest = (series.y for series in panel.series)
    for bars in zip(weights, room, rest, strict=True):
        # The fullest node's weights beside the mean node's KV: blocks of layers are not equal.
        assert sum(bars) == pytest.approx(560, abs=2)
    names = [name for _, name in panel.ticks]
    dp, tp = names.index("DP"), names.index("TP")
    assert (weights[dp], room[dp]) == (pytest.approx(453.77, abs=0.2), pytest.approx(106.3, abs=1))
    # 32 ranks repeat 8 KV heads four times, so a quarter of what is free is of use.
    assert rest[tp] == pytest.approx(0.75 * (560 - weights[tp]), rel=1e-3)


def test_memory_that_does_not_hold_the_weights_is_said(setting: Setting) -> None:
    small = replace(setting, node_memory=400 << 30)
    (panel,) = report_data.memory_figure(small, compare(small, fixed(1, 8, 8))).panels
    assert "DP (does not fit)" in [name for _, name in panel.ticks]


def test_a_steps_parts_are_the_layouts_terms(outcomes: list[Outcome]) -> None:
    (panel,) = report_data.step_figure(outcomes, SHAPE).panels
    names = [name for _, name in panel.ticks]
    place = names.index("DP: 24 requests")
    parts = {s.label: s.y[place] for s in panel.series}
    layout = build("dp", outcomes[0].layout.setting) if outcomes[0].layout else None
    assert layout is not None
    assert sum(parts.values()) == pytest.approx(1e3 * layout.step_seconds((6,), [6 * 33_280]))
    assert parts["exchange"] == 0 < parts["attention"]


def test_users_and_gpus_share_a_step(setting: Setting) -> None:
    layout = build("tknp", setting)
    points = report_data.step_points(layout, SHAPE)
    assert [batch for batch, *_ in points] == [1, 2, 4, 8, 16, 32, 64, 108]
    step = layout.step_seconds((8,) * 4, [8 * 33_280] * 4)
    assert points[5][1:] == (pytest.approx(1 / step), pytest.approx(32 / step / 32))
    one = build("dp", setting)
    alone = one.step_seconds((6,), [6 * 33_280])
    assert report_data.step_points(one, SHAPE)[-1] == (
        24,
        pytest.approx(1 / alone),
        pytest.approx(24 / alone / 32),
    )


def test_the_map_shows_what_the_plan_recommends_and_marks_what_flips(setting: Setting) -> None:
    grid = report_data.make_grid(setting, ["tknp", "dp", "dcp", "pp"], 64, **SMALL)
    cells = {(cell.context, cell.batch): cell for cell in report_data.best_of(grid)}
    assert len(cells) == 4
    short, long = cells[8192, 4], cells[32_768, 64]
    assert short.best and short.best.name == "dp" and not short.undecided
    # Ideal pipelines are faster as given, and nobody knows how far stages overlap.
    assert long.best and long.best.name == "tknp" and long.undecided
    for (context, batch), found in grid.cells.items():
        best = cells[context, batch].best
        assert best and regret(best, found) == min(regret(o, found) for o in found if o.given)


def test_the_map_leaves_out_what_the_model_cannot_read_and_what_does_not_fit(
    setting: Setting,
) -> None:
    tiny = replace(setting, node_memory=120 << 30)
    grid = report_data.make_grid(tiny, ["tknp", "dp"], 64, contexts=(65_536, 131_072), batches=(1,))
    assert grid.contexts == (65_536,)
    (cell,) = report_data.best_of(grid)
    assert cell.best is None and not cell.undecided


def test_a_plot_of_nothing_says_so(setting: Setting) -> None:
    found = report_data.crossover_figure(setting, {"tknp": "TKNP"}, (8192,), 64, batches=(4,))
    with styled("test"):
        text = saved(compose(found), "svg").decode()
    assert "<!-- nothing to show -->" in text


def test_without_dp_there_is_no_crossover(setting: Setting) -> None:
    tiny = replace(setting, node_memory=400 << 30)
    found = report_data.crossover_figure(tiny, {"tknp": "TKNP"}, (8192,), 64, batches=(4,))
    assert found.panels == () and "DP does not fit" in found.notes[0]
    trace = fixed(4, 8192, 64)
    page = report.render(tiny, trace, compare(tiny, trace, names=["tknp", "dp"]), "", **SMALL)
    assert page.count("<svg") == 4 and report_data.NO_CROSSOVER in page


def test_the_crossover_falls_with_the_context(setting: Setting) -> None:
    titles = {"tknp": "TKNP", "dp": "DP"}
    (panel,) = report_data.crossover_figure(
        setting, titles, (32_768, 98_304), 1024, batches=(4, 8, 12, 24, 28, 32)
    ).panels
    (line,) = [s for s in panel.series if s.kind == "line"]
    # Replicas hold 6 requests of 32K and 2 of 96K: 24 and 8 on four.
    assert line.y == (28, 12)


RENDER = """
from sglang_tknp.launch.planner import compare, hardware, report, trace
from sglang_tknp.launch.planner.paper_pools import paper_setting
setting = paper_setting(hardware.load("h100-sxm"))
work = trace.fixed(8, 8192, 32)
found = compare.compare(setting, work, names=["tknp", "dp"])
print(report.render(setting, work, found, "none", contexts=(4096,), batches=(4,)))
"""


def test_two_fresh_processes_write_the_same_page() -> None:
    hashes = set()
    for seed in ("1", "2"):
        environment = {**os.environ, "PYTHONHASHSEED": seed}
        command = [sys.executable, "-c", RENDER]
        run = subprocess.run(command, capture_output=True, text=True, env=environment)
        assert run.returncode == 0, run.stderr
        assert "Crossover against DP" in run.stdout
        hashes.add(hashlib.sha256(run.stdout.encode()).hexdigest())
    assert len(hashes) == 1


@pytest.mark.parametrize("missing", ["jinja2", "matplotlib"])
def test_missing_extras_are_named(
    missing: str, setting: Setting, outcomes: list[Outcome], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, missing, None)
    with pytest.raises(ImportError, match=rf"{missing}.*pip install .*matplotlib"):
        report.render(setting, fixed(1, 8, 8), outcomes, "none", **SMALL)
