"""Proves what TKNP decides and refuses within SGLang's argument resolution, on tiny configs.

One process resolves every case in turn, each with a clean environment; no weights and no server.
Cores for ranks are here too, because the CPU platform's file imports SGLang.
"""

import json
import os
from typing import Any

import pytest

from tests.upstream.process import MARK, our_lines, result_of, run_python, write_model

pytestmark = [pytest.mark.upstream, pytest.mark.filterwarnings("ignore")]

ON = ["--enable-tknp", "--tp-size", "2", "--attn-dp-size", "2"]
HOSTS = ["--nnodes", "2", "--node-rank", "0", "--dist-init-addr", "127.0.0.1:29500"]
MOE = {"num_experts_per_tok": 2, "moe_intermediate_size": 64, "head_dim": 8}
MLA = {
    "kv_lora_rank": 16,
    "q_lora_rank": None,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 8,
    "num_key_value_heads": 8,
    "first_k_dense_replace": 4,
    "n_routed_experts": 1,
}
VISION = {"vision_config": {"hidden_size": 32, "depth": 1, "num_heads": 2}}

# Names of the changes to TINY that make the models.
MODELS: dict[str, dict[str, Any]] = {
    "llama": {},
    "wide": {"num_attention_heads": 9, "num_key_value_heads": 3, "hidden_size": 72},
    "three-kv": {"num_attention_heads": 12, "num_key_value_heads": 3, "hidden_size": 96},
    "mixtral": {
        "architectures": ["MixtralForCausalLM"],
        "model_type": "mixtral",
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
    },
    "qwen3-moe": {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "num_experts": 4,
        **MOE,
    },
    "mla": {"architectures": ["DeepseekV2ForCausalLM"], "model_type": "deepseek_v2", **MLA},
    "embedding": {"architectures": ["Qwen3Model"], "model_type": "qwen3", "head_dim": 8},
    "reward": {"architectures": ["Qwen2ForRewardModel"], "model_type": "qwen2"},
    "encoder-decoder": {
        "architectures": ["WhisperForConditionalGeneration"],
        "model_type": "whisper",
        "d_model": 64,
        "encoder_layers": 4,
        "encoder_attention_heads": 8,
        "decoder_layers": 4,
        "decoder_attention_heads": 8,
        "max_source_positions": 64,
        "max_target_positions": 64,
    },
    "multimodal": {
        "architectures": ["Qwen2VLForConditionalGeneration"],
        "model_type": "qwen2_vl",
        "rope_scaling": {"type": "mrope", "mrope_section": [1, 1, 2]},
        **VISION,
    },
    "state-space": {
        "architectures": ["FalconH1ForCausalLM"],
        "model_type": "falcon_h1",
        "mamba_d_ssm": 64,
        "mamba_n_heads": 8,
        "mamba_d_head": 8,
        "mamba_d_state": 16,
        "mamba_n_groups": 1,
        "head_dim": 8,
    },
}

