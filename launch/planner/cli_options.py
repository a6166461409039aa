"""Options that several commands share, and what they make of them."""

import argparse
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from sglang_tknp.launch.model_source import find_model, quantize
from sglang_tknp.launch.planner import hardware, trace
from sglang_tknp.launch.planner.compare import LAYOUTS, SPANS
from sglang_tknp.launch.planner.layouts import Setting
from sglang_tknp.launch.planner.model import PlannedModel, planned
from sglang_tknp.launch.planner.recommend import Workload
from sglang_tknp.launch.planner.trace import Arrival
from sglang_tknp.placement import balance
from sglang_tknp.refusals import check_heads
from sglang_tknp.shapes import SHAPES

KV_DTYPES = ("auto", "bf16", "bfloat16", "fp8_e5m2", "fp8_e4m3")
DEFAULT_REQUESTS = 1000
MOST = 10_000_000  # of anything that is counted on the command line


def add_pool(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("pool").add_argument
    add(
        "--model-path",
        "--model",
        required=True,
        help=f"a built-in shape ({', '.join(SHAPES)}), a local checkpoint or its config.json; the "
        "hub is never asked",
    )
    add("--quantization", choices=["fp8"], help="as if the checkpoint were stored in FP8")
    add("--kv-cache-dtype", choices=KV_DTYPES, default="auto", help="as in SGLang")
    add(
        "--hardware",
        default="h100-sxm",
        help=f"a hardware file: built in ({', '.join(hardware.built_in())}) or your own TOML "
        "(h100-sxm)",
    )
    add(
        "--set",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="one constant of the hardware file in its unit, for example exchange_latency=35; "
        "may be repeated",
    )
    add("--nodes", type=int, default=4, help="nodes of the pool, N (4)")
    add("--tp-per-node", type=int, help="ranks of a node, T (the hardware file's)")
    add(
        "--kv-tokens-per-node",
        action="append",
        default=[],
        metavar="[LAYOUT=]TOKENS",
        help="max_total_num_tokens of a server's log, which beats the estimate; of TKNP if no "
        "layout is named; may be repeated",
    )
    add(
        "--dcp-span",
        choices=SPANS,
        help="where DCP groups lie, if you know it (the hardware file's; both are tried)",
    )
    add(
        "--pp-overlap",
        type=float,
        help="0: one pipeline stage works at a time, 1: all do; if you know it (1; both are tried)",
    )


def add_workload(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("workload").add_argument
    add("--input-len", type=int, help="input tokens of every request")
    add("--output-len", type=int, help="output tokens of every request (1024)")
    add("--concurrency", type=int, help="so many requests, all released at once")
    add("--request-rate", type=float, help="Poisson arrivals, requests per second")
    add("--num-requests", type=int, help=f"with --request-rate ({DEFAULT_REQUESTS})")
    add(
        "--trace",
        help="a Mooncake trace, or the output file of sglang.benchmark.serving with "
        "--output-details; with --request-rate its lengths alone count",
    )
    add("--trace-tag", help="which run of a benchmark file, by its --tag")
    add("--seed", type=int, default=42, help="of the arrivals (42)")
    add(
        "--slo-per-token-ms",
        type=float,
        help="from arrival to completion, waiting included, per output token",
    )
    add("--slo-target", type=float, default=0.9, help="the share that is to meet it (0.9)")


def check_counts(args: argparse.Namespace, *names: str, least: int = 1) -> None:
    """ValueError for an option, where the command has it, that is given and too small."""
    for name in names:
        value = getattr(args, name, None)
        if value is not None and value < least:
            raise ValueError(f"--{name.replace('_', '-')}={value} must be {least} or more")
        if value is not None and value > MOST:
            raise ValueError(f"--{name.replace('_', '-')}={value} must be at most {MOST}")


def check_seed(args: argparse.Namespace) -> None:
    if not 0 <= args.seed < 1 << 32:
        raise ValueError(f"--seed={args.seed} must lie in 0 to {(1 << 32) - 1}")


def model_of(args: argparse.Namespace) -> PlannedModel:
    return planned(quantize(find_model(args.model_path), args.quantization), args.kv_cache_dtype)


def hardware_of(args: argparse.Namespace) -> hardware.Hardware:
    """The hardware file with what the command line changes."""
    found = hardware.load(args.hardware)
    values = dict(_assignment(text) for text in args.set)
    if unknown := sorted(set(values) - set(hardware.CONSTANTS)):
        raise ValueError(
            f"--set {', '.join(unknown)}: no such constant; use {', '.join(hardware.CONSTANTS)}"
        )
    if getattr(args, "tp_per_node", None) is not None:
        values["gpus_per_node"] = args.tp_per_node
    return found.with_values("command line", **values) if values else found


def _assignment(text: str) -> tuple[str, float]:
    name, _, value = text.partition("=")
    try:
        return name.strip(), float(value)
    except ValueError:
        raise ValueError(
            f"--set {text}: write NAME=VALUE with a number, for example exchange_latency=35"
        ) from None


def setting_of(args: argparse.Namespace) -> Setting:
    """The pool. Raises ValueError, naming setting, value and fix."""
    check_counts(args, "nodes", "tp_per_node")
    if args.pp_overlap is not None and not 0 <= args.pp_overlap <= 1:
        raise ValueError(f"--pp-overlap={args.pp_overlap:g} must lie between 0 and 1")
    machine, model = hardware_of(args), model_of(args)
    gpus = int(hardware.load(args.hardware).constants["gpus_per_node"].value)
    if machine.node_size > gpus and not any(text.startswith("gpus_per_node") for text in args.set):
        raise ValueError(
            f"--tp-per-node={args.tp_per_node}: {args.hardware} has {gpus} GPUs per node; use at "
            f"most {gpus}, or say that yours has more: --set gpus_per_node={args.tp_per_node}"
        )
    tp_size = machine.node_size
    _check_heads(model, tp_size)
    measured = dict(_measured(args.kv_tokens_per_node))
    estimate = int(machine.usable_memory) * tp_size
    return Setting(
        model=model,
        hardware=machine,
        num_nodes=args.nodes,
        node_memory=_known_memory(model, args.nodes, machine, measured) or estimate,
        measured=measured,
        dcp_span=args.dcp_span or machine.presets.get("dcp_span", "node"),
        pp_overlap=_first(args.pp_overlap, machine.presets.get("pp_overlap"), 1.0),
        known=frozenset(n for n in ("dcp_span", "pp_overlap") if getattr(args, n) is not None),
    )


def _check_heads(model: PlannedModel, tp_size: int) -> None:
    """The server's own rule for a node, in the words of this command line."""
    try:
        check_heads(model.num_heads, model.num_kv_heads, model.num_layers, 1, tp_size)
    except ValueError as error:
        text = str(error).replace("--tp-size / --attn-dp-size", "--tp-per-node")
        raise ValueError(text.replace("ranks per node", "with --tp-per-node")) from None


def _known_memory(
    model: PlannedModel, nodes: int, machine: hardware.Hardware, measured: Mapping[str, int]
) -> int | None:
    """What a measured KV capacity says of a node's memory, and so of the other layouts' room."""
    if "dp" in measured:
        tokens, weights, extra = measured["dp"], model.weight_bytes, 0
    elif "tknp" in measured:
        weights = max(balance(model.sizes, nodes).node_bytes)
        tokens, extra = measured["tknp"], int(machine.sharded_extra)
    else:
        return None
    ranks = machine.node_size
    return tokens * model.kv_token_bytes(ranks) * ranks + weights - extra


def _first(*values: float | None) -> float:
    return next(value for value in values if value is not None)


def _measured(texts: Iterable[str]) -> Iterable[tuple[str, int]]:
    for text in texts:
        layout, equals, tokens = text.rpartition("=")
        layout = layout if equals else "tknp"
        if layout not in LAYOUTS or not tokens.isdigit() or int(tokens) < 1:
            raise ValueError(
                f"--kv-tokens-per-node {text}: write the tokens of a server's log, with its "
                f"layout if it is not tknp ({', '.join(LAYOUTS)}), for example dp=58000"
            )
        yield layout, int(tokens)


def workload_of(args: argparse.Namespace) -> Workload:
    """The workload. Raises ValueError for options that do not go together."""
    if args.slo_per_token_ms is not None and not args.slo_per_token_ms > 0:
        raise ValueError(f"--slo-per-token-ms={args.slo_per_token_ms:g} must be positive")
    if not 0 < args.slo_target <= 1:
        raise ValueError(f"--slo-target={args.slo_target:g} must be above 0 and at most 1")
    check_seed(args)
    check_counts(args, "input_len", "output_len", "concurrency", "num_requests")
    arrivals, description = _requests(args)
    if args.request_rate is not None:
        if not 0 < args.request_rate < math.inf:
            raise ValueError(f"--request-rate={args.request_rate:g} must be positive and finite")
        arrivals = trace.poisson(arrivals, args.request_rate, args.seed)
        description += f", Poisson arrivals at {args.request_rate:g}/s, seed {args.seed}"
    slo = args.slo_per_token_ms
    if slo is not None:
        description += f", SLO {slo:g} ms per output token for {args.slo_target:.0%}"
    return Workload(
        trace=arrivals,
        description=description,
        slo_per_token=None if slo is None else slo / 1e3,
        slo_target=args.slo_target,
    )


def _requests(args: argparse.Namespace) -> tuple[list[Arrival], str]:
    if args.trace:
        _refuse(args, "--trace has its own requests", "input_len", "output_len", "concurrency")
        _refuse(args, "--trace has its own requests", "num_requests")
        try:
            found = trace.load(args.trace, tag=args.trace_tag, seed=args.seed)
        except OSError as error:
            raise ValueError(f"--trace={args.trace}: {error.strerror}") from None
        return found, f"{len(found)} requests of {Path(args.trace).name}"
    if args.input_len is None:
        raise ValueError(
            "a workload is missing: use --input-len with --concurrency or --request-rate, or "
            "--trace FILE (sglang-tknp trace makes one)"
        )
    if args.request_rate is None:
        _refuse(args, "--num-requests goes with --request-rate", "num_requests")
        if args.concurrency is None:
            raise ValueError("--input-len needs --concurrency or --request-rate as well")
        count, how = args.concurrency, "at once"
    else:
        _refuse(args, "--request-rate spreads requests over time", "concurrency")
        count, how = args.num_requests or DEFAULT_REQUESTS, "each"
    output = 1024 if args.output_len is None else args.output_len
    found = trace.fixed(count, args.input_len, output)
    return found, f"{count} requests of {args.input_len} + {output} tokens {how}"


def _refuse(args: argparse.Namespace, why: str, *names: str) -> None:
    for name in names:
        value: Any = getattr(args, name)
        if value is not None:
            raise ValueError(f"--{name.replace('_', '-')}={value}: {why}; leave it out")
