"""Pure parts of bench/compare.py: the toy's ratios, the workloads, and what runs sum up to."""

import json
import math
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "bench"))

from compare_predict import expected_kv_tokens  # noqa: E402
from compare_results import (  # noqa: E402
    agreement,
    covered,
    crossover,
    medians,
    most_at_once,
    peak_resident,
    percentiles,
    request_rows,
    summary,
)
from compare_systems import (  # noqa: E402
    Pool,
    Settings,
    layout_flags,
    server_env,
    server_flags,
    why_not,
)
from compare_toy import PAPER, Toy, ratios, split_heads  # noqa: E402
from compare_workloads import (  # noqa: E402
    CONTEXTS,
    Point,
    client_args,
    mixed_lengths,
    plan,
    quantile,
    resident,
    write_mixed,
)

TOY = Toy()


def test_paper_replica_holds_6_3_2():
    assert [int(PAPER.resident_per_replica(context)) for context in CONTEXTS] == [6, 3, 2]


@pytest.mark.parametrize("toy", [TOY, split_heads(TOY)])
def test_toy_has_the_papers_ratios(toy):
    for row in ratios(toy, 2, CONTEXTS):
        if row["what"] != "KV heads per rank of a node":
            assert row["toy"] == pytest.approx(row["paper"], rel=0.02), row


def test_split_heads_change_no_bytes():
    other = split_heads(TOY)
    assert other.weight_bytes == TOY.weight_bytes
    assert other.kv_bytes_per_token() == TOY.kv_bytes_per_token()
    assert other.heads % 2 == other.kv_heads % 2 == 0


def test_weight_bytes_are_those_of_the_checkpoint():
    from transformers import LlamaConfig, LlamaForCausalLM

    small = Toy(hidden=8, intermediate=12, layers=2, heads=2, kv_heads=1, head_dim=16, vocab=32)
    config = LlamaConfig(
        hidden_size=8,
        intermediate_size=12,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        vocab_size=32,
        tie_word_embeddings=False,
    )
    parameters = LlamaForCausalLM(config).parameters()
    assert small.weight_bytes == sum(p.numel() * 4 for p in parameters)


def test_pools_with_one_copy_hold_the_same_kv():
    tknp, pp = (expected_kv_tokens(TOY, name, 2) for name in ("tknp", "pp"))
    assert 0.97 < pp / tknp < 1  # PP has the smallest stage's tokens, TKNP each owner's
    # A lone KV head is repeated on both ranks, two are not.
    assert expected_kv_tokens(TOY, "tp", 2) < 0.5 * pp
    assert expected_kv_tokens(split_heads(TOY), "tp", 2) == pytest.approx(pp, rel=0.03)


def test_plan_goes_from_all_fits_to_waves():
    dp, edge = resident(TOY, 2, 64 * 1024)
    assert (dp, edge) == (6, 20)
    points = plan(TOY, 2, quick=False, rounds=3)
    assert len({point.name for point in points}) == len(points)
    sweep = [p.requests for p in points if p.kind == "fixed" and p.context == 64 * 1024]
    assert min(sweep) < dp and edge in sweep and max(sweep) > edge
    assert [p.repeats for p in points if p.name == "64K 20 burst"] == [3]
    assert {p.name for p in plan(TOY, 2, quick=True, rounds=1)} >= {"64K 20 burst"}


def test_requests_fit_the_context_length():
    longest = max(sum(TOY.lengths(context)) for context in CONTEXTS)
    assert max(longest, *mixed_lengths(TOY, 128)) < Settings.context_length <= TOY.positions


def test_mixed_lengths_are_the_papers():
    lengths = [quantile((i + 0.5) / 128) for i in range(128)]
    assert sum(lengths) / 128 == pytest.approx(32898, rel=0.02)
    assert sum(length > 65536 for length in lengths) / 128 == 0.125
    assert sum(sorted(lengths)[96:]) / sum(lengths) == pytest.approx(0.572, abs=0.02)
    with pytest.raises(ValueError, match="above 1"):
        quantile(1.1)


def test_mixed_dataset_has_the_lengths_in_words(tmp_path):
    write_mixed(TOY, 16, tmp_path / "m.jsonl")
    lines = [json.loads(line) for line in (tmp_path / "m.jsonl").read_text().splitlines()]
    sizes = [[len(turn["content"].split()) for turn in line["conversations"]] for line in lines]
    assert [sum(size) for size in sizes] == mixed_lengths(TOY, 16)


def test_client_is_given_exact_lengths_and_no_limit(tmp_path):
    args = client_args(Point("fixed", 20), TOY, Path("m"), 1, tmp_path)
    given = dict(zip(args, args[1:], strict=False))
    assert given["--random-range-ratio"] == "1.0"
    assert given["--request-rate"] == "inf"
    assert int(given["--random-input-len"]) + int(given["--random-output-len"]) == 250
    assert given["--goodput"] == f"e2el:{120 * 218}"
    assert "--max-concurrency" not in args


