"""Dry run: what a pool would hold and send, for any model, without a GPU, weights or memory.

`python -m sglang_tknp.launch.dry_run --model-path llama-3.1-405b --nodes 2 4 8` builds SGLang's
own modules of every node on the meta device and prints placement, KV room and message sizes.
"""

import argparse
import contextlib
import importlib.metadata
import json
import logging
import os
import sys
import tempfile
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from sglang_tknp import compat, shapes
from sglang_tknp.checkpoint import stored_dtypes
from sglang_tknp.config import TknpConfig
from sglang_tknp.launch.dry_run_report import Facts, Report, to_json, to_text, why_nothing_fits
from sglang_tknp.launch.model_source import Model, find_model, quantize
from sglang_tknp.pool_plan import Memory, PoolPlan, plan_pool

# The paper's budget of weights and KV: 454 + 106 of 640 GiB on a node (section 3.2).
DEFAULT_MEM_FRACTION = 0.875
DTYPES = ("auto", "half", "float16", "bfloat16", "float", "float32")
KV_BYTES = {"bf16": 2, "bfloat16": 2, "fp8_e5m2": 1, "fp8_e4m3": 1}  # "auto": the model's


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="sglang_tknp.launch.dry_run", description=__doc__)
    add = parser.add_argument
    add(
        "--model-path",
        "--model",
        required=True,
        help=f"a built-in shape ({', '.join(shapes.SHAPES)}), a local checkpoint or its "
        "config.json; the hub is never asked",
    )
    add("--nodes", type=int, nargs="+", default=[2, 4, 8], help="nodes of the pool, N (2 4 8)")
    add("--tp-per-node", type=int, default=8, help="ranks of a node, T (8)")
    add("--batch", type=int, default=128, help="rows of a decode step, of all owners (128)")
    add("--device-memory-gb", type=float, default=80, help="memory of one rank, in GiB (80)")
    add(
        "--mem-fraction-static",
        type=float,
        default=DEFAULT_MEM_FRACTION,
        help=f"its part for weights and KV, as in SGLang ({DEFAULT_MEM_FRACTION})",
    )
    add("--dtype", choices=DTYPES, default="auto", help="of weights and activations, as in SGLang")
    add("--quantization", choices=["fp8"], help="as if the checkpoint were stored in FP8")
    add("--kv-cache-dtype", choices=["auto", *KV_BYTES], default="auto", help="as in SGLang")
    add("--tknp-layer-blocks", help='layers per node, "63,63"; with one value of --nodes')
    add("--json", action="store_true", help="one JSON object in place of the text; sizes in bytes")
    return parser.parse_args(argv)


def check_args(args: argparse.Namespace) -> None:
    """Raise ValueError, naming setting, value and fix, for what no pool could have."""
    if min(args.nodes) < 2:
        raise ValueError(f"--nodes={min(args.nodes)} is no pool: TKNP needs 2 nodes or more")
    if args.tp_per_node < 1:
        raise ValueError(f"--tp-per-node={args.tp_per_node} must be 1 or more ranks")
    if args.batch < 1:
        raise ValueError(f"--batch={args.batch} must be 1 or more rows")
    if not args.device_memory_gb > 0:
        raise ValueError(
            f"--device-memory-gb={args.device_memory_gb:g} must be a positive number of GiB, of "
            "one rank"
        )
    if not 0 < args.mem_fraction_static < 1:
        raise ValueError(
            f"--mem-fraction-static={args.mem_fraction_static:g} must lie between 0 and 1, for "
            f"example {DEFAULT_MEM_FRACTION}"
        )
    if args.tknp_layer_blocks and len(args.nodes) > 1:
        raise ValueError(
            f'--tknp-layer-blocks="{args.tknp_layer_blocks}" needs one value of --nodes, and '
            f"there are {len(args.nodes)}; use for example "
            f"--nodes {len(args.tknp_layer_blocks.split(','))}"
        )


