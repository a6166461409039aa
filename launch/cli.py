"""`sglang-tknp`: size a decode pool before it is bought, and ask when not to use TKNP.

Also `python -m sglang_tknp.launch.cli`. Every command prints what it assumes first, and takes
--json. It needs no GPU, no weights and no server, and imports neither torch nor SGLang.
"""

import argparse
import sys
from collections.abc import Sequence

from sglang_tknp.launch.planner import cli_calibrate, cli_output, cli_plan, cli_trace

COMMANDS = (cli_plan, cli_trace, cli_calibrate, cli_output)


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="sglang-tknp",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for module in COMMANDS:
        module.add_commands(commands)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    args = make_parser().parse_args(argv)
    try:
        return int(args.run(args))
    except BrokenPipeError:
        return 0
    except (ValueError, OSError, ImportError) as error:
        sys.stderr.write(f"sglang-tknp: {error}\n")
        return 1
    except KeyboardInterrupt:
        sys.stderr.write("sglang-tknp: interrupted\n")
        return 130


if __name__ == "__main__":
    raise SystemExit(main())