def test_systems_differ_in_layout_only():
    settings = Settings(Path("m"), 0.5)
    common = None
    for name in ("tknp", "tp", "pp", "attention-dp", "dcp"):
        flags = server_flags(name, Pool(), settings)
        rest = flags[: len(flags) - len(layout_flags(name, Pool()))]
        assert common in (None, rest)
        common = rest
    assert layout_flags("dp", Pool(2, 4)) == ["--dp-size", "2", "--tp-size", "4"]
    assert layout_flags("tp", Pool(2, 4)) == ["--tp-size", "8"]
    assert server_env("dp", settings, ["x"])["PYTHONPATH"].endswith(":x")
    assert "SGLANG_INIT_NEW_TOKEN_RATIO" in server_env("tknp", settings, [])


def test_what_cannot_run_is_said():
    assert "fewer KV heads" in (why_not("tp", Pool(), TOY, cpu=True) or "")
    assert why_not("tp", Pool(), TOY, cpu=False) is None
    assert why_not("tp", Pool(), split_heads(TOY), cpu=True) is None
    assert "divide" in (why_not("tp", Pool(nodes=3), TOY, cpu=False) or "")
    assert why_not("dcp", Pool(), TOY, cpu=True) and not why_not("dcp", Pool(), TOY, cpu=False)
    assert why_not("pp", Pool(), TOY, cpu=True) is None


def test_percentiles_are_measured_values():
    assert percentiles(list(range(1, 101))) == {"p50": 50, "p95": 95, "p99": 99}
    assert percentiles([3.0]) == {"p50": 3.0, "p95": 3.0, "p99": 3.0}
    assert percentiles([]) == {}


def test_most_at_once_counts_a_handover_once():
    assert most_at_once([(0, 2), (1, 3), (2, 4)]) == 2
    assert most_at_once([]) == 0


def test_a_wave_that_follows_another_is_not_beside_it():
    first, second = {"start": 0.0, "finish": 9.003}, {"start": 9.0, "finish": 18.0}
    assert peak_resident([first, second]) == 1
    assert peak_resident([first, {"start": 8.0, "finish": 18.0}]) == 2


def test_covered_counts_overlaps_once():
    assert covered([(0, 2), (1, 3), (5, 6), (5.2, 5.4)]) == 4


def record(received, started, ended, rank, tokens=10):
    return {
        "request_received_ts": received,
        "forward_entry_time": started,
        "prefill_finished_time": started + 0.5,
        "e2e_latency": ended - received,
        "prompt_tokens": 4,
        "completion_tokens": tokens,
        "dp_rank": rank,
    }


def test_summary_of_a_run():
    records = [record(101, 103, 111, 1), record(100, 100, 104, 0), record(100, 104, 110, None)]
    rows = request_rows(records)
    assert [row["arrival"] for row in rows] == [0, 0, 1]
    found = summary(rows, {"itls": [[0.1, 0.3], [0.2]], "output_throughput": 2.5}, slo_ms=900)
    assert found["throughput"] == pytest.approx(30 / 11)
    assert found["queue_wait"] == pytest.approx((0 + 4 + 2) / 3)
    assert found["completion"]["mean"] == pytest.approx((4 + 10 + 10) / 3)
    assert found["itl_ms"]["p50"] == pytest.approx(200)
    assert found["slo_attainment"] == pytest.approx(1 / 3)
    assert found["prefill_share"] == pytest.approx(1 / 11)
    assert (found["peak_resident"], found["peak_resident_per_owner"]) == (2, {0: 1, 1: 1})


def test_medians_by_system_and_point():
    def run(system, value):
        return {
            "system": system,
            "point": {"name": "p"},
            "summary": {"a": value, "b": {"c": value}},
        }

    found = medians([run("tknp", 1), run("dp", 9), run("tknp", 3), run("tknp", 2)])
    assert found == [
        {"system": "tknp", "point": "p", "runs": 3, "a": 2, "b": {"c": 2}},
        {"system": "dp", "point": "p", "runs": 1, "a": 9, "b": {"c": 9}},
    ]


def test_agreement_names_the_first_difference():
    found = agreement([[1, 2, 3], [4, 5, 6]], [[1, 2, 3], [4, 0, 6]])
    assert found == {"outputs": 2, "equal": 1, "first_difference": [1]}


def test_crossover_is_where_tknp_stays_ahead():
    def sweep(pairs):
        return [
            {"requests": n, "system": system, "throughput": value}
            for n, values in pairs.items()
            for system, value in zip(("tknp", "dp"), values, strict=True)
        ]

    assert crossover(sweep({2: (2, 3), 4: (4, 4), 8: (9, 5), 16: (9, 5)})) == 8
    assert crossover(sweep({2: (4, 3), 4: (3, 4), 8: (9, 5)})) == 8
    assert crossover(sweep({2: (4, 3), 4: (3, 4)})) is None
    assert math.isinf(Point("fixed", 1).rate)


def test_attention_share_of_the_paper():
    from compare_machine import paper_attention_share

    # Figure 1: nearly 70 % for 128 requests of 32K on one node.
    assert paper_attention_share(128, 32 * 1024) == pytest.approx(0.70, abs=0.01)
    assert paper_attention_share(10, 64 * 1024) == pytest.approx(0.28, abs=0.01)