NOT_SERVED = [name for name in MODELS if name not in ("llama", "wide", "three-kv")]
FLASHINFER = ["--attention-backend", "flashinfer"]  # torch_native has no graphs
FOUR = ["--enable-tknp", "--tp-size", "4"]
# Name -> model, arguments. The first ones run before TKNP is switched on in the process.
CASES: dict[str, tuple[str, list[str]]] = {
    "off": ("llama", []),
    "off, two ranks": ("llama", ["--tp-size", "2"]),
    "memory when off": ("llama", ["--tknp-device-memory-gb", "3"]),
    "on": ("llama", ON),
    "nodes from hosts": ("llama", [*FOUR, *HOSTS]),
    "nodes named on hosts": ("llama", [*FOUR, *HOSTS, "--attn-dp-size", "4"]),
    "good blocks": ("llama", [*ON, "--tknp-layer-blocks", "3,1"]),
    "replicated KV heads": ("llama", ["--enable-tknp", "--tp-size", "8", "--attn-dp-size", "2"]),
    "one node": ("llama", ["--enable-tknp", "--tp-size", "2"]),
    "uneven ranks": ("llama", ["--enable-tknp", "--tp-size", "3", "--attn-dp-size", "2"]),
    "pipeline": ("llama", [*ON, "--pp-size", "2"]),
    "replicas": ("llama", [*ON, "--dp-size", "2"]),
    "speculative": ("llama", [*ON, "--speculative-algorithm", "EAGLE"]),
    "hierarchical cache": ("llama", [*ON, "--enable-hierarchical-cache"]),
    "bad blocks": ("llama", [*ON, "--tknp-layer-blocks", "2,1"]),
    "too many nodes": ("llama", ["--enable-tknp", "--tp-size", "5", "--attn-dp-size", "5"]),
    "heads": ("wide", [*FOUR, "--attn-dp-size", "2"]),
    "KV heads": ("three-kv", [*FOUR, "--attn-dp-size", "2"]),
    "bad time-out": ("llama", [*ON, "--tknp-exchange-timeout", "0"]),
    "memory": ("llama", [*ON, "--tknp-device-memory-gb", "3"]),
    "accelerator": ("llama", [*ON, *FLASHINFER]),
    "accelerator, own backend": ("llama", [*ON, "--attention-backend", "triton"]),
    "accelerator, no graphs": ("llama", [*ON, *FLASHINFER, "--disable-cuda-graph"]),
    "accelerator, slots": ("llama", [*ON, *FLASHINFER, "--tknp-force-slots"]),
    "accelerator, prefill graphs": (
        "llama",
        [*ON, *FLASHINFER, "--cuda-graph-backend-prefill", "breakable"],
    ),
    "accelerator, breakable": (
        "llama",
        [*ON, *FLASHINFER, "--cuda-graph-backend-decode", "breakable"],
    ),
    "accelerator, slots and graphs": (
        "llama",
        [*ON, *FLASHINFER, "--tknp-force-slots", "--cuda-graph-backend-decode", "full"],
    ),
    "few slots": ("llama", [*ON, "--tknp-force-slots", "--cuda-graph-max-bs-decode", "6"]),
    "slots": ("llama", [*ON, "--tknp-force-slots", "--cuda-graph-bs-decode", "3", "5"]),
    "accelerator, memory": ("llama", [*ON, "--tknp-device-memory-gb", "3"]),
    **{name: (name, ON) for name in NOT_SERVED},
    "state-space, no radix cache": ("state-space", [*ON, "--disable-radix-cache"]),
}

SCRIPT = f"""
import contextlib, io, json, os, sys, traceback
from sglang.srt.plugins import load_plugins
load_plugins()
from sglang.srt.platforms import current_platform
from sglang.srt.server_args import prepare_server_args
from sglang_tknp import compat, hooks

KEPT = dict(os.environ)
FIELDS = ("tp_size", "attn_dp_size", "device", "attention_backend", "mem_fraction_static",
          "sleep_on_idle", "cuda_graph_bs_decode", "disable_flashinfer_autotune")

def resolve(argv):
    args = prepare_server_args(argv)
    args.resolve_once()
    view = compat.resolving(args)
    found = {{name: getattr(view, name) for name in FIELDS}}
    found["graphs"] = compat.graph_backends(args)
    found["env"] = {{k: v for k, v in os.environ.items() if KEPT.get(k) != v}}
    found["free"] = hooks.around_get_available_gpu_memory(None, "cpu", 0)
    return found

def run(name, argv):
    os.environ.clear()
    os.environ.update(KEPT)
    active = compat.cpu_platform_active
    if "accelerator" in name:
        compat.cpu_platform_active = lambda: False
    errors = io.StringIO()
    try:
        with contextlib.redirect_stderr(errors):
            return {{"values": resolve(argv), "exit": None}}
    except SystemExit as stopped:
        return {{"exit": stopped.code, "stderr": errors.getvalue()}}
    except BaseException:
        return {{"exit": traceback.format_exc(), "stderr": errors.getvalue()}}
    finally:
        compat.cpu_platform_active = active

def loaded_and_bound():
    # What the platform says after 96 KiB of weights, and after the rank took one core.
    import torch
    from sglang_tknp.platform_cpu import bind_rank
    os.environ["SGLANG_TKNP_DEVICE_MEMORY_GB"] = "2"
    shared = torch.nn.Parameter(torch.zeros(16384))
    model = torch.nn.ParameterList([shared, torch.nn.Parameter(shared.view(128, 128))])
    model.register_buffer("scales", torch.zeros(8192))
    current_platform.post_load_model(model)
    core = max(os.sched_getaffinity(0))
    bind_rank(f"{{core}},4095")
    return {{
        "free": hooks.around_get_available_gpu_memory(None, "cpu", 0),
        "core": core,
        "cores": sorted(os.sched_getaffinity(0)),
        "threads": torch.get_num_threads(),
    }}

found = {{name: run(name, argv) for name, argv in json.loads(sys.argv[1]).items()}}
found["rank"] = loaded_and_bound()
print("{MARK}" + json.dumps(found), flush=True)
"""


