"""Proves the plan: who fits, what binds, where TKNP overtakes DP, what is recommended and why."""

import re
from dataclasses import replace

import pytest

from sglang_tknp.launch.planner.commands import Server
from sglang_tknp.launch.planner.compare import (
    MEMORIES,
    NETWORKS,
    OVERLAPS,
    SPANS,
    Outcome,
    Scenario,
    build,
    candidates,
    compare,
    flips,
    least_regret,
    regret,
    scenarios,
    score,
)
from sglang_tknp.launch.planner.crossing import batches_up_to, first_and_for_good
from sglang_tknp.launch.planner.hardware import GIB
from sglang_tknp.launch.planner.metrics import Metrics, measure
from sglang_tknp.launch.planner.plan import find_crossover, make_plan, what_binds
from sglang_tknp.launch.planner.recommend import Workload
from sglang_tknp.launch.planner.simulate import Options, Simulation
from sglang_tknp.launch.planner.text import assumptions, plan_json, plan_text
from sglang_tknp.launch.planner.trace import fixed
from tests.unit.planner_pools import burst, setting

POOL = setting()


def metrics(**changes: object) -> Metrics:
    plain = Metrics(
        completed=4,
        refused=0,
        seconds=10,
        throughput=100,
        mean_wait=0,
        p95_itl=0.05,
        mean_itl=0.05,
        mean_completion=10,
        p95_completion=10,
        attainment=None,
        peak_requests=(2, 2),
        peak_waiting=0,
        saturated=False,
        is_burst=True,
    )
    return replace(plain, **changes)  # type: ignore[arg-type]


def outcome(name: str, *throughputs: float) -> Outcome:
    """With one throughput for each of the first scenarios."""
    found = Outcome(name=name, title=name, layout=None, given=metrics(throughput=throughputs[0]))
    found.by_scenario = {
        scenario: metrics(throughput=speed)
        for scenario, speed in zip(scenarios(POOL), throughputs, strict=False)
    }
    return found


def test_scenarios_are_all_of_what_is_uncertain() -> None:
    found = list(scenarios(POOL))
    assert len(set(found)) == len(MEMORIES) * len(NETWORKS) * len(SPANS) * len(OVERLAPS)


def test_what_the_user_has_fixed_no_scenario_changes() -> None:
    pinned = replace(
        POOL,
        known=frozenset({"pp_overlap", "dcp_span"}),
        pp_overlap=0.6,
        dcp_span="cross",
        measured={"tknp": 900_000},
    )
    found = list(scenarios(pinned))
    assert len(found) == len(NETWORKS)
    for scenario in found:
        applied = scenario.applied(pinned)
        assert (applied.pp_overlap, applied.dcp_span) == (0.6, "cross")
        assert applied.node_memory == pinned.node_memory


def test_memory_is_uncertain_for_all_and_most_for_full_copies() -> None:
    constant = POOL.hardware.constants["usable_memory"]
    for memory, end in (("low", constant.low), ("high", constant.high)):
        applied = Scenario(memory, "given", "node", 1.0).applied(POOL)
        assert end is not None
        assert applied.node_memory == pytest.approx(end * GIB * 8, abs=8)
    plan = make_plan(POOL, burst(8), names=["tknp", "dp"])
    tknp, dp = (row.kv_range[0] / row.kv_tokens for row in plan.rows)
    assert dp < 0.75 < 0.9 < tknp < 1


def test_a_slow_network_has_each_constant_at_its_slow_end() -> None:
    constants = POOL.hardware.constants
    for network, latency, bandwidth in (("slow", "high", "low"), ("fast", "low", "high")):
        hw = Scenario("given", network, "cross", 0.0).applied(POOL).hardware
        for name in ("exchange_latency", "message_latency", "cross_allreduce_doubling"):
            assert hw.constants[name].value == getattr(constants[name], latency)
        for name in ("message_bandwidth", "cross_allreduce_bandwidth"):
            assert hw.constants[name].value == getattr(constants[name], bandwidth)
        # What all layouts share stays: it would move them together.
        assert hw.constants["attention_efficiency"] == constants["attention_efficiency"]
    given = Scenario("given", "given", "node", 1.0).applied(POOL)
    assert given.hardware.constants == constants


