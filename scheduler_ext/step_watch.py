"""No hang on a GPU: a step that does not end in time ends the pool with its reason.

On a CPU every wait has its own limit. On CUDA the host enqueues, and may block in the driver, and
neither a captured graph nor SGLang's NCCL communicators have a time-out. So a thread looks at the
step that the host is in, and at the event that follows each step on the device. Not run on a GPU
yet.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

POLLS_PER_LIMIT = 20
# Kernels are compiled and connections opened in the first steps, while peers already wait.
FIRST_STEPS = 16


@contextmanager
def time_limit(seconds: float, what: str, on_stuck: Callable[[str], None]) -> Iterator[None]:
    """Calls `on_stuck(reason)` from a thread if the block is still in progress after `seconds`."""
    reason = f"{what} did not end within {seconds:g} seconds: a peer is gone or stuck"
    timer = threading.Timer(seconds, on_stuck, (reason,))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


@dataclass(slots=True)
class _Step:
    what: str
    since: float
    limit: float
    event: Any = None  # with query(): whether the device has passed it; None: not all enqueued


class StepWatch:
    """Calls `on_stuck(reason)` once, when the oldest step runs for longer than `limit` seconds."""

    def __init__(
        self,
        limit: float,
        on_stuck: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
        *,
        first_limit: float | None = None,
    ) -> None:
        """`first_limit`: seconds that each of the first steps may take; by default as all."""
        self.limit, self.on_stuck, self.clock = limit, on_stuck, clock
        self.first_limit = first_limit or limit
        self.num_begun = 0
        self._steps: deque[_Step] = deque()  # oldest first: the device keeps their order

    def start(self) -> None:
        threading.Thread(target=self._run, name="tknp-step-watch", daemon=True).start()

    def begun(self, what: str) -> None:
        """The host enters a step."""
        limit = self.first_limit if self.num_begun < FIRST_STEPS else self.limit
        self.num_begun += 1
        self._steps.append(_Step(what, self.clock(), limit))

    def enqueued(self, event: Any) -> None:
        """The host leaves it; `event` is recorded behind the step."""
        self._steps[-1].event = event

    def look(self) -> bool:
        """Drop what is done; False once a step is stuck, or the device cannot be asked."""
        try:
            self._drop_done()
        except Exception as error:  # a device in an error state ends every query
            self.on_stuck(f"the device failed: {error}")
            return False
        if not self._steps or self.clock() - self._steps[0].since <= self._steps[0].limit:
            return True
        self.on_stuck(
            f"{self._steps[0].what} did not end within {self._steps[0].limit:g} seconds: a peer is "
            f"gone or stuck; raise --tknp-exchange-timeout={self.limit:g} if all are alive and slow"
        )
        return False

    def _drop_done(self) -> None:
        while self._steps and self._steps[0].event is not None and self._steps[0].event.query():
            self._steps.popleft()
            if self._steps:  # it could not begin on the device before its predecessor ended
                self._steps[0].since = max(self._steps[0].since, self.clock())

    def _run(self) -> None:
        while self.look():
            time.sleep(min(self.limit / POLLS_PER_LIMIT, 1.0))
