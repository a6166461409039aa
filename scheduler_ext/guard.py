"""No hangs, and a cause for every stop: a lost rank takes its pool down within seconds.

On one host the launcher watches the ranks and the controller, and ends the host. Across hosts the
launchers watch each other (hosts.py), and a dead rank's closed connections fail its peers' next
transfer.
"""

import contextlib
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import wait
from typing import Any

from sglang_tknp import compat, compat_ipc
from sglang_tknp.config import TknpConfig
from sglang_tknp.hooks import START_TIMEOUT
from sglang_tknp.scheduler_ext.hosts import HostLinks
from sglang_tknp.topology import Topology

logger = logging.getLogger(__name__)

# SGLang's own handler gets this long to end the pool before the watch does it.
GRACE_SECONDS = 3.0
# A rank that lost a peer waits this long before SGLang ends the host.
NAMING_SECONDS = 1.0


def say(text: str) -> None:
    """One line on stderr, whatever the log level."""
    sys.stderr.write(f"sglang-tknp: {text}\n")
    sys.stderr.flush()


def describe_rank(rank: int) -> str:
    num_nodes, num_ranks = compat.parallel().attn_dp_size, compat.parallel().tp_size
    topology = Topology(num_nodes=num_nodes, tp_size=num_ranks // num_nodes, rank=rank)
    return topology.describe(rank)


class PoolWatch:
    """Waits for the first process of this host's pool to end, then ends all of them."""

    def __init__(self, processes: Sequence[Any], names: Sequence[str]) -> None:
        self.processes = processes
        self.names = names
        self.stopped = threading.Event()
        threading.Thread(target=self._run, name="tknp-watch", daemon=True).start()

    def _run(self) -> None:
        waiting = {process.sentinel: i for i, process in enumerate(self.processes)}
        while waiting and not self.stopped.is_set():
            for sentinel in wait(list(waiting), timeout=1.0):
                self._ended(waiting.pop(sentinel))

    def _ended(self, index: int) -> None:
        process = self.processes[index]
        process.join(1.0)  # its pipe closes a moment before its exit code is there
        if process.exitcode != 0 and not self.stopped.is_set():
            end_this_host(f"{self.names[index]}, process {process.pid}, {cause(process.exitcode)}")


def cause(exit_code: int | None) -> str:
    if exit_code is not None and exit_code < 0:
        return f"was killed by {signal.Signals(-exit_code).name}"
    return f"ended with exit code {exit_code}"


def end_this_host(reason: str) -> None:
    """Say why, and end this process and all below it, by SGLang's handler or without it."""
    _failed.set()
    say(f"{reason}; stopping the pool")
    os.kill(os.getpid(), signal.SIGQUIT)
    time.sleep(GRACE_SECONDS)
    compat.kill_process_tree(os.getpid())


_watch: PoolWatch | None = None
_links: HostLinks | None = None
_failed = threading.Event()
_report_address = ""


def after_launch_scheduler_processes(result: tuple[Any, Any], *_: Any, **__: Any) -> None:
    """Target: Engine._launch_scheduler_processes, in the launcher of each host."""
    global _watch, _links
    if not TknpConfig.from_env().enable:
        return
    _, processes = result
    parallel = compat.parallel()
    local = parallel.tp_size // parallel.nnodes
    names = [describe_rank(parallel.node_rank * local + i) for i in range(local)]
    # SGLang lists the controller first, where this host has one.
    controllers = ["the data-parallel controller"] * (len(processes) - local)
    _watch = PoolWatch(processes, [*controllers, *names])
    if parallel.nnodes > 1:
        _links = HostLinks(
            parallel.node_rank,
            parallel.nnodes,
            parallel.dist_init_addr,
            end_this_host,
            START_TIMEOUT.total_seconds(),
        )


def before_watchdog_stop(*_: Any) -> None:
    """Target: SubprocessWatchdog.stop, in the launcher: SGLang is about to end its processes."""
    if _watch is not None:
        _watch.stopped.set()
    if _links is not None and not _failed.is_set():
        _links.say_farewell()


def before_sigquit(*_: Any) -> None:
    """Target: SignalHandler.running_phase_sigquit_handler: what follows is no orderly stop."""
    _failed.set()


def around_scheduler_init(original: Callable[..., None], *args: Any, **kwargs: Any) -> None:
    """Target: Scheduler.__init__, on every rank: what fails at start is named too."""
    global _report_address
    with failures_named():
        original(*args, **kwargs)
        _report_address = compat_ipc.report_address(kwargs.get("port_args") or args[2])


def around_run_event_loop(original: Callable[[Any], None], scheduler: Any) -> None:
    """Target: Scheduler.run_event_loop, on every rank, once the pool is ready."""
    from sglang_tknp.scheduler_ext import info

    with failures_named():
        info.log_pool(scheduler)
        info.start_reports(scheduler, _report_address)
        compat.set_group_timeouts(TknpConfig.from_env().exchange_timeout)
        watch_device()
        original(scheduler)


def watch_device() -> None:
    """On an accelerator, where no transfer has a limit of its own: one for every step."""
    import torch

    from sglang_tknp.model_ext.stage import current_stage
    from sglang_tknp.scheduler_ext.step_watch import StepWatch

    stage = current_stage()
    if stage.device.type == "cpu":
        return
    limit, first = TknpConfig.from_env().exchange_timeout, START_TIMEOUT.total_seconds()
    watch = StepWatch(limit, end_this_rank, first_limit=max(limit, first))
    device = torch.get_device_module(stage.device)

    def begun() -> None:
        watch.begun(f"step {stage.step.num_steps + 1}")

    def enqueued() -> None:
        event = device.Event()
        event.record()
        watch.enqueued(event)

    stage.step.before_step.append(begun)
    stage.step.after_step.append(enqueued)
    watch.start()


def start_limit(what: str) -> contextlib.AbstractContextManager[None]:
    """For what ranks do together before they serve, which on a device has no limit of its own."""
    from sglang_tknp.scheduler_ext.step_watch import time_limit

    return time_limit(START_TIMEOUT.total_seconds(), what, end_this_rank)


def end_this_rank(reason: str) -> None:
    """From a thread, at once: the main thread may be stuck in the device's driver."""
    say(f"{describe_rank(compat.parallel().tp_rank)} stops: {reason}")
    os._exit(1)


def first_line(error: BaseException) -> str:
    """Of an error's text, which a bare assert leaves empty."""
    return (str(error).splitlines() or ["no message"])[0][:500]


@contextlib.contextmanager
def failures_named() -> Iterator[None]:
    """One line on stderr for an exception that ends this rank, before SGLang stops the host."""
    try:
        yield
    except Exception as error:
        where = describe_rank(compat.parallel().tp_rank)
        say(f"{where} stops: {type(error).__name__}: {first_line(error)}")
        # A lost peer is seen here first: its own host must have the time to name it.
        time.sleep(NAMING_SECONDS)
        raise
