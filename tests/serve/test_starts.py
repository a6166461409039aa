"""Other ways to start: stock servers on the CPU platform, `engine()`, and a death at start."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.serve.client import PROMPTS, generate_all, tokens
from tests.serve.server import Server, base_args, serve, tknp_args
from tests.serve.test_parity import find_rank, gone_after

pytestmark = pytest.mark.serve

BROKEN = Path(__file__).parent / "broken"

ENGINE = """
import json, sys
import sglang_tknp

if __name__ == "__main__":
    engine = sglang_tknp.engine(
        model_path=sys.argv[1], tp_size=2, attn_dp_size=2, dtype="float32", context_length=1024,
        chunked_prefill_size=64, max_running_requests=32, tknp_layer_blocks="4,1",
        tknp_device_memory_gb=0.25, log_level="info",
    )
    prompts = json.loads(sys.argv[2])
    greedy = {"temperature": 0, "max_new_tokens": 24, "ignore_eos": True}
    replies = engine.generate(input_ids=prompts, sampling_params=greedy)
    engine.shutdown()
    print("TOKENS", json.dumps([reply["output_ids"] for reply in replies]))
"""


@pytest.mark.timeout(300)
@pytest.mark.parametrize("flags", [{"dp_size": 2}, {"pp_size": 2}], ids=["dp", "pp"])
def test_stock_on_cpu(flags: Any, checkpoint: Any, stock_tokens: Any, tmp_path: Path) -> None:
    """Stock data and pipeline parallelism run on the CPU platform: later comparisons need them."""
    with serve(base_args(checkpoint("qwen3"), **flags), tmp_path / "log") as server:
        assert tokens(generate_all(server, PROMPTS)) == stock_tokens("qwen3", 1)


@pytest.mark.timeout(300)
def test_engine(checkpoint: Any, stock_tokens: Any, tmp_path: Path) -> None:
    """The documented way from Python gives the same tokens, and a shutdown leaves the caller."""
    script = tmp_path / "use_engine.py"
    script.write_text(ENGINE)
    command = [sys.executable, str(script), str(checkpoint("llama")), json.dumps(PROMPTS)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr[-3000:]
    (line,) = [text for text in done.stdout.splitlines() if text.startswith("TOKENS ")]
    assert json.loads(line.removeprefix("TOKENS ")) == stock_tokens("llama", 1)
    assert "sglang-tknp:" not in done.stderr, "an orderly shutdown is no failure"


@pytest.mark.timeout(300)
def test_rank_killed_at_start(checkpoint: Any, tmp_path: Path) -> None:
    """kill -9 of a rank before the pool is ready: everything ends, and the rank is named."""
    server = Server(tknp_args(checkpoint("llama"), 2), tmp_path / "log")
    try:
        victim = wait_for_rank(server, 1)
        os.kill(victim, signal.SIGKILL)
        assert gone_after(server, 10), server.tail()
        line = f"sglang-tknp: rank 1 (node 1, TP rank 0), process {victim}, was killed by SIGKILL"
        assert line in server.log.read_text()
        assert server.process.wait(5) != 0
    finally:
        server.stop()


@pytest.mark.timeout(300)
def test_a_capture_that_fails_stops_the_pool(checkpoint: Any, tmp_path: Path) -> None:
    """With its reason, although its peers are in the step's exchange by then."""
    path = os.pathsep.join([str(BROKEN), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
    args = tknp_args(checkpoint("llama"), 2, tknp_force_slots=True)
    server = Server(args, tmp_path / "log", {"PYTHONPATH": path})
    try:
        assert server.process.wait(120) != 0
        assert gone_after(server, 10), server.tail()
        pattern = (
            r"sglang-tknp: rank 1 .* stops: .*: Capture cuda graph failed: the device ran out of"
        )
        assert re.search(pattern, server.log.read_text()), server.tail()  # behind a progress bar
    finally:
        server.stop()


def wait_for_rank(server: Server, rank: int, limit: float = 120) -> int:
    deadline = time.monotonic() + limit
    while time.monotonic() < deadline:
        try:
            return find_rank(server, rank)
        except AssertionError:
            time.sleep(0.1)
    raise AssertionError(server.tail())
