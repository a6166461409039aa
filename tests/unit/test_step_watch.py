"""Proves that a step which the device never ends is noticed in time, and a slow queue is not."""

import threading
import time
from dataclasses import dataclass, field

import pytest

from sglang_tknp.scheduler_ext.step_watch import FIRST_STEPS, StepWatch, time_limit


@dataclass
class Event:
    done: bool = False

    def query(self) -> bool:
        return self.done


@dataclass
class World:
    """A clock that the test sets, and what the watch has said."""

    now: float = 0.0
    reasons: list[str] = field(default_factory=list)

    def watch(self, limit: float = 10.0) -> StepWatch:
        return StepWatch(limit, self.reasons.append, clock=lambda: self.now)


def test_nothing_is_stuck_while_no_step_runs() -> None:
    world = World()
    watch = world.watch()
    world.now = 1e6
    assert watch.look() and not world.reasons


def test_a_step_that_does_not_end_is_named_once_its_time_is_over() -> None:
    world = World()
    watch = world.watch()
    watch.begun("step 7")
    watch.enqueued(Event())
    world.now = 10.0
    assert watch.look() and not world.reasons
    world.now = 10.1
    assert not watch.look()
    assert world.reasons == [
        "step 7 did not end within 10 seconds: a peer is gone or stuck; raise "
        "--tknp-exchange-timeout=10 if all are alive and slow"
    ]


def test_steps_enqueued_together_have_the_limit_each() -> None:
    """The host runs ahead of the device: the third step ends 24 s after it was enqueued."""
    world = World()
    watch = world.watch()
    events = [Event() for _ in range(3)]
    for index, event in enumerate(events):
        watch.begun(f"step {index}")
        watch.enqueued(event)
    for index, event in enumerate(events):
        world.now = 8.0 * (index + 1)
        event.done = True
        assert watch.look(), world.reasons
    watch.begun("step 3")
    watch.enqueued(Event())
    world.now += 10.1
    assert not watch.look() and world.reasons[0].startswith("step 3 ")


def test_a_host_that_does_not_come_back_from_a_step_is_noticed() -> None:
    """It may block in the driver before there is an event to look at."""
    world = World()
    watch = world.watch()
    watch.begun("step 1")
    watch.enqueued(Event(done=True))
    watch.begun("step 2")
    world.now = 10.0
    assert watch.look()
    world.now = 20.1
    assert not watch.look() and world.reasons[0].startswith("step 2 ")


def test_the_first_steps_may_take_longer() -> None:
    """An owner compiles its kernels in its first prefill, and its peers wait for it."""
    world = World()
    watch = StepWatch(10.0, world.reasons.append, clock=lambda: world.now, first_limit=100.0)
    for index in range(FIRST_STEPS):
        event = Event()
        watch.begun(f"step {index}")
        watch.enqueued(event)
        world.now += 99.0
        assert watch.look()
        event.done = True
        assert watch.look()
    watch.begun("a later step")
    world.now += 10.1
    assert not watch.look() and world.reasons[0].startswith("a later step did not end within 10 ")


def test_a_device_that_cannot_be_asked_is_a_reason() -> None:
    class Broken:
        def query(self) -> bool:
            raise RuntimeError("an illegal memory access was encountered")

    world = World()
    watch = world.watch()
    watch.begun("step 1")
    watch.enqueued(Broken())
    assert not watch.look()
    assert world.reasons == ["the device failed: an illegal memory access was encountered"]


@pytest.mark.timeout(10)
def test_the_thread_ends_once_it_has_spoken() -> None:
    world = World()
    watch = StepWatch(0.05, world.reasons.append)
    watch.begun("step 0")
    watch.enqueued(Event())
    watch._run()
    assert len(world.reasons) == 1


@pytest.mark.timeout(10)
def test_a_block_that_does_not_end_is_named_and_one_that_ends_is_not() -> None:
    reasons: list[str] = []
    stuck = threading.Event()

    def on_stuck(reason: str) -> None:
        reasons.append(reason)
        stuck.set()

    with time_limit(0.05, "the capture", on_stuck):
        assert stuck.wait(5)
    assert reasons == ["the capture did not end within 0.05 seconds: a peer is gone or stuck"]
    with time_limit(0.05, "a quick one", on_stuck):
        pass
    time.sleep(0.1)
    assert len(reasons) == 1
