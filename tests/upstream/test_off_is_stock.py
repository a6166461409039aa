"""Proves that without --enable-tknp SGLang is stock but for two hooks that add the flags.

And the other way round: with TKNP on, a process that cannot be hooked fully ends with one line.
"""

import json
from pathlib import Path
from typing import Any

import pytest

from sglang_tknp import compat
from tests.upstream.process import MARK, our_lines, result_of, run_python, write_model

pytestmark = pytest.mark.upstream

CLI_TARGETS = sorted(hook.target for hook in compat.CLI_HOOKS)

STATE = f"""
import json, os, sys
from sglang.srt.plugins import load_plugins

def state():
    from sglang.srt.arg_groups import resolution_hooks
    from sglang.srt.plugins.hook_registry import HookRegistry
    return {{
        "patched": sorted(HookRegistry._patched),
        "steps": sorted(resolution_hooks._HOOKS),
        "extensions": sorted(m for m in sys.modules if m.startswith(
            ("sglang_tknp.model_ext", "sglang_tknp.scheduler_ext", "sglang_tknp.resolution"))),
        "env": {{k: v for k, v in os.environ.items() if k.startswith("SGLANG_TKNP_")}},
    }}

def report(found):
    print("{MARK}" + json.dumps(found), flush=True)
"""
LAUNCHER = (
    STATE
    + """
load_plugins()
loaded = state()
from sglang.srt.server_args import prepare_server_args
args = prepare_server_args(sys.argv[1:])
prepared = state()
args.resolve_once()
report({"loaded": loaded, "prepared": prepared, "resolved": state()})
"""
)
SCHEDULER = STATE + "import sglang.srt.managers.scheduler\nload_plugins()\nreport(state())"
# Which classes of ours SGLang would build, before and after what a rank of a pool does.
MODELS = (
    STATE
    + """
import sglang.srt.managers.scheduler
load_plugins()
from sglang.srt.models.registry import ModelRegistry

def ours():
    found = ModelRegistry.get_supported_archs() and ModelRegistry.models
    return {a: c.__module__ for a, c in found.items() if c.__module__.startswith("sglang_tknp")}

before = ours()
import sglang_tknp.model_ext.registry as registry
registry.register_models()
registry.register_models()
registered = ours()
ModelRegistry.models["NemotronForCausalLM"] = str  # as if a user had one
registry.register_models()
report({"before": before, "registered": registered, "kept": ours() == {}})
"""
)
OUR_MODELS = {"NemotronForCausalLM": "sglang_tknp.model_ext.nemotron"}


