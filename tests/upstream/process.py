"""Fresh Python processes for tests: SGLang's hooks and settings cannot be undone inside one."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

OURS = ("SGLANG_TKNP_", "SGLANG_CPU_", "OMP_", "SGLANG_USE_CPU_ENGINE", "SGLANG_PLUGINS")
# A line that a script prints for its test starts with this; SGLang logs to stdout too.
MARK = "result:"
TINY: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "vocab_size": 512,
    "max_position_embeddings": 1024,
    "torch_dtype": "bfloat16",
}


def run_python(script: str, *args: str, **env: str) -> subprocess.CompletedProcess[str]:
    """Run a script without this process's TKNP settings."""
    clean = {key: value for key, value in os.environ.items() if not key.startswith(OURS)}
    return subprocess.run(
        [sys.executable, "-W", "ignore", "-c", script, *args],
        capture_output=True,
        text=True,
        timeout=240,
        env={**clean, **env},
    )


def result_of(run: subprocess.CompletedProcess[str]) -> Any:
    """What the script printed after MARK, as JSON."""
    lines = [line for line in run.stdout.splitlines() if line.startswith(MARK)]
    assert len(lines) == 1 and run.returncode == 0, f"{run.returncode}\n{run.stdout}\n{run.stderr}"
    return json.loads(lines[0].removeprefix(MARK))


def our_lines(stderr: str) -> list[str]:
    return [line for line in stderr.splitlines() if line.startswith("sglang-tknp: ")]


def write_model(folder: Path, **changes: Any) -> list[str]:
    """A folder with a config.json only, and the arguments to resolve a server of it."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps({**TINY, **changes}))
    return ["--model-path", str(folder), "--skip-tokenizer-init", "--load-format", "dummy"]
