"""Records what one rank would do on an accelerator: every operation, its stream, its memory.

A `Recorder` is the streams and the channel of a StreamTransport. Nothing is sent, and zeros are
received: values do not matter here, only the order. As a dispatch mode it also records what torch
computes on the current stream. Memory that is freed counts as written on it, since the allocator
may hand it at once to what follows there.

An operation's clock counts the operations of each stream of its rank that it comes after, itself
included: that is the happens-before order, and it is all that `races` and `stuck` need.
"""

import contextlib
import weakref
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from sglang_tknp.transport import Transfer

Place = tuple[int, int]  # (node, TP rank)
Span = tuple[int, int]  # (first byte, one past the last)
Clock = dict[str, int]  # operations per stream
OTHER = {"current": "side", "side": "current"}
OPPOSITE = {"send": "receive", "receive": "send", "meet": "meet"}


@dataclass(frozen=True)
class Message:
    """One end of a transfer; "meet" is one rank's part of a collective."""

    verb: str
    kind: str
    peer: Place
    num_bytes: int


@dataclass(frozen=True)
class Op:
    stream: str
    name: str
    clock: Clock
    reads: tuple[Span, ...] = ()
    writes: tuple[Span, ...] = ()
    messages: tuple[Message, ...] = ()

    def after(self, other: "Op") -> bool:
        """Whether this operation happens after another one of its rank."""
        return self.clock[other.stream] >= other.clock[other.stream]


class Recorder(TorchDispatchMode):
    """The operations of one rank, in the order in which the host launches them."""

    def __init__(self, place: Place, tp_size: int = 1) -> None:
        super().__init__()
        self.place, self.tp_size = place, tp_size
        self.ops: list[Op] = []
        self.stream, self.label = "current", ""
        self.known: dict[str, Clock] = {s: {"current": 0, "side": 0} for s in OTHER}

    def record(self, stream: str, name: str, **memory_and_messages: Any) -> None:
        self.known[stream][stream] += 1
        self.ops.append(Op(stream, name, dict(self.known[stream]), **memory_and_messages))

    def _follow(self, stream: str, clock: Clock, name: str) -> None:
        self.known[stream] = {s: max(n, clock[s]) for s, n in self.known[stream].items()}
        self.record(stream, name)

    # The streams.

    def fork(self) -> None:
        self._follow("side", self.known["current"], "fork")

    @contextlib.contextmanager
    def on_side(self) -> Iterator[None]:
        self.stream = "side"
        yield
        self.stream = "current"

    def mark(self) -> Clock:
        return dict(self.known["side"])

    def join(self, event: Clock) -> None:
        self._follow("current", event, "join")

    # The channel.

    def run(self, transfers: Sequence[Transfer]) -> None:
        messages = [
            Message(t.verb, t.kind, (t.node, self.place[1]), t.tensor.nbytes) for t in transfers
        ]
        self.record(
            self.stream,
            " + ".join(dict.fromkeys(f"{m.verb} {m.kind}" for m in messages)),
            reads=spans([t.tensor for t in transfers if t.verb == "send"]),
            writes=spans([t.tensor for t in transfers if t.verb == "receive"]),
            messages=tuple(messages),
        )
        with _disable_current_modes():
            for t in transfers:
                if t.verb == "receive":
                    t.tensor.zero_()

    def all_gather(self, whole: torch.Tensor, part: torch.Tensor) -> None:
        self.collective("all-gather", reads=[part], writes=[whole])

    def collective(
        self, name: str, reads: Sequence[torch.Tensor], writes: Sequence[torch.Tensor]
    ) -> None:
        """Of the node's TP ranks, on the stream at hand."""
        node, tp_rank = self.place
        others = [(node, t) for t in range(self.tp_size) if t != tp_rank]
        meets = tuple(Message("meet", name, peer, writes[0].nbytes) for peer in others)
        self.record(self.stream, name, reads=spans(reads), writes=spans(writes), messages=meets)

    # What torch computes.

    @contextlib.contextmanager
    def named(self, name: str) -> Iterator[None]:
        """In it, operations of the current stream bear this name."""
        self.label = name
        yield
        self.label = ""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        given = [*zip(func._schema.arguments, args, strict=False)]
        given += [(a, kwargs[a.name]) for a in func._schema.arguments if a.name in (kwargs or {})]
        reads = [t for a, value in given if a.alias_info is None for t in tensors(value)]
        writes = [t for a, x in given if a.alias_info and a.alias_info.is_write for t in tensors(x)]
        for result, value in zip(func._schema.returns, tensors(out), strict=False):
            if result.alias_info is None:
                writes.append(value)
                storage = value.untyped_storage()
                span = (storage.data_ptr(), storage.data_ptr() + storage.nbytes())
                weakref.finalize(storage, self._freed, span).atexit = False
        if writes:  # a view moves nothing
            name = self.label or str(func)
            self.record(self.stream, name, reads=spans(reads), writes=spans(writes))
        return out

    def _freed(self, span: Span) -> None:
        self.record("current", "free", writes=(span,))


