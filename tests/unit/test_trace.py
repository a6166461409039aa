"""Proves the workloads: arrivals as SGLang's benchmark sends them, lengths as the paper's."""

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sglang_tknp.launch.planner import trace
from sglang_tknp.launch.planner.trace import Arrival

PUBLISHED = {
    "minimum": 8_223,
    "maximum": 126_848,
    "mean": 32_898,
    "median": 19_048,
    "std": 28_496,
    "long_share": 0.125,
    "long_token_share": 0.361,
    "longest_quarter_token_share": 0.572,
}


def test_fixed_requests_are_equal_and_all_there_at_once() -> None:
    assert trace.fixed(3, 32768, 1024) == [Arrival(0.0, 32768, 1024)] * 3


def test_bursts_keep_the_order_and_the_last_takes_what_is_left() -> None:
    found = trace.burst([5, 6, 7, 8, 9], 2, per_burst=2, seconds_between=1.5)
    assert found == [
        Arrival(0.0, 5, 2),
        Arrival(0.0, 6, 2),
        Arrival(1.5, 7, 2),
        Arrival(1.5, 8, 2),
        Arrival(3.0, 9, 2),
    ]
    assert {one.seconds for one in trace.burst([5, 6, 7], 2)} == {0.0}


@pytest.mark.parametrize(
    "make",
    [
        lambda: trace.fixed(0, 1, 1),
        lambda: trace.fixed(1, 0, 1),
        lambda: trace.fixed(1, 1, 0),
        lambda: trace.burst([1], 1, per_burst=0),
        lambda: trace.burst([1], 1, seconds_between=-1.0),
        lambda: trace.poisson([Arrival(0.0, 1, 1)], 0, 1),
        lambda: trace.poisson([Arrival(0.0, 1, 1)], float("nan"), 1),
        lambda: trace.statistics([]),
    ],
)
def test_senseless_workloads_are_refused(make: Callable[[], object]) -> None:
    with pytest.raises(ValueError, match="needs requests|cannot be released|releases|no lengths"):
        make()


def test_poisson_arrivals_are_those_of_sglangs_benchmark() -> None:
    """It seeds NumPy's global generator, sends, then draws how long it sleeps."""
    np.random.seed(42)
    at, expected = 0.0, []
    for _ in range(50):
        expected.append(at)
        at += np.random.exponential(1.0 / 2.0)
    found = trace.poisson(trace.burst(list(range(1, 51)), 7), 2.0, 42)
    assert [one.seconds for one in found] == pytest.approx(expected, rel=1e-12)
    assert [one.input_tokens for one in found] == list(range(1, 51))
    assert found[0].seconds == 0.0 and type(found[1].seconds) is float


def test_poisson_arrivals_have_the_rate_and_follow_the_seed() -> None:
    requests = trace.fixed(4001, 1, 1)
    found = trace.poisson(requests, 4.0, 1)
    assert found[-1].seconds == pytest.approx(1000, rel=0.05)
    assert found == trace.poisson(requests, 4.0, 1) != trace.poisson(requests, 4.0, 2)
    assert trace.poisson(requests, float("inf"), 1) == requests
    assert trace.poisson([], 4.0, 1) == []


def test_the_papers_workload_has_every_published_statistic() -> None:
    found = trace.statistics([one.input_tokens for one in trace.paper_mixed()])
    assert found._asdict() == pytest.approx(PUBLISHED, rel=2e-5)
    assert (found.minimum, found.maximum, found.mean, found.median) == (8223, 126848, 32898, 19048)


def test_the_papers_figures_leave_two_readings_open() -> None:
    lengths = trace.paper_lengths()
    assert not [one for one in lengths if 64_000 <= one <= 65_536]
    sample = trace.paper_lengths(28_496 * (127 / 128) ** 0.5)
    assert np.std(sample, ddof=1) == pytest.approx(28_496, rel=1e-5)
    others = trace.statistics(sample)._replace(std=28_496)
    assert others._asdict() == pytest.approx(PUBLISHED, rel=2e-5)


def test_the_papers_workload_is_128_requests_in_a_shuffled_order() -> None:
    found = trace.paper_mixed(output_tokens=512, seed=3)
    assert len(found) == 128 and {(one.seconds, one.output_tokens) for one in found} == {(0.0, 512)}
    lengths = [one.input_tokens for one in found]
    assert lengths != sorted(lengths) and sorted(lengths) == list(trace.paper_lengths())
    assert found == trace.paper_mixed(512, 3) != trace.paper_mixed(512, 4)
    assert len(set(trace.paper_lengths())) > 120, "a spread of lengths, not a few of them"


def test_other_counts_come_from_the_same_distribution() -> None:
    found = trace.mixed(20_000, seed=0)
    figures = trace.statistics([one.input_tokens for one in found])
    assert figures._asdict() == pytest.approx(PUBLISHED, rel=0.05)
    assert found == trace.mixed(20_000, seed=0) != trace.mixed(20_000, seed=1)


def test_statistics_by_hand() -> None:
    found = trace.statistics([100_000, 10_000, 30_000, 20_000, 65_536])
    assert found == trace.Statistics(
        minimum=10_000,
        maximum=100_000,
        mean=pytest.approx(45107.2),
        median=30_000,
        std=pytest.approx((3_138_993_459.2 - 45107.2**2) ** 0.5),
        long_share=0.2,
        long_token_share=pytest.approx(100_000 / 225_536),
        longest_quarter_token_share=pytest.approx(165_536 / 225_536),
    )


