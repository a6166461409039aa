"""`sglang-tknp trace`: workloads as Mooncake traces, seeded."""

import argparse
import json
import sys
from collections.abc import Sequence
from typing import Any

from sglang_tknp.launch.planner import trace
from sglang_tknp.launch.planner.cli_options import check_counts, check_seed
from sglang_tknp.launch.planner.trace import Arrival, Statistics


def add_commands(commands: Any) -> None:
    parser = commands.add_parser("trace", help="make a workload: fixed, burst, Poisson, mixed")
    kinds = parser.add_subparsers(dest="kind", required=True, metavar="KIND")
    fixed = kinds.add_parser("fixed", help="equal requests, all released at once")
    burst = kinds.add_parser("burst", help="equal or mixed requests, several bursts")
    poisson = kinds.add_parser("poisson", help="equal or mixed requests, Poisson arrivals")
    mixed = kinds.add_parser(
        "mixed",
        help="the paper's mixed lengths: its 128 requests, or as many as --num-requests from them",
    )
    for kind in (fixed, burst, poisson, mixed):
        add = kind.add_argument
        add("--num-requests", type=int, help="(128)")
        if kind is not mixed:
            add("--input-len", type=int, help="of every request; without it the mixed lengths")
        add("--output-len", type=int, default=1024, help="of every request (1024)")
        add("--seed", type=int, default=42, help="(42)")
        add("--output", "-o", help="file to write (standard output)")
        add("--json", action="store_true", help="statistics and, without -o, requests as JSON")
        kind.set_defaults(run=run_trace)
    burst.add_argument("--per-burst", type=int, required=True, help="requests of each burst")
    burst.add_argument("--seconds-between", type=float, required=True, help="bursts")
    for kind in (poisson, mixed):
        needed = kind is poisson
        kind.add_argument("--request-rate", type=float, required=needed, help="per second")


def make(args: argparse.Namespace) -> list[Arrival]:
    """The workload that the command names; ValueError for senseless sizes."""
    check_seed(args)
    check_counts(args, "num_requests", "input_len", "output_len", "per_burst")
    count = 128 if args.num_requests is None else args.num_requests
    if getattr(args, "input_len", None) is not None:
        requests = trace.fixed(count, args.input_len, args.output_len)
    elif args.kind == "fixed":
        raise ValueError("trace fixed needs --input-len; trace mixed has the paper's lengths")
    elif args.num_requests is None:
        requests = trace.paper_mixed(args.output_len, args.seed)
    else:
        requests = trace.mixed(count, args.seed, args.output_len)
    if args.kind == "burst":
        lengths = [request.input_tokens for request in requests]
        return trace.burst(
            lengths,
            args.output_len,
            per_burst=args.per_burst,
            seconds_between=args.seconds_between,
        )
    rate = getattr(args, "request_rate", None)
    return requests if rate is None else trace.poisson(requests, rate, args.seed)


def run_trace(args: argparse.Namespace) -> int:
    found = make(args)
    if args.output:
        trace.write_mooncake(args.output, found)
    else:
        sys.stdout.writelines(() if args.json else trace.mooncake_lines(found))
    stats = trace.statistics([arrival.input_tokens for arrival in found])
    if args.json:
        requests = [] if args.output else [arrival._asdict() for arrival in found]
        about = {"count": len(found), "output": args.output, "requests": requests}
        print(json.dumps({**about, **stats._asdict()}))
    else:
        sys.stderr.write(f"sglang-tknp: {_describe(found, stats)}\n")
    return 0


def _describe(found: Sequence[Arrival], stats: Statistics) -> str:
    return (
        f"{len(found)} requests over {found[-1].seconds:.1f} s, input tokens {stats.minimum} to "
        f"{stats.maximum}, mean {stats.mean:.0f}, median {stats.median:.0f}, std {stats.std:.0f}; "
        f"{stats.long_share:.1%} are longer than 64K and have {stats.long_token_share:.1%} of the "
        f"tokens, the longest quarter has {stats.longest_quarter_token_share:.1%}"
    )