def test_a_ranking_flips_only_where_scenarios_disagree() -> None:
    assert flips(outcome("a", 10, 20), outcome("b", 15, 15))
    assert not flips(outcome("a", 10, 20), outcome("b", 9, 19))
    assert not flips(outcome("a", 10.1, 20), outcome("b", 10, 20.1)), "nobody knows 1 %"
    # Both ranges overlap, but no scenario puts b first.
    assert not flips(outcome("a", 10, 30), outcome("b", 9, 12))


def test_least_regret_is_never_far_from_the_best() -> None:
    sure, poor, wild = outcome("sure", 40, 40), outcome("poor", 41, 20), outcome("wild", 60, 10)
    assert regret(sure, [sure, poor, wild]) == 1.5
    assert regret(wild, [sure, poor, wild]) == 4
    assert least_regret([wild, poor, sure]) is sure
    # The best worst case alone would be taken here, and is 3 times behind when it matters.
    steady, fast = outcome("steady", 20, 20), outcome("fast", 18, 60)
    assert least_regret([steady, fast]) is fast
    same = outcome("as sure", 40, 40)
    assert least_regret([sure, same]).name == "as sure"  # the first in order
    never = outcome("never", 50, 50)
    never.by_scenario[next(scenarios(POOL))] = None
    assert regret(never, [never, sure]) == float("inf")


def test_arrivals_over_time_are_scored_by_their_completion() -> None:
    quick = metrics(is_burst=False, mean_completion=5, throughput=100)
    slow = metrics(is_burst=False, mean_completion=10, throughput=101)
    assert score(quick) == 2 * score(slow)
    assert score(metrics(throughput=101)) > score(metrics(throughput=100))
    assert score(None) == score(metrics(completed=0)) == 0


def test_a_layout_is_simulated_once_for_what_it_does_not_depend_on() -> None:
    sure = replace(POOL, measured={"dp": 221_135, "tknp": 900_000, "pp": 3_000_000})
    dp, pp, tknp = compare(sure, fixed(8, 32_768, 16), names=["dp", "pp", "tknp"])
    assert len({id(m) for m in dp.by_scenario.values()}) == 1
    assert len({id(m) for m in tknp.by_scenario.values()}) == 3
    assert len({id(m) for m in pp.by_scenario.values()}) == 6
    for scenario, found in pp.by_scenario.items():
        layout = build("pp", scenario.applied(sure))
        again = measure(Simulation(layout, fixed(8, 32_768, 16)).simulate())
        assert found == again
    assert pp.low < pp.high


def test_what_is_worth_comparing_depends_on_what_fits() -> None:
    names = candidates(POOL)
    assert names == ["tknp", "tknp-dual", "dp", "tp", "pp", "dcp", "attention-dp"]
    small = candidates(setting("llama-3.1-8b", nodes=2))
    assert [n for n in small if n.startswith("dp-tp")] == ["dp-tp1", "dp-tp2", "dp-tp4"]
    large = candidates(setting("llama-3.1-405b"))  # 756 GiB: two nodes at least
    assert "pp2" in large and not [n for n in large if n.startswith("dp-tp")]


@pytest.mark.parametrize(
    ("name", "complaint"),
    [
        ("dp-tp3", "layout dp-tp3: 3 does not divide the 8 ranks of a node"),
        ("pp3", "layout pp3: 3 does not divide the 4 nodes"),
        ("ep", "no layout is named ep; use tknp, "),
    ],
)
def test_unknown_layouts_are_refused(name: str, complaint: str) -> None:
    with pytest.raises(ValueError, match=re.escape(complaint)):
        build(name, POOL)