@pytest.fixture(scope="module")
def resolved(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("models")
    models = {name: write_model(folder / name, **changes) for name, changes in MODELS.items()}
    cases = {name: [*models[model], *argv] for name, (model, argv) in CASES.items()}
    return dict(result_of(run_python(SCRIPT, json.dumps(cases))))


@pytest.fixture(scope="module")
def served(resolved: dict[str, dict[str, Any]]) -> Any:
    """The decided values of a case that must resolve."""

    def values(name: str) -> dict[str, Any]:
        case = resolved[name]
        assert case["exit"] is None, case
        return dict(case["values"])

    return values


def test_nodes_default_to_hosts(served: Any) -> None:
    assert served("nodes from hosts")["attn_dp_size"] == 2
    assert served("nodes named on hosts")["attn_dp_size"] == 4
    assert served("on")["attn_dp_size"] == 2
    assert served("off")["attn_dp_size"] == 1


@pytest.mark.parametrize("name", ["good blocks", "replicated KV heads"])
def test_settings_that_fit_are_served(served: Any, name: str) -> None:
    assert served(name)["attn_dp_size"] == 2


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("one node", "--enable-tknp needs two nodes or more, and --attn-dp-size=1 with "),
        ("uneven ranks", "--tp-size=3 must be a multiple of the 2 nodes of --enable-tknp "),
        ("pipeline", "--pp-size (2) does not work with --enable-tknp: TKNP's layer blocks "),
        ("replicas", "--dp-size (2) does not work with --enable-tknp: a TKNP pool is one replica"),
        ("speculative", "--speculative-algorithm ('EAGLE') does not work with --enable-tknp: a "),
        ("hierarchical cache", "--enable-hierarchical-cache (True) does not work with "),
        ("bad blocks", '--tknp-layer-blocks="2,1" sums to 3, and the model has 4 layers; for 4 '),
        ("too many nodes", "--attn-dp-size=5 is more than the model's 4 layers, and every node "),
        ("heads", "the model's 9 attention heads do not divide over the 2 ranks of a node "),
        ("KV heads", "the model's 3 KV heads and the 2 ranks of a node "),
        ("bad time-out", "--tknp-exchange-timeout=0 must be a positive number of seconds; "),
        ("accelerator, memory", "--tknp-device-memory-gb=3 works on TKNP's CPU platform only: "),
        ("accelerator, prefill graphs", "--cuda-graph-backend-prefill=breakable does not work "),
        ("accelerator, breakable", "--cuda-graph-backend-decode=breakable does not work "),
        ("accelerator, slots and graphs", "--cuda-graph-backend-decode=full does not work with "),
    ],
)
def test_a_refusal_is_one_line_on_stderr(
    resolved: dict[str, dict[str, Any]], name: str, message: str
) -> None:
    assert refusal_of(resolved[name]).startswith(message)


def refusal_of(case: dict[str, Any]) -> str:
    """The one line with which a refused case ended its process."""
    assert case["exit"] == 1, case
    assert "Traceback" not in case["stderr"]
    (line,) = our_lines(case["stderr"])
    assert line == case["stderr"].splitlines()[-1]
    prefix = "sglang-tknp: cannot start: ValueError: "
    assert line.startswith(prefix)
    return line.removeprefix(prefix)


STATE_SPACE = ("state-space", "state-space or linear attention layers")


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("mixtral", "a mixture of experts"),
        ("qwen3-moe", "a mixture of experts"),
        ("mla", "multi-head latent attention (MLA)"),
        ("embedding", "an embedding or reward model"),
        ("reward", "an embedding or reward model"),
        ("encoder-decoder", "an encoder-decoder"),
        ("multimodal", "multimodal"),
        STATE_SPACE,
        ("state-space, no radix cache", "state-space or linear attention layers"),
    ],
)
def test_a_model_that_tknp_does_not_serve_is_named(
    resolved: dict[str, dict[str, Any]], name: str, reason: str
) -> None:
    model = MODELS[name.split(",")[0]]["architectures"][0]
    assert refusal_of(resolved[name]) == (
        f"--enable-tknp does not serve {model}: it is {reason}, and TKNP is for dense text "
        "decoders; serve it without --enable-tknp"
    )


