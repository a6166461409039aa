"""The line of a simulated run against SGLang's own benchmark: its keys, and what it computes."""

import ast
import inspect
import math
import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from sglang.benchmark import goodput, serving

from sglang_tknp.launch.planner import results, trace
from sglang_tknp.launch.planner.simulate import Run, Simulation
from tests.unit.pool_oracle import Ask, Oracle, Toy, random_trace

pytestmark = pytest.mark.upstream
SLO = 0.8  # seconds per output token
SAME = (
    *("duration", "completed", "concurrency", "max_output_tokens_per_s"),
    *("max_concurrent_requests", "total_input_text_tokens", "total_input_vision_tokens"),
)


@pytest.fixture(scope="module")
def simulated() -> tuple[Run, list[Ask]]:
    rng = random.Random(3)
    requests = [a._replace(output_tokens=12) for a in random_trace(rng, 80, 330, 1, 30.0)]
    requests[0] = requests[0]._replace(seconds=0.0)  # the benchmark's clock starts with it
    layout = Toy([600, 300], step=0.2, per_row=0.01, per_token=2e-4, max_overtakes=16)
    requests[7] = requests[7]._replace(input_tokens=5000)  # refused
    return Simulation(layout, requests).simulate(), Oracle(layout, requests).run()


@pytest.fixture(scope="module")
def line(simulated: tuple[Run, list[Ask]]) -> dict[str, Any]:
    return results.benchmark_line(
        simulated[0], tag="simulated", request_rate=2.5, slo_per_token=SLO, about=None
    )


def written_keys() -> set[str]:
    """Keys of the dictionaries that the benchmark writes, from its source."""
    tree = ast.parse(inspect.getsource(serving.benchmark))
    return {
        key.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Dict)
        if getattr(node.targets[0], "id", "") in ("result", "result_details")
        for key in node.value.keys
        if isinstance(key, ast.Constant)
    }


def output_of(ask: Ask) -> serving.RequestFuncOutput:
    """What the benchmark's client would have seen of a simulated request."""
    if ask.refused:
        return serving.RequestFuncOutput(success=False, prompt_len=ask.input_tokens, error="no")
    return serving.RequestFuncOutput(
        success=True,
        start_time=ask.arrival,
        ttft=ask.first - ask.arrival,
        latency=ask.finish - ask.arrival,
        itl=[later - time for time, later in zip(ask.times, ask.times[1:], strict=False)],
        prompt_len=ask.input_tokens,
        output_len=ask.output_tokens,
        generated_text="x " * ask.output_tokens,
    )


def test_the_line_has_every_key_of_the_benchmark(line: dict[str, Any]) -> None:
    keys = written_keys()
    assert {"max_concurrent_requests", "itls", "p99_e2e_latency_ms", "errors"} <= keys
    assert not keys - set(line)
    assert set(goodput.GoodputMetrics.__struct_fields__) <= set(line)


def test_the_benchmark_computes_the_same(
    simulated: tuple[Run, list[Ask]], line: dict[str, Any]
) -> None:
    asks = simulated[1]
    outputs = [output_of(ask) for ask in asks]
    seconds = max(ask.finish for ask in asks)
    lengths = [
        SimpleNamespace(
            prompt_len=ask.input_tokens, text_prompt_len=ask.input_tokens, vision_prompt_len=0
        )
        for ask in asks
    ]
    tokenizer: Any = SimpleNamespace(encode=lambda text, **_: text.split())
    metrics, output_lens = serving.calculate_metrics(lengths, outputs, seconds, tokenizer, "sglang")
    assert line["output_lens"] == output_lens
    assert line["ttfts"] == pytest.approx([output.ttft for output in outputs])
    assert line["input_lens"] == [output.prompt_len for output in outputs]
    assert line["duration"] == pytest.approx(seconds)
    renamed = {
        "total_input_tokens": metrics.total_input,
        "total_output_tokens": metrics.total_output,
        "total_output_tokens_retokenized": metrics.total_output_retokenized,
    }
    of_benchmark = {
        name: getattr(metrics, name)
        for name in line
        if name.endswith(("_ms", "_throughput")) or name in SAME
        if hasattr(metrics, name)
    }
    assert len(of_benchmark) == 4 * 6 + 4 + 4
    expected = of_benchmark | renamed
    assert {name: line[name] for name in expected} == pytest.approx(expected)


def test_the_benchmark_counts_the_same_goodput(
    simulated: tuple[Run, list[Ask]], line: dict[str, Any]
) -> None:
    outputs = [output_of(ask) for ask in simulated[1]]
    found = goodput.calculate_goodput(outputs, line["goodput_slos_ms"], line["duration"])
    assert 0.1 < found.slo_attainment < 0.9
    for name in goodput.GoodputMetrics.__struct_fields__:
        assert line[name] == pytest.approx(getattr(found, name)), name


def test_our_own_line_is_a_trace_again(tmp_path: Path) -> None:
    requests = trace.poisson(trace.paper_mixed(16), 1.0, 7)
    run = Simulation(Toy([10**6]), requests).simulate()
    for tag, rate in (("poisson", 1.0), ("burst", math.inf)):
        line = results.benchmark_line(
            run, tag=tag, request_rate=rate, slo_per_token=None, about=None
        )
        path, _ = results.write(tmp_path, line, run)
    assert trace.load(path, tag="poisson") == requests == trace.load(path, index=1)