def tensors(value: Any) -> list[torch.Tensor]:
    values = value if isinstance(value, list | tuple) else [value]
    return [x for x in values if isinstance(x, torch.Tensor)]


def spans(values: Sequence[torch.Tensor]) -> tuple[Span, ...]:
    """From each tensor's first byte to its last: what lies between rows counts as touched."""
    found = []
    for x in values:
        if x.numel():
            reach = sum((n - 1) * step for n, step in zip(x.shape, x.stride(), strict=True))
            found.append((x.data_ptr(), x.data_ptr() + (reach + 1) * x.element_size()))
    return tuple(found)


def races(ops: Sequence[Op]) -> list[tuple[str, str]]:
    """Pairs of one rank's operations that share memory, one writing, with no order between."""
    side = [op for op in ops if op.stream == "side" and (op.reads or op.writes)]
    current = [op for op in ops if op.stream == "current" and (op.reads or op.writes)]
    return [
        (a.name, b.name)
        for a in side
        for b in current
        if not (a.after(b) or b.after(a))
        and (
            overlap(a.writes, b.writes) or overlap(a.writes, b.reads) or overlap(a.reads, b.writes)
        )
    ]


def overlap(one: Sequence[Span], other: Sequence[Span]) -> bool:
    return any(a < d and c < b for a, b in one for c, d in other)


def unjoined(ops: Sequence[Op]) -> list[str]:
    """What the current stream does not come after at the end: a graph cannot end like that."""
    joined = max((op.clock["side"] for op in ops if op.stream == "current"), default=0)
    return [op.name for op in ops if op.stream == "side" and op.clock["side"] > joined]


class MismatchError(AssertionError):
    """Two ends that meet differ: NCCL has no tags and would move bytes to a wrong place."""


def stuck(programs: Mapping[Place, Sequence[Op]]) -> list[str]:
    """Run all ranks as far as they come; the operations that wait for ever, none if all ended.

    A stream runs one operation at a time, and starts it when all that it comes after has ended.
    An operation ends when every message of it has met its other end, in an operation that the
    peer has started too. So no message is buffered: NCCL may, but need not.
    """
    queues = {
        (place, s): [op for op in ops if op.stream == s]
        for place, ops in programs.items()
        for s in OTHER
    }
    done = dict.fromkeys(queues, 0)
    open_: dict[tuple[Place, str], list[Message]] = {}  # unmet messages of what has started
    moved = True
    while moved:
        moved = False
        for (place, stream), queue in queues.items():
            key = (place, stream)
            while done[key] < len(queue):
                op = queue[done[key]]
                if op.clock[OTHER[stream]] > done[place, OTHER[stream]]:
                    break
                unmet = open_.setdefault(key, list(op.messages))
                moved |= _meet(place, unmet, open_)
                if unmet:
                    break
                del open_[key]
                done[key] += 1
                moved = True
    waiting = [(key, queue[done[key]]) for key, queue in queues.items() if done[key] < len(queue)]
    return [f"{place} {stream}: {op.name}" for (place, stream), op in waiting]


def _meet(
    place: Place, unmet: list[Message], open_: Mapping[tuple[Place, str], list[Message]]
) -> bool:
    """Take from `unmet`, and from the peers' operations, all pairs of ends that meet now."""
    met = False
    for message in list(unmet):
        for stream in OTHER:
            others = open_.get((message.peer, stream), [])
            verb = OPPOSITE[message.verb]
            end = next((m for m in others if m.peer == place and m.verb == verb), None)
            if end is None or (verb == "meet" and end.kind != message.kind):
                continue
            if (end.kind, end.num_bytes) != (message.kind, message.num_bytes):
                raise MismatchError(f"{message} of {place} meets {end} of {message.peer}")
            unmet.remove(message)
            others.remove(end)
            met = True
            break
    return met
