"""Entry point of the plugin: SGLang calls `load` in every process of every server it starts.

Off means stock: without --enable-tknp only the flags are added, and (on a machine without an
accelerator) what the CPU platform needs. On means on: a failed step stops the process, because
SGLang only logs what a plugin raises and would go on half-hooked.
"""

import sys
from collections.abc import Callable
from typing import Any


def load() -> None:
    """Install what this process needs; SystemExit, with one clear line, if that fails."""
    fail_closed(_load)


def _load() -> None:
    from sglang_tknp import compat
    from sglang_tknp.config import TknpConfig

    config = TknpConfig.from_env()
    compat.install(compat.CLI_HOOKS)
    if _runs_the_pool() and compat.cpu_platform_active():
        compat.install(compat.CPU_HOOKS)
    if config.enable:
        activate()


def activate() -> None:
    """Switch TKNP on in this process. Called by `load`, by the flags and by `engine`."""
    from sglang_tknp import compat

    compat.check_versions()
    compat.install_resolution_hooks()
    if _runs_the_pool():
        compat.install(compat.POOL_HOOKS)


def activate_launcher() -> None:
    """Switch TKNP on in the process that starts the pool: the flags and `engine` call it."""
    from sglang_tknp import compat

    activate()
    compat.install(compat.LAUNCHER_HOOKS)


def _runs_the_pool() -> bool:
    """Whether this process is a scheduler or the controller.

    They have imported the scheduler by now. A launcher that starts and the detokenizer have not,
    run none of the hooked code, and must not pay the seconds that importing it costs.
    """
    return "sglang.srt.managers.scheduler" in sys.modules


def fail_closed(step: Callable[..., Any], *args: Any) -> Any:
    """Run a start-up step; any failure ends the process with the reason on stderr."""
    try:
        return step(*args)
    except Exception as error:
        sys.stderr.write(f"sglang-tknp: cannot start: {type(error).__name__}: {error}\n")
        raise SystemExit(1) from error
