"""Proves that SGLang's own parser takes every command that the planner prints, as it is meant.

One process parses them all. The commands differ per layout; nothing is started.
"""

import argparse
import json
import shlex

import pytest

from sglang_tknp.launch.planner import cli_plan, commands
from sglang_tknp.launch.planner.commands import Server
from sglang_tknp.launch.planner.layouts import Setting
from tests.unit.planner_pools import setting
from tests.upstream.process import MARK, result_of, run_python

pytestmark = pytest.mark.upstream

PARSE = f"""
import argparse, json, sys
from sglang.srt.plugins import load_plugins
load_plugins()
from sglang.srt.server_args import ServerArgs
found = []
for argv in json.loads(sys.argv[1]):
    parser = argparse.ArgumentParser()
    ServerArgs.add_cli_args(parser)
    args, unknown = parser.parse_known_args(argv)
    found.append([vars(args), unknown])
print({MARK!r} + json.dumps(found, default=str))
"""
# What a plan's command line says of the server too.
ASKED = (
    "plan --model llama-3.1-405b --quantization fp8 --kv-cache-dtype fp8_e4m3 --page-size 64 "
    "--max-running-requests 100 --tknp-owner-policy kv-used --tknp-max-overtakes 3"
)
NAMES = ("tknp", "dp", "dp-tp2", "tp", "pp", "pp2", "dcp", "attention-dp")
# Ranks of one server, and what makes its layout.
EXPECTED = {
    "tknp": {"tp_size": 32, "attn_dp_size": 4, "nnodes": 4, "pp_size": 1},
    "dp": {"tp_size": 8, "nnodes": 1, "dp_size": 1},
    "dp-tp2": {"tp_size": 2, "dp_size": 4, "nnodes": 1},
    "tp": {"tp_size": 32, "nnodes": 4, "pp_size": 1},
    "pp": {"tp_size": 8, "pp_size": 4, "nnodes": 4},
    "pp2": {"tp_size": 8, "pp_size": 2, "nnodes": 2},
    "dcp": {"tp_size": 32, "dcp_size": 4, "nnodes": 4},
    "attention-dp": {"tp_size": 32, "attn_dp_size": 4, "nnodes": 4},
}


def server_arguments(name: str, pool: Setting, server: Server) -> list[str]:
    line = commands.launch(name, pool, server)[0]
    words = shlex.split(line.replace("$RANK", "1").replace("$FIRST_HOST", "10.0.0.1"))
    assert words[:3] == ["python", "-m", "sglang.launch_server"]
    return words[3:]


@pytest.fixture(scope="module")
def parsed() -> dict[str, tuple[dict[str, object], list[str]]]:
    pool = setting()
    argv = [server_arguments(name, pool, Server(model_path="my-model")) for name in NAMES]
    parser = argparse.ArgumentParser()
    cli_plan.add_commands(parser.add_subparsers())
    asked = cli_plan.server_of(parser.parse_args(shlex.split(ASKED)))
    argv.append(server_arguments("tknp", pool, asked))
    done = run_python(PARSE, json.dumps(argv))
    assert done.returncode == 0, done.stderr
    return dict(zip((*NAMES, "asked"), map(tuple, result_of(done)), strict=True))


@pytest.mark.parametrize("name", NAMES)
def test_sglang_takes_the_command(
    parsed: dict[str, tuple[dict[str, object], list[str]]], name: str
) -> None:
    args, unknown = parsed[name]
    assert unknown == []
    assert args["model_path"] == "my-model"
    for field, value in EXPECTED[name].items():
        assert args[field] == value, field
    assert bool(args.get("enable_tknp")) is (name == "tknp")


def test_the_server_is_told_what_was_planned(
    parsed: dict[str, tuple[dict[str, object], list[str]]],
) -> None:
    args, unknown = parsed["asked"]
    assert unknown == []
    found = {name: args[name] for name in ("quantization", "kv_cache_dtype", "page_size")}
    assert found == {"quantization": "fp8", "kv_cache_dtype": "fp8_e4m3", "page_size": 64}
    assert args["max_running_requests"] == 100
    assert (args["tknp_owner_policy"], args["tknp_max_overtakes"]) == ("kv-used", 3)


def test_replicas_stand_behind_a_router() -> None:
    pool = setting()
    for name, replicas in (("dp", 4), ("pp2", 2), ("dp-tp2", 4)):
        server, router = commands.launch(name, pool, Server(model_path="my-model"))
        assert "--host 0.0.0.0 --port 30000" in server
        assert router.count("http://$HOST") == replicas


def test_many_replicas_are_not_all_written_out() -> None:
    _, router = commands.launch("dp", setting(nodes=64))
    assert router.endswith("http://$HOST0:30000 ... http://$HOST63:30000")
