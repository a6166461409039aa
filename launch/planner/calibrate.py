"""Write a hardware file from measurements: nccl-tests output, bench/hardware.py's JSON, numbers.

Constants that nothing given here measures stay as in the base file, with their sources. Every
replaced one says from which file, command and machine it is, and how far single points lie apart.
"""

import argparse
import json
import math
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from sglang_tknp.launch.planner.hardware import CONSTANTS, Constant, Hardware, load, parse
from sglang_tknp.launch.planner.nccl_fit import from_nccl
from sglang_tknp.launch.planner.nccl_output import read_run


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--base", default="h100-sxm", help="hardware file for all other constants")
    parser.add_argument("--name", help="of the new machine (default: the base's, '-calibrated')")
    parser.add_argument("--description", help="of the new machine")
    parser.add_argument(
        "--nccl",
        nargs="+",
        action="extend",
        default=[],
        metavar="FILE",
        type=Path,
        help="output of all_reduce_perf or sendrecv_perf (-b 4K -e 16M -f 2 -g 1, best with "
        "-G 20); on one node, on two, and on more: each run in its own file",
    )
    parser.add_argument(
        "--bench", metavar="FILE", type=Path, help="JSON written by bench/hardware.py"
    )
    parser.add_argument(
        "--set",
        nargs="+",
        action="extend",
        default=[],
        metavar="NAME=VALUE",
        help="a constant, in the file's unit, such as exchange_latency=35; needs --source",
    )
    parser.add_argument("--source", help="where the numbers of --set are from")


def run(args: argparse.Namespace) -> str:
    """The new hardware file's text.

    Raises:
        ValueError: a file or number cannot be used; the message names it, its line and the fix.
    """
    machine = load(args.base)
    changed: dict[str, Constant] = {}
    given = _given_numbers(args.set, args.source)
    if args.bench:
        changed |= from_bench(args.bench)
    changed |= from_nccl([read_run(path) for path in args.nccl], _updated(machine, changed | given))
    changed |= given
    if not changed:
        raise ValueError("nothing to calibrate with; give --nccl, --bench or --set")
    name = args.name or f"{machine.name}-calibrated"
    replaced = f"{machine.description}; {len(changed)} constants replaced"
    description = args.description or replaced
    new = replace(_updated(machine, changed), name=name, description=description)
    text = to_toml(new, f"Written by `sglang-tknp calibrate` from {machine.name}.", list(changed))
    parse(text, name)  # what this command writes, it must be able to read
    return text


def _updated(machine: Hardware, changed: Mapping[str, Constant]) -> Hardware:
    return replace(machine, constants={**machine.constants, **changed})


def _given_numbers(settings: Sequence[str], source: str | None) -> dict[str, Constant]:
    if settings and not source:
        raise ValueError('--set needs --source "where the numbers are from"')
    if source and not settings:
        raise ValueError("--source is for the numbers of --set, and there are none")
    found = {}
    for setting in settings:
        name, _, value = setting.partition("=")
        if name not in CONSTANTS:
            raise ValueError(f"--set {setting}: constants are {', '.join(CONSTANTS)}")
        try:
            number = float(value)
        except ValueError:
            raise ValueError(
                f"--set {setting}: expected {name}=NUMBER, in {CONSTANTS[name][0]}"
            ) from None
        found[name] = Constant(
            value=number, unit=CONSTANTS[name][0], source=str(source), status="user"
        )
    return found


def from_bench(path: Path) -> dict[str, Constant]:
    """The constants of bench/hardware.py's JSON: `command`, `date`, `machine`, `constants`."""
    try:
        report = json.loads(path.read_text())
        constants = report["constants"]
        machine = ", ".join(str(value) for value in report["machine"].values())
        origin = f"{path.name}, {report['date']}, `{report['command']}` on {machine}"
    except OSError as error:
        raise ValueError(f"--bench={path}: {error.strerror}") from None
    except json.JSONDecodeError as error:
        raise ValueError(f"{path.name}, line {error.lineno}: no JSON ({error.msg})") from None
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(
            f"{path.name} lacks {error}; --bench reads what bench/hardware.py wrote"
        ) from None
    found = {}
    for name, fields in constants.items():
        if name not in CONSTANTS or fields.get("unit") != CONSTANTS[name][0]:
            expected = CONSTANTS[name][0] if name in CONSTANTS else "a known constant"
            raise ValueError(
                f"{path.name}: {name} in {fields.get('unit')} should be {expected}; run "
                "bench/hardware.py of this version again"
            )
        found[name] = Constant(
            value=fields["value"],
            unit=fields["unit"],
            source=f"{fields['how']} ({origin})",
            status=fields.get("status", "measured"),
            low=fields.get("low"),
            high=fields.get("high"),
        )
    return found


def to_toml(machine: Hardware, head: str, changed: Sequence[str] = ()) -> str:
    """A hardware file's text that `hardware.parse` reads; changed constants come first."""
    replaced = textwrap.wrap(f"Replaced: {', '.join(changed)}.", 96) if changed else []
    lines = [f"# {line}" for line in (head, *replaced)] + [""]
    lines += [f"name = {_text(machine.name)}", f"description = {_text(machine.description)}"]
    if machine.presets:
        lines += ["", "[presets]"]
        lines += [f"{name} = {_text(value)}" for name, value in machine.presets.items()]
    for name in [*changed, *(name for name in machine.constants if name not in changed)]:
        constant = machine.constants[name]
        lines += ["", f"[constants.{name}]  # {CONSTANTS[name][2]}"]
        for field in ("value", "low", "high", "unit", "status", "source"):
            if (value := getattr(constant, field)) is not None:
                lines.append(f"{field} = {_text(value)}")
    return "\n".join(lines) + "\n"


def _text(value: Any) -> str:
    """JSON's strings, numbers and booleans are TOML's too."""
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"{value} cannot stand in a hardware file")
    return json.dumps(value, ensure_ascii=False)
