"""`sglang-tknp calibrate`: a hardware file from measurements."""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from sglang_tknp.launch.planner import calibrate, hardware, text


def add_commands(commands: Any) -> None:
    parser = commands.add_parser(
        "calibrate",
        help="write a hardware file from nccl-tests, from this project's bench/, or by hand",
    )
    calibrate.add_arguments(parser)
    parser.add_argument("--output", "-o", help="file to write (standard output)")
    parser.add_argument("--json", action="store_true", help="the constants as JSON, no TOML")
    parser.set_defaults(run=run_calibrate)


def run_calibrate(args: argparse.Namespace) -> int:
    toml = calibrate.run(args)
    machine = hardware.parse(toml, args.output or "standard output")
    shown = json.dumps(text.hardware_json(machine), indent=2) if args.json else toml.rstrip("\n")
    if args.output:
        Path(args.output).write_text(toml)
        sys.stderr.write(f"sglang-tknp: wrote {args.output}\n")
    if args.json or not args.output:
        print(shown)
    return 0
