"""Proves the order of streams and events on accelerators, on a CPU, from recorded steps.

Every rank runs whole steps of the real Step, Exchange and StreamTransport over a recorder
(recorded_rank.py, recorder.py). Each check is also shown to find a fault that is put in on purpose.
"""

from collections.abc import Sequence
from itertools import product
from typing import Any
from unittest import mock

import pytest
import torch

from sglang_tknp.exchange import Exchange
from sglang_tknp.model_ext import step as step_module
from sglang_tknp.transport import Transfer
from sglang_tknp.transport_stream import StreamTransport
from tests.upstream.recorded_rank import (
    BLOCKS,
    QKV,
    RecordedRank,
    Rows,
    no_process_groups,
    record,
    trace,
)
from tests.upstream.recorder import MismatchError, Op, Place, Recorder, races, stuck, unjoined

pytestmark = pytest.mark.upstream

SIZES = (3, 2, 1, 4)


def some_owners(num_nodes: int) -> list[Rows]:
    """Every combination of owners with rows and owners with none; a step has a row at least."""
    masks = [mask for mask in product((1, 0), repeat=num_nodes) if any(mask)]
    return [tuple(n * on for n, on in zip(SIZES, mask, strict=False)) for mask in masks]


ROWS = [*some_owners(2), *some_owners(3)]
LARGER = {rows: tuple(n + 1 for n in rows) for rows in ROWS}
# Decode steps ask for all logits at once; a prompt step's rounds, none with more than its rows.
ROUNDS: dict[Rows, list[Rows]] = {
    (3, 2): [(1, 2), (1, 0)],
    (0, 2): [(0, 2), (0, 1)],
    (3, 2, 1): [(1, 2, 1), (0, 0, 1)],
    (3, 0, 1): [(1, 0, 1), (2, 0, 0)],
    (0, 0, 1): [(0, 0, 1)],
}


def all_races(programs: dict[Place, list[Op]]) -> set[tuple[str, str]]:
    return {pair for ops in programs.values() for pair in races(ops)}


def all_unjoined(programs: dict[Place, list[Op]]) -> list[str]:
    return [name for ops in programs.values() for name in unjoined(ops)]


def assert_right(programs: dict[Place, list[Op]]) -> None:
    assert not all_races(programs)
    assert not all_unjoined(programs)
    assert not stuck(programs)


# Whole steps: no data race, nothing left on the side stream, no deadlock.