@pytest.mark.parametrize("name", ["memory", "memory when off"])
def test_device_memory_is_what_the_flag_says(served: Any, name: str) -> None:
    found = served(name)
    assert found["env"]["SGLANG_TKNP_DEVICE_MEMORY_GB"] == "3.0"
    assert found["free"] == 3.0
    assert found["mem_fraction_static"] == 0.9


def test_device_memory_defaults_to_a_share_of_what_is_free(served: Any) -> None:
    one, two = (served(name)["free"] for name in ("off", "off, two ranks"))
    assert 0 < two < one
    assert one / two == pytest.approx(2, rel=0.2)  # other processes come and go meanwhile


def test_ranks_get_their_own_cores_and_threads(served: Any) -> None:
    from sglang_tknp.platform_cpu import core_lists

    for name, ranks in [("off", 1), ("on", 2), ("nodes from hosts", 2), ("replicated KV heads", 8)]:
        lists = core_lists(ranks, sorted(os.sched_getaffinity(0)))
        env = served(name)["env"]
        wanted = "|".join(",".join(map(str, cores)) for cores in lists)
        assert env["SGLANG_CPU_OMP_THREADS_BIND"] == wanted
        assert env["OMP_NUM_THREADS"] == str(len(lists[0]))


def test_the_cpu_platform_chooses_attention_idling_and_crash_handling(served: Any) -> None:
    found = served("on")
    assert (found["device"], found["attention_backend"]) == ("cpu", "torch_native")
    assert found["sleep_on_idle"] is True
    assert found["env"]["SGLANG_PYSPY_DUMP_BEFORE_CRASH"] == "0"
    assert found["env"]["SGLANG_CUDA_COREDUMP_BEFORE_CRASH"] == "0"


def test_on_an_accelerator_decode_graphs_are_on_and_autotuning_is_off(served: Any) -> None:
    """The decisions only: `compat.cpu_platform_active` is replaced, nothing runs on a GPU."""
    found = served("accelerator")
    assert found["disable_flashinfer_autotune"] is True
    assert found["graphs"] == ["full", "disabled"]
    assert served("accelerator, no graphs")["graphs"] == ["disabled", "disabled"]
    assert served("accelerator, slots")["graphs"] == ["disabled", "disabled"]
    assert served("accelerator, slots")["cuda_graph_bs_decode"] == [
        1,
        2,
        4,
        8,
        12,
        16,
        24,
        32,
        48,
        64,
    ]
    assert served("slots")["cuda_graph_bs_decode"] == [3, 5]
    assert served("few slots")["cuda_graph_bs_decode"] == [1, 2, 4, 6]
    assert served("accelerator, own backend")["attention_backend"] == "triton"


def test_weights_count_once_against_the_device_memory(
    resolved: dict[str, dict[str, Any]],
) -> None:
    shared, scales = 16384 * 4, 8192 * 4
    assert resolved["rank"]["free"] == 2 - (shared + scales) / (1 << 30)


def test_a_rank_takes_those_of_its_cores_that_it_may(resolved: dict[str, dict[str, Any]]) -> None:
    rank = resolved["rank"]
    assert rank["cores"] == [rank["core"]]
    assert rank["threads"] == 1


@pytest.mark.parametrize(
    ("num_ranks", "cores", "lists"),
    [
        (1, [0, 1, 2], [[0, 1, 2]]),
        (2, [0, 1, 2, 3], [[0, 1], [2, 3]]),
        (3, [0, 1, 2, 3, 4, 5, 6, 7], [[0, 1, 2], [3, 4, 5], [6, 7]]),
        (2, [4, 6, 9], [[4, 6], [9]]),
        (2, [4, 6], [[4], [6]]),
        (3, [4, 6], [[4], [6], [4]]),
        (2, [5], [[5], [5]]),
    ],
)
def test_core_lists(num_ranks: int, cores: list[int], lists: list[list[int]]) -> None:
    from sglang_tknp.platform_cpu import core_lists

    assert core_lists(num_ranks, cores) == lists


@pytest.mark.parametrize(
    ("text", "cores"),
    [("3", [3]), ("0,2,5", [0, 2, 5]), ("0-3,8", [0, 1, 2, 3, 8]), ("7-7,1-2", [7, 1, 2])],
)
def test_parse_cores(text: str, cores: list[int]) -> None:
    from sglang_tknp.platform_cpu import parse_cores

    assert parse_cores(text) == cores