def write(folder: Path, *lines: dict[str, Any] | str) -> Path:
    file = folder / "trace.jsonl"
    file.write_text("".join((x if isinstance(x, str) else json.dumps(x)) + "\n" for x in lines))
    return file


def record(timestamp: object, input_length: object = 10, output_length: object = 2) -> dict:  # type: ignore[type-arg]
    return {
        "timestamp": timestamp,
        "input_length": input_length,
        "output_length": output_length,
        "hash_ids": [0, 1],
    }


def test_a_mooncake_trace_starts_at_its_first_arrival_in_order(tmp_path: Path) -> None:
    file = write(tmp_path, record(3000, 7), "", record(1500, 8), record(1500, 9, 5))
    assert trace.load(file) == [Arrival(0.0, 8, 2), Arrival(0.0, 9, 5), Arrival(1.5, 7, 2)]


def test_a_written_trace_reads_back(tmp_path: Path) -> None:
    written = trace.poisson(trace.paper_mixed(), 1.0, 7)
    trace.write_mooncake(tmp_path / "t.jsonl", written)
    found = trace.load(tmp_path / "t.jsonl")
    assert [one[1:] for one in found] == [one[1:] for one in written]
    assert [one.seconds for one in found] == pytest.approx([x.seconds for x in written], abs=1e-9)
    line = (tmp_path / "t.jsonl").read_text().splitlines()[0]
    assert json.loads(line) == {
        "timestamp": 0,
        "input_length": written[0].input_tokens,
        "output_length": 1024,
    }


def run(**fields: object) -> dict[str, object]:
    """The parts of a line of the benchmark's that a workload needs."""
    lengths = {"input_lens": [10, 20, 30], "output_lens": [1, 2, 3]}
    return {"tag": None, "dataset_name": "custom", "request_rate": 2.0, **lengths, **fields}


def test_a_benchmark_run_gets_its_arrivals_from_rate_and_seed(tmp_path: Path) -> None:
    requests = [Arrival(0.0, 10, 1), Arrival(0.0, 20, 2), Arrival(0.0, 30, 3)]
    file = write(tmp_path, run())
    assert trace.load(file) == trace.poisson(requests, 2.0, 42)
    assert trace.load(file, seed=1) == trace.poisson(requests, 2.0, 1)
    unlimited = run(request_rate=float("inf"), dataset_name="random-ids")
    assert trace.load(write(tmp_path, unlimited)) == requests


def test_one_of_several_runs_is_chosen_by_tag_or_index(tmp_path: Path) -> None:
    runs = [run(tag=tag, output_lens=[n] * 3) for n, tag in enumerate("abb", 1)]
    file = write(tmp_path, *runs)

    def output(**which: Any) -> int:
        return trace.load(file, **which)[0].output_tokens

    assert [output(tag="a"), output(index=1), output(tag="b", index=1)] == [1, 2, 3]
    there = r"there are a \(line 1\), b \(line 2\), b \(line 3\)"
    for which, number in (
        ({}, "3"),
        ({"tag": "b"}, "2"),
        ({"tag": "c"}, "no"),
        ({"index": 3}, "no"),
    ):
        with pytest.raises(ValueError, match=f"trace.jsonl: {number} runs match .*{there}"):
            output(**which)
    with pytest.raises(ValueError, match="no runs match"):
        output(index=-1)


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ([], "empty"),
        (["{"], "line 1: not JSON"),
        (["[1]"], "line 1: not a JSON object"),
        ([{"prompt": "a"}], "line 1: neither a Mooncake trace"),
        ([record(0), "", {"timestamp": 1, "input_length": 3}], "line 3: no output_length"),
        ([record(0), record("1")], "line 2: timestamp '1' is not milliseconds"),
        ([record(-1)], "line 1: timestamp -1 is not"),
        ([record(float("nan"))], "line 1: timestamp nan is not"),
        ([record(0), record(1, 0)], "line 2: input_length is 0, not a number of tokens above 0"),
        ([record(0, 1, 2.5)], "line 1: output_length is 2.5"),
        ([record(0, True)], "line 1: input_length is True"),
        (
            [run(input_lens=None)],
            "line 1: no input_lens and output_lens; run with --output-details",
        ),
        ([run(input_lens=[1])], "line 1: 1 input_lens for 3 output_lens"),
        ([run(input_lens=[], output_lens=[])], "line 1: 0 input_lens for 0"),
        ([run(output_lens=[1, 0, 1])], r"line 1: output_lens of request 1 \(0 if it failed\) is 0"),
        (
            [run(request_rate="trace")],
            "line 1: request_rate 'trace', so its arrivals are not known",
        ),
        ([run(request_rate=0)], "line 1: request_rate 0, so"),
        ([run(dataset_name="random-ids")], "line 1: dataset random-ids draws from the generator"),
        ([run(dataset_name="mooncake")], "line 1: its arrivals are those of a Mooncake trace"),
    ],
)
def test_what_is_no_trace_is_refused(
    tmp_path: Path, lines: list[dict[str, Any] | str], message: str
) -> None:
    with pytest.raises(ValueError, match=f"trace.jsonl(, |: ){message}"):
        trace.load(write(tmp_path, *lines))


def test_a_large_trace_loads_in_about_a_second(tmp_path: Path) -> None:
    file = write(tmp_path, *(record(n, 1 + n % 9000) for n in range(100_000)))
    start = time.process_time()
    assert len(trace.load(file)) == 100_000
    assert time.process_time() - start < 4  # 0.5 s; room for a slow machine
