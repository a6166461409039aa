"""Foreign KV is never read: with every slot that no request owns poisoned, tokens stay the same.

The pool starts the other way that users have, `sglang serve --config file.yaml`, and mixes
prefill chunks and decode rows in one batch.
"""

import os
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.serve.client import PROMPTS, generate, generate_all, owners, tokens
from tests.serve.server import Server, base_args

pytestmark = pytest.mark.serve

SGLANG = str(Path(sys.executable).with_name("sglang"))
CANARY = Path(__file__).parent / "canary"
CONFIG = """
enable-tknp: true
tp-size: 2
attn-dp-size: 2
tknp-layer-blocks: "2,3"
disable-radix-cache: true
enable-mixed-chunk: true
"""


@pytest.mark.timeout(300)
@pytest.mark.parametrize("slots", [True, False], ids=["slots", "exact rows"])
def test_poisoned_kv_is_never_read(
    slots: bool, checkpoint: Any, stock_tokens: Any, tmp_path: Path
) -> None:
    config = tmp_path / "tknp.yaml"
    config.write_text(CONFIG + ("tknp-force-slots: true\n" if slots else ""))
    args = [*base_args(checkpoint("llama")), "--config", str(config)]
    path = os.pathsep.join([str(CANARY), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
    env = {"PYTHONPATH": path, "TKNP_CANARY_LOG": str(tmp_path / "canary")}
    server = Server(args, tmp_path / "log", env, launch=(SGLANG, "serve"))
    try:
        server.wait_ready()
        for _ in range(2):  # the second time in slots that the first time freed
            replies = generate_all(server, PROMPTS)
            assert tokens(replies) == stock_tokens("llama", 1)
            assert owners(replies) == {0, 1}
            # Lone requests leave most slots empty: those read and write SGLang's place 0 only.
            assert generate(server, PROMPTS[2])["output_ids"] == stock_tokens("llama", 1)[2]
        check_canary_lived(tmp_path)
        states = [state["tknp"] for state in server.get_json("/server_info")["internal_states"]]
        assert all(bool(state["decode_slots"]) == slots for state in states)
    finally:
        server.stop()


def check_canary_lived(folder: Path) -> None:
    reports = sorted(folder.glob("canary.[0-9]"))
    assert len(reports) == 2, "one report per rank"
    for report in reports:
        num_buffers, num_freed = map(int, report.read_text().split())
        assert num_buffers == 2 * 5, "keys and values of all five layers on every node"
        assert num_freed > 200
