"""No hang on a GPU: a step that the device does not finish in time ends the pool with its reason.

On a CPU every wait has its own limit. On CUDA the host only enqueues, and neither a captured
graph nor SGLang's NCCL communicators have a time-out, so a thread looks at the event that follows
each step. Not run on a GPU yet.
"""

import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

POLLS_PER_LIMIT = 20


@dataclass(slots=True)
class _Launched:
    event: Any  # with query(): whether the device has passed it
    what: str
    since: float


class StepWatch:
    """Calls `on_stuck(reason)` once, when the oldest step runs for longer than `limit` seconds."""

    def __init__(
        self,
        limit: float,
        on_stuck: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.limit, self.on_stuck, self.clock = limit, on_stuck, clock
        self._launched: deque[_Launched] = deque()  # oldest first: the device keeps their order

    def start(self) -> None:
        threading.Thread(target=self._run, name="tknp-step-watch", daemon=True).start()

    def launched(self, event: Any, what: str) -> None:
        """A step is enqueued; `event` is recorded behind it."""
        self._launched.append(_Launched(event, what, self.clock()))

    def look(self) -> bool:
        """Drop what is done; False once a step is stuck."""
        while self._launched and self._launched[0].event.query():
            self._launched.popleft()
            if self._launched:  # it could not begin before its predecessor ended
                self._launched[0].since = max(self._launched[0].since, self.clock())
        if not self._launched or self.clock() - self._launched[0].since <= self.limit:
            return True
        self.on_stuck(
            f"{self._launched[0].what} did not end within --tknp-exchange-timeout="
            f"{self.limit:g} seconds: a peer is gone or stuck; raise it if all are alive and slow"
        )
        return False

    def _run(self) -> None:
        while self.look():
            time.sleep(min(self.limit / POLLS_PER_LIMIT, 1.0))
