"""No hangs, and a cause for every stop: a lost rank takes its pool down within seconds.

On one host the controller watches its schedulers. Across hosts a dead rank closes its
connections, so every peer's next transfer fails, which ends its own host's processes.
"""

import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import wait
from typing import Any

from sglang_tknp import compat
from sglang_tknp.config import TknpConfig

logger = logging.getLogger(__name__)

# The launcher gets this long to end its own process tree before the watcher does it.
GRACE_SECONDS = 3.0


def say(text: str) -> None:
    """One line on stderr, whatever the log level."""
    sys.stderr.write(f"sglang-tknp: {text}\n")
    sys.stderr.flush()


def describe_rank(tp_rank: int) -> str:
    ranks_per_node = compat.parallel().tp_size // compat.parallel().attn_dp_size
    return f"rank {tp_rank} (node {tp_rank // ranks_per_node}, TP rank {tp_rank % ranks_per_node})"


def before_controller_init(controller: Any, *_: Any, **__: Any) -> None:
    """Target: DataParallelController.__init__, before it spawns its schedulers."""
    threading.Thread(target=_watch, args=(controller,), name="tknp-watch", daemon=True).start()


def _watch(controller: Any) -> None:
    """Wait for the first scheduler of this host to end, then stop the host's whole pool."""
    ended = None
    while ended is None:
        processes = list(getattr(controller, "scheduler_procs", ()))
        # Briefly, because the controller is still adding processes at start.
        wait([process.sentinel for process in processes], timeout=0.5)
        ended = next((i for i, p in enumerate(processes) if p.exitcode is not None), None)
    process = controller.scheduler_procs[ended]
    first = compat.parallel().node_rank * compat.parallel().tp_size // compat.parallel().nnodes
    if process.exitcode == 0:
        return  # an orderly shutdown
    code = process.exitcode
    cause = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exited with {code}"
    say(f"{describe_rank(first + ended)}, process {process.pid}, {cause}; stopping the pool")
    stop_host()


def stop_host() -> None:
    """End every process that the launcher of this host started, and the launcher."""
    import psutil

    launcher = os.getppid()
    try:
        os.kill(launcher, signal.SIGQUIT)  # SGLang's handler ends its process tree
        time.sleep(GRACE_SECONDS)
        for process in (*psutil.Process(launcher).children(recursive=True), None):
            if process is not None and process.pid != os.getpid():
                process.kill()
        os.kill(launcher, signal.SIGKILL)
    except (ProcessLookupError, psutil.NoSuchProcess):
        pass
    os._exit(1)


def around_run_event_loop(original: Callable[[Any], None], scheduler: Any) -> None:
    """Target: Scheduler.run_event_loop, on every rank, once the pool is ready."""
    from sglang_tknp.scheduler_ext import info

    info.log_pool(scheduler)
    compat.set_group_timeouts(TknpConfig.from_env().exchange_timeout)
    try:
        original(scheduler)
    except Exception as error:
        where = describe_rank(compat.parallel().tp_rank)
        say(f"{where} stops: {type(error).__name__}: {str(error).splitlines()[0][:500]}")
        raise