@contextlib.contextmanager
def planned_process(layer_blocks: str | None) -> Iterator[None]:
    """TKNP is on in it; the environment is the caller's again afterwards."""
    before = dict(os.environ)
    try:
        TknpConfig(enable=True, layer_blocks=layer_blocks).to_env()
        # Rotary tables as large as a GPU keeps them, on any machine.
        os.environ["SGLANG_ROPE_CACHE_FP32"] = "1"
        compat.install_resolution_hooks()
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Without SGLang's warnings, most of them about a GPU that is not there."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)


def run(args: argparse.Namespace) -> Report:
    """Plan every pool that was asked for. Raises ValueError for what TKNP would not serve."""
    check_args(args)
    model = quantize(find_model(args.model_path), args.quantization)
    with planned_process(args.tknp_layer_blocks), tempfile.TemporaryDirectory() as folder:
        # SGLang wants a folder: of the shape alone, so that no other file decides.
        (Path(folder) / "config.json").write_text(json.dumps(model.config))
        planned = [plan(args, model, folder, num_nodes) for num_nodes in sorted(set(args.nodes))]
    return Report(facts=planned[0][1], plans=tuple(pool for pool, _ in planned))


def plan(
    args: argparse.Namespace, model: Model, folder: str, num_nodes: int
) -> tuple[PoolPlan, Facts]:
    """Resolve the server's arguments as a launch would, place, and build; facts are of the run."""
    from sglang_tknp.model_ext import blocks
    from sglang_tknp.model_ext.meta_build import build_pool
    from sglang_tknp.model_ext.registry import register_models

    register_models()
    server_args = compat.planned_server_args(
        model_path=folder,
        tp_size=num_nodes * args.tp_per_node,
        attn_dp_size=num_nodes,
        dtype=args.dtype,
        kv_cache_dtype=args.kv_cache_dtype,
    )
    memory = Memory(device_gb=args.device_memory_gb, mem_fraction_static=args.mem_fraction_static)
    with compat.planning_context(server_args):
        model_config, load_config = compat.model_and_load_config(server_args)
        model_config.model_path = str(model.folder or folder)  # whose bytes are placed
        placement, sizes = blocks.decide_placement(model_config, TknpConfig.from_env(), num_nodes)
        built = build_pool(model_config, load_config, placement, sizes, args.tp_per_node)
    kv_bytes = KV_BYTES.get(args.kv_cache_dtype, model_config.dtype.itemsize)
    facts = describe(args, model, model_config, memory, built.model_class)
    planned = plan_pool(
        placement, sizes, built, memory, batch=args.batch, kv_element_bytes=kv_bytes
    )
    return planned, facts


def describe(
    args: argparse.Namespace, model: Model, model_config: Any, memory: Memory, model_class: str
) -> Facts:
    config = model_config.hf_text_config
    dtype = str(model_config.dtype).removeprefix("torch.")
    has_weights = model.folder is not None and any(model.folder.glob("*.safetensors"))
    stored = stored_dtypes(model.folder) if model.folder and has_weights else ()
    return Facts(
        model=model.name,
        model_class=model_class,
        sglang=importlib.metadata.version("sglang"),
        num_layers=config.num_hidden_layers,
        hidden_size=config.hidden_size,
        num_heads=model_config.num_attention_heads,
        num_kv_heads=model_config.get_total_num_kv_heads(),
        head_dim=model_config.head_dim,
        vocab_size=config.vocab_size,
        dtype=dtype,
        quantization=model_config.quantization,
        kv_cache_dtype=dtype if args.kv_cache_dtype == "auto" else args.kv_cache_dtype,
        sizes_from="checkpoint" if has_weights else "configuration",
        stored_dtypes=stored,
        tp_per_node=args.tp_per_node,
        batch=args.batch,
        device_memory_gb=memory.device_gb,
        mem_fraction_static=memory.mem_fraction_static,
    )


def main(argv: Sequence[str] | None = None) -> int:
    args = parse_args(argv)
    try:
        with quiet(), contextlib.redirect_stdout(sys.stderr):
            report = run(args)
    except (ValueError, OSError) as error:
        sys.stderr.write(f"sglang-tknp: {error}\n")
        return 1
    print(to_json(report) if args.json else to_text(report))
    if not report.fits:
        sys.stderr.write(f"sglang-tknp: {why_nothing_fits(report)}\n")
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