@pytest.fixture(scope="module")
def stock(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    args = write_model(tmp_path_factory.mktemp("llama"))
    return dict(result_of(run_python(LAUNCHER, *args)))


@pytest.mark.parametrize("moment", ["loaded", "prepared", "resolved"])
def test_a_stock_launcher_has_two_hooks_and_no_extension(
    stock: dict[str, Any], moment: str
) -> None:
    found = stock[moment]
    assert found["patched"] == CLI_TARGETS
    assert found["steps"] == []
    assert found["extensions"] == []
    assert "SGLANG_TKNP_ENABLE" not in found["env"]


def test_nothing_is_in_the_environment_before_the_flags_are_read(stock: dict[str, Any]) -> None:
    assert stock["loaded"]["env"] == {}


def test_a_stock_scheduler_has_only_the_platforms_hooks_besides() -> None:
    found = result_of(run_python(SCHEDULER))
    wanted = {hook.target for hook in compat.CLI_HOOKS}
    if compat.cpu_platform_active():
        wanted |= {hook.target for hook in compat.CPU_HOOKS}
    assert set(found["patched"]) == wanted
    assert (found["steps"], found["extensions"]) == ([], [])


def test_without_tknp_sglang_has_its_own_models_only() -> None:
    """It serves a Nemotron by transformers' code, as it would without this package."""
    found = result_of(run_python(MODELS))
    assert found == {"before": {}, "registered": OUR_MODELS, "kept": True}


def test_without_tknp_sglangs_own_switch_adds_our_models() -> None:
    found = result_of(run_python(MODELS, SGLANG_EXTERNAL_MODEL_PACKAGE="sglang_tknp.model_ext"))
    assert found["before"] == found["registered"] == OUR_MODELS


def test_with_tknp_on_a_scheduler_has_every_hook_of_the_pool() -> None:
    found = result_of(run_python(SCHEDULER, SGLANG_TKNP_ENABLE="1"))
    wanted = {hook.target for hook in (*compat.CLI_HOOKS, *compat.POOL_HOOKS)}
    if compat.cpu_platform_active():
        wanted |= {hook.target for hook in compat.CPU_HOOKS}
    assert set(found["patched"]) == wanted
    assert found["steps"] == [
        "handle_cuda_graph_config",
        "handle_deprecated_dp_attention",
        "handle_model_specific_adjustments",
        "handle_other_validations",
    ]


def test_a_scheduler_that_cannot_be_hooked_ends() -> None:
    """SGLang logs what a plugin raises and goes on: only SystemExit stops it."""
    script = """
import dataclasses, sys, types
sys.modules["sglang.srt.managers.scheduler"] = types.ModuleType("stands in for the scheduler")
from sglang_tknp import compat
gone = "sglang.srt.server_args.ServerArgs.gone"
compat.POOL_HOOKS = (dataclasses.replace(compat.POOL_HOOKS[0], target=gone),)
from sglang.srt.plugins import load_plugins
load_plugins()
print("half-hooked")
"""
    run = run_python(script, SGLANG_TKNP_ENABLE="1")
    assert run.returncode == 1
    assert "half-hooked" not in run.stdout
    (line,) = our_lines(run.stderr)
    assert line.startswith(
        "sglang-tknp: cannot start: IncompatibleSglangError: "
        "sglang.srt.server_args.ServerArgs.gone is gone ("
    )
    assert "Traceback" not in run.stderr


def test_another_sglang_ends_the_launcher_with_one_line(tmp_path: Path) -> None:
    script = """
import importlib.metadata, sys
true_version = importlib.metadata.version
from sglang.srt.plugins import load_plugins
load_plugins()
from sglang.srt.server_args import prepare_server_args
importlib.metadata.version = lambda name: "0.5.24" if name == "sglang" else true_version(name)
prepare_server_args(sys.argv[1:])
print("went on")
"""
    args = ["--enable-tknp", "--tp-size", "2", "--attn-dp-size", "2"]
    run = run_python(script, *write_model(tmp_path), *args)
    assert run.returncode == 1
    assert "went on" not in run.stdout
    assert our_lines(run.stderr) == [
        "sglang-tknp: cannot start: IncompatibleSglangError: sglang 0.5.24 is installed; this "
        "sglang-tknp supports 0.5.23: pip install sglang==0.5.23"
    ]
    assert "Traceback" not in run.stderr


def test_a_config_file_works_like_the_flags(tmp_path: Path) -> None:
    (tmp_path / "tknp.yaml").write_text(
        "enable-tknp: true\ntp-size: 2\nattn-dp-size: 2\n"
        'tknp-layer-blocks: "3,1"\ntknp-exchange-timeout: 7\n'
    )
    flags = ["--enable-tknp", "--tp-size", "2", "--attn-dp-size", "2"]
    flags += ["--tknp-layer-blocks", "3,1", "--tknp-exchange-timeout", "7"]
    script = (
        STATE
        + """
load_plugins()
from sglang.srt.server_args import prepare_server_args
found = []
for argv in json.loads(sys.argv[1]):
    for key in [k for k in os.environ if k.startswith("SGLANG_TKNP_")]:
        del os.environ[key]
    args = prepare_server_args(argv)
    found.append([state(), args.tp_size, args.attn_dp_size])
report(found)
"""
    )
    model = write_model(tmp_path / "model")
    both = [[*model, "--config", str(tmp_path / "tknp.yaml")], [*model, *flags]]
    by_file, by_flags = result_of(run_python(script, json.dumps(both)))
    assert by_file[1:] == by_flags[1:] == [2, 2]
    assert by_file[0]["env"] == by_flags[0]["env"]
    assert by_file[0]["env"] == {
        "SGLANG_TKNP_ENABLE": "1",
        "SGLANG_TKNP_LAYER_BLOCKS": "3,1",
        "SGLANG_TKNP_EXCHANGE_TIMEOUT": "7.0",
    }
    launcher = [hook.target for hook in compat.LAUNCHER_HOOKS]
    assert by_file[0]["patched"] == sorted([*CLI_TARGETS, *launcher])