def test_a_layout_that_cannot_be_says_why() -> None:
    odd = setting(nodes=3)
    found = {o.name: o for o in compare(odd, fixed(4, 1024, 8), names=["tknp-dual", "tp"])}
    assert found["tknp-dual"].reason == "two roots need an even number of nodes, not 3"
    assert found["tp"].reason == "128 heads do not divide over 24 ranks"
    big = compare(setting("llama-3.1-405b"), fixed(4, 1024, 8), names=["dp"])[0]
    assert big.reason == "its weights leave no room for KV"
    (long,) = compare(POOL, fixed(1, 400_000, 8), names=["dp"])
    assert long.reason == "an owner holds 221135 KV tokens, and the longest request needs 400008"


def test_waiting_binds_before_any_part_of_a_step() -> None:
    terms = {"attention": 3.0, "dense": 2.0, "elementwise": 0.5, "exchange": 0.4}
    assert what_binds(metrics(mean_wait=1), terms) == "KV capacity"
    assert what_binds(metrics(mean_wait=0.4), terms) == "attention bandwidth"
    assert what_binds(metrics(), {**terms, "elementwise": 1.5}) == "dense products"
    assert what_binds(metrics(mean_wait=1), terms, max_running=2) == "--max-running-requests"
    assert what_binds(metrics(), {"exchange": 2.0, "handoff": 1.5, "attention": 3.0}) == (
        "messages between nodes"
    )


def test_first_ahead_and_ahead_for_good_differ() -> None:
    assert first_and_for_good([False, True, False, True, True]) == (1, 3)
    assert first_and_for_good([True, True]) == (0, 0)
    assert first_and_for_good([False, True, False]) == (1, None)
    assert first_and_for_good([]) == (None, None)


