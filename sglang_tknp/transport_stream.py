"""The transport of accelerators: a side stream that follows and is followed by events.

Not run on a GPU yet. Everything a step posts goes, in posting order, onto one side stream, so
that sends and receives run beside the attention of the current stream and a CUDA graph captures
them with the rest of the step. No host waits: an order between streams is an event.

    current stream   QKV ─┐ attend own rows ────┐ o_proj, MLP
                     fork │                     │ join (outputs in place)
    side stream           └ send rows, receive ─┘
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch

from sglang_tknp.transport import Transfer


class Streams(Protocol):
    """The current stream and the side stream of one device."""

    def fork(self) -> None:
        """What follows on the side stream comes after all that the current stream has by now."""

    def on_side(self) -> AbstractContextManager[Any]:
        """Inside, work goes to the side stream."""

    def mark(self) -> Any:
        """An event at the end of the side stream."""

    def join(self, event: Any) -> None:
        """What follows on the current stream comes after the event."""


class Channel(Protocol):
    """Launches communication on the stream that is current."""

    def run(self, transfers: Sequence[Transfer]) -> None:
        """All transfers as one operation, which is over when the last of them is."""

    def all_gather(self, whole: torch.Tensor, part: torch.Tensor) -> None:
        """Inside the node, in rank order."""


class StreamTransport:
    """Transfers on a side stream. A posting order that all ranks share cannot deadlock there.

    Sends go before receives, in an operation of their own: a root's rows must not wait until
    their outputs are back.
    """

    def __init__(self, device: torch.device, streams: Streams, channel: Channel) -> None:
        self.device = device
        self.streams, self.channel = streams, channel

    def post(self, sends: Sequence[Transfer], receives: Sequence[Transfer]) -> None:
        if not (sends or receives):
            return
        self.streams.fork()
        for batch in (sends, receives):
            if batch:
                with self.streams.on_side():
                    self.channel.run(batch)
                event = self.streams.mark()
                for transfer in batch:
                    transfer.work = event

    def wait(self, transfer: Transfer) -> None:
        self.streams.join(transfer.work)

    def join(self, whole: torch.Tensor, part: torch.Tensor) -> None:
        self.streams.fork()
        with self.streams.on_side():
            self.channel.all_gather(whole, part)
        self.streams.join(self.streams.mark())

    def closed(self, node: int) -> bool:
        return False  # NCCL does not tell


class CudaStreams:
    """torch.cuda's streams; every call can be captured into a graph."""

    def __init__(self) -> None:
        self.side = torch.cuda.Stream()

    def fork(self) -> None:
        self.side.wait_stream(torch.cuda.current_stream())

    def on_side(self) -> AbstractContextManager[Any]:
        side: AbstractContextManager[Any] = torch.cuda.stream(self.side)
        return side

    def mark(self) -> Any:
        return self.side.record_event()

    def join(self, event: Any) -> None:
        torch.cuda.current_stream().wait_event(event)


class NcclChannel:
    """SGLang's PyNccl communicators, which launch on the current stream and can be captured."""

    def __init__(self, peers: Any, node: Any) -> None:
        """Communicators of the peer group and of the node (None if it has one rank)."""
        self.peers, self.node = peers, node

    def run(self, transfers: Sequence[Transfer]) -> None:
        with self.peers.change_state(enable=True):
            self.peers.group_start()
            for t in transfers:
                move = self.peers.send if t.verb == "send" else self.peers.recv
                move(t.tensor, t.node)
            self.peers.group_end()

    def all_gather(self, whole: torch.Tensor, part: torch.Tensor) -> None:
        with self.node.change_state(enable=True):
            self.node.all_gather(whole, part)