class FreshBuffers(RecordedRank):
    """Steps on exact rows, which no graph captures: their buffers are freed."""

    def take(self, name: str, num_rows: int, width: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty((num_rows, width), dtype=dtype)


@pytest.mark.parametrize("rank", [RecordedRank, FreshBuffers])
@pytest.mark.parametrize("rows", ROWS)
def test_decode_steps(rows: Rows, rank: type[RecordedRank]) -> None:
    """Two on the same buffers, as a graph replays them, and one on more rows."""
    assert_right(record([rows, rows, LARGER[rows]], rank=rank))


@pytest.mark.parametrize("tp_size", [1, 2])
@pytest.mark.parametrize("rows", ROUNDS)
def test_prompt_steps_with_rounds_of_logits(rows: Rows, tp_size: int) -> None:
    assert_right(record([rows, rows], rounds=ROUNDS[rows], tp_size=tp_size))


@pytest.mark.parametrize("rows", [(3, 2), (0, 3), (3, 0), (2, 1, 2), (1, 0, 0)])
def test_nodes_of_two_tp_ranks(rows: Rows) -> None:
    """The handoff's all-gather too, with elements that two ranks cannot share evenly."""
    programs = record([rows, rows], tp_size=2)
    assert "all-gather" in {op.name for op in programs[1, 0]}
    assert_right(programs)


@pytest.mark.parametrize("num_nodes", [2, 3, 4])
def test_no_steps_deadlock(num_nodes: int) -> None:
    """All owners with and without rows, followed by the same ones and by all the others."""
    for rows in some_owners(num_nodes):
        others = tuple(n - m for n, m in zip(SIZES, rows, strict=False))
        for following in (rows, others) if any(others) else (rows,):
            assert not stuck(record([rows, following])), (rows, following)


def test_the_warm_up_does_not_deadlock() -> None:
    programs = {}
    for node in range(4):
        with no_process_groups():
            runner = RecordedRank((node, 0), 4)
        with runner.rec:
            runner.exchange.warm_up()
        programs[node, 0] = list(runner.rec.ops)
        assert sum(op.messages != () for op in programs[node, 0]) == 2 * 3
    assert_right(programs)


# The order within a layer.


def layers_of_root(ops: Sequence[Op]) -> list[list[Op]]:
    """From a layer's QKV to its dense part; frees and torch's small operations left out."""
    found: list[list[Op]] = []
    inside = False
    for op in (op for op in ops if "aten" not in op.name and op.name != "free"):
        if op.name == "QKV" and not inside:
            found.append([])
            inside = True
        if inside:
            found[-1].append(op)
        inside = inside and op.name != "dense"
    return found


@pytest.mark.parametrize("rows", [(3, 2), (3, 2, 1), (3, 0, 1)])
def test_the_root_attends_beside_its_messages(rows: Rows) -> None:
    for (node, _), ops in record([rows]).items():
        layers = layers_of_root(ops)
        assert len(layers) == BLOCKS[node]
        for layer in layers:
            steps = list(dict.fromkeys(op.name for op in layer))
            own = ["attend"] * (rows[node] > 0)
            messages = ["send scatter", "receive gather"]
            assert steps == ["QKV", "fork", *messages, *own, "join", "dense"]
            (send,), (receive,) = ([op for op in layer if op.name == name] for name in messages)
            for attend in (op for op in layer if op.name == "attend"):
                assert not attend.after(send) and not attend.after(receive)
                assert not send.after(attend) and not receive.after(attend)
            dense = layer[-1]
            assert dense.after(send) and dense.after(receive)


@pytest.mark.parametrize("rows", [(3, 2), (3, 2, 1)])
def test_the_owner_posts_its_next_receive_at_once(rows: Rows) -> None:
    """Node 1, while node 0 runs its two layers: nothing is computed between send and receive."""
    ops = record([rows])[1, 0]
    layer = [
        ("side", "fork"),
        ("side", "receive scatter"),
        ("current", "join"),
        ("current", "attend"),
        ("side", "fork"),
        ("side", "send gather"),
    ]
    steps = [(stream, name) for stream, name, _ in trace(ops)]
    assert steps[2:14] == [*layer, *layer]
    posted = [op for op in ops if op.stream == "side"]
    names = [op.name for op in posted]
    send = posted[names.index("send gather")]
    receive = posted[names.index("send gather") + 2]
    assert (send.name, receive.name) == ("send gather", "receive scatter")
    computed = range(send.clock["current"], receive.clock["current"])
    current = [op for op in ops if op.stream == "current"]
    assert all(current[i].name in ("join", "free") for i in computed)


# Faults put in on purpose.


class NoWait(StreamTransport):
    def wait(self, transfer: Transfer) -> None:
        pass


class ReceivesFirst(StreamTransport):
    def post(self, sends: Sequence[Transfer], receives: Sequence[Transfer]) -> None:
        super().post([], receives)
        super().post(sends, [])


class NoFork(Recorder):
    def fork(self) -> None:
        pass


class NoGatherEnd(Exchange):
    def gather_end(self) -> None:
        self._layer = []


class NoKeptSends(Exchange):
    """Lets go of what it sends, as if a posted send were over."""

    def _send_later(self, kind: str, sends: list[Transfer]) -> None:
        self._post(sends, [])


class NoFinish(Exchange):
    def finish_step(self) -> None:
        self._sent = {}


def posts_rows_before_outputs(step: Any, root: int, layers: Sequence[Any]) -> None:
    owner_side(step, root, layers, before_attention=False)


def posts_rows_before_attention(step: Any, root: int, layers: Sequence[Any]) -> None:
    owner_side(step, root, layers, before_attention=True)


def owner_side(step: Any, root: int, layers: Sequence[Any], *, before_attention: bool) -> None:
    """In place of attend_for_root: posts the next receive before this layer's outputs go."""
    if not step.layout.rows[step.node]:
        return

    def post() -> None:
        rows = step.buffers.of_node("rows", sum(QKV), step.stage.dtype)
        step.exchange.receive_rows_begin(rows, root)

    post()
    for layers_left in reversed(range(len(layers))):
        rows = step.exchange.receive_rows_end()
        if layers_left and before_attention:
            post()
        out = step.batch.attend(*rows.split(QKV, dim=-1))
        if layers_left and not before_attention:
            post()
        step.exchange.return_outputs(out, root)


class PostsRowsBeforeOutputs(RecordedRank):
    def step(self, *args: Any) -> None:
        with mock.patch.object(step_module, "attend_for_root", posts_rows_before_outputs):
            super().step(*args)


class PostsRowsBeforeAttention(RecordedRank):
    def step(self, *args: Any) -> None:
        with mock.patch.object(step_module, "attend_for_root", posts_rows_before_attention):
            super().step(*args)


@pytest.mark.parametrize(
    ("fault", "race"),
    [
        ({"transport": NoWait}, ("receive scatter", "attend")),
        ({"transport": NoWait}, ("receive gather", "dense")),
        ({"recorder": NoFork}, ("send scatter", "QKV")),
        ({"recorder": NoFork}, ("send gather", "attend")),
        ({"exchange": NoGatherEnd}, ("receive gather", "dense")),
        ({"exchange": NoGatherEnd}, ("send scatter", "free")),
        ({"exchange": NoKeptSends}, ("send gather", "free")),
        ({"rank": PostsRowsBeforeAttention}, ("receive scatter", "attend")),
    ],
)
def test_races_are_found(fault: dict[str, Any], race: tuple[str, str]) -> None:
    assert race in all_races(record([(3, 2, 1)] * 2, **fault))


@pytest.mark.parametrize("fault", [{"transport": NoWait}, {"exchange": NoFinish}])
def test_work_that_is_not_joined_is_found(fault: dict[str, Any]) -> None:
    assert {"send logits", "send gather"} & set(all_unjoined(record([(3, 2)], **fault)))


@pytest.mark.parametrize(
    ("fault", "waiting"),
    [
        ({"transport": ReceivesFirst}, {"(0, 0) side: receive gather"}),
        ({"rank": PostsRowsBeforeOutputs}, {"(1, 0) side: receive scatter"}),
    ],
)
def test_deadlocks_are_found(fault: dict[str, Any], waiting: set[str]) -> None:
    assert waiting <= set(stuck(record([(3, 2)], **fault)))


def test_ends_that_differ_are_found() -> None:
    programs = {**record([(3, 2)]), (1, 0): record([(3, 1)])[1, 0]}
    with pytest.raises(MismatchError):
        stuck(programs)