def test_batches_of_a_sweep_rise_to_the_largest() -> None:
    assert batches_up_to(3) == [1, 2, 3]
    found = batches_up_to(300)
    assert found[:32] == list(range(1, 33))
    assert found[-1] == 300
    assert all(
        4 <= b - a <= max(4, a // 8) for a, b in zip(found[31:-2], found[32:-1], strict=True)
    )


def test_the_crossover_is_where_the_curves_cross() -> None:
    found = find_crossover(POOL, burst(128))
    speeds = {
        (name, batch): measure(
            Simulation(build(name, POOL), fixed(batch, 32_768, 1024)).simulate()
        ).throughput
        for name in ("tknp", "dp")
        for batch in (24, 25)
    }
    assert found.first == found.always == 25  # DP's replicas hold 24
    few = find_crossover(POOL, burst(128), Options(max_running=8))
    assert few.first is None, "with two requests a node TKNP has nothing to gain"
    assert speeds["tknp", 24] < speeds["dp", 24]
    assert speeds["tknp", 25] > speeds["dp", 25]
    assert find_crossover(POOL, burst(128, 1024), most=16).first is None


def test_at_low_concurrency_dp_is_recommended() -> None:
    plan = make_plan(POOL, burst(16))
    assert plan.recommendation.name == "dp"
    assert "replicas send nothing between nodes" in plan.recommendation.reasons[-1]
    assert plan.recommendation.commands[0].count("--tp-size 8 ") == 1


def test_long_contexts_at_high_concurrency_are_for_tknp() -> None:
    plan = make_plan(POOL, burst(128), server=Server(model_path="my-model"))
    chosen = plan.recommendation
    assert chosen.name == "tknp"
    assert chosen.undecided == ("PP", "DCP")
    assert chosen.commands == (
        "python -m sglang.launch_server --model-path my-model --enable-tknp --tp-size 32 "
        "--attn-dp-size 4 --nnodes 4 --node-rank $RANK --dist-init-addr $FIRST_HOST:5000",
    )
    rows = {row.outcome.name: row for row in plan.rows}
    assert rows["dp"].resident == (6, 6, 6, 6)
    assert rows["dp"].binds == "KV capacity"
    able = [r.outcome for r in plan.rows if r.launchable is None and r.outcome.given]
    regrets = {o.name: regret(o, able) for o in able}
    assert min(regrets, key=lambda name: regrets[name]) == "tknp"
    assert chosen.faster == ("PP",)  # ideal pipelines, as given
    assert rows["tknp-dual"].launchable == "not implemented: planned only"
    assert rows["attention-dp"].launchable is not None  # of Llama, in SGLang


def test_small_models_are_for_small_replicas() -> None:
    plan = make_plan(setting("llama-3.1-8b", nodes=2), burst(1024, 2048, 128))
    assert plan.recommendation.name == "dp-tp4"
    assert "--tp-size 4 --dp-size 2" in plan.recommendation.commands[0]


def test_a_model_larger_than_a_node_rules_dp_out() -> None:
    plan = make_plan(setting("llama-3.1-405b"), burst(8))
    assert "plain DP is out" in plan.recommendation.reasons[0]
    assert plan.crossover is None
    assert plan.recommendation.name is not None


def test_nothing_fits_on_one_node() -> None:
    plan = make_plan(setting("llama-3.1-405b", nodes=1), burst(4))
    assert not plan.fits
    assert plan.recommendation.reasons[-1].startswith("Nothing fits")
    assert plan.recommendation.commands == ()


def test_a_slo_rules_out_layouts_that_miss_it_in_what_is_undecided() -> None:
    """Ideal pipelines would meet this one; pipelines without overlap would not."""
    plan = make_plan(POOL, burst(64, slo_per_token=0.07, slo_target=0.9))
    rows = {row.outcome.name: row.outcome for row in plan.rows}
    given = rows["pp"].given
    assert given is not None and given.attainment == 1
    assert plan.recommendation.name == "tknp"
    assert plan.recommendation.meets_slo
    missed = make_plan(POOL, burst(128, slo_per_token=0.01))
    assert missed.recommendation.meets_slo is False
    assert missed.recommendation.name == "tknp"
    assert "no layout meets it" in missed.recommendation.reasons[-1]


def test_the_text_says_what_it_assumes_first() -> None:
    plan = make_plan(setting(machine="h100-paper"), burst(32))
    lines = assumptions(plan.setting, plan.workload)
    assert lines[0] == "assumed"
    assert any("fitted     exchange_latency = " in line for line in lines[:10])
    assert any("simulated: nothing here was measured" in line for line in lines[:10])
    assert any(line.startswith("  Crossover: ") for line in plan_text(plan).splitlines())


def test_json_has_all_that_the_text_has() -> None:
    plan = make_plan(POOL, burst(32, slo_per_token=0.1))
    found = plan_json(plan)
    assert next(iter(found)) == "assumptions"
    assert found["assumptions"]["hardware"]["constants"]["exchange_latency"]["unit"] == "us"
    rows = {row["name"]: row for row in found["layouts"]}
    assert rows["dp"]["kv_tokens_by_owner"] == [221_135] * 4
    for row in rows.values():
        assert sum(row["step_terms"].values()) > 0
        assert row["worst_throughput"] <= row["metrics"]["throughput"]
        assert row["metrics"]["throughput"] <= row["best_throughput"]
    assert found["recommendation"]["name"] in rows


def test_measured_capacity_beats_the_estimate() -> None:
    measured = replace(POOL, measured={"tknp": 500_000})
    plan = make_plan(measured, burst(32), names=["tknp", "dp"])
    assert [row.kv_tokens for row in plan.rows] == [2_000_000, 4 * 221_135]


def test_a_mean_is_of_the_workload() -> None:
    load = Workload(trace=[*fixed(1, 10, 4), *fixed(3, 30, 8)], description="")
    assert (load.mean_input, load.mean_output) == (25, 7)
    assert load.is_burst
