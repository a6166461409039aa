"""How messages move between ranks: the transports under `Exchange`. Must not import sglang.

A transport posts batches of transfers and waits for them. `GlooTransport` (CPU) is here;
`StreamTransport` (CUDA) is in transport_stream.py.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist

KINDS = ("scatter", "gather", "handoff", "metadata", "logits")
# gloo matches messages by tag, in order within one; 0 is left to other users of the group.
_TAGS = {kind: tag for tag, kind in enumerate((*KINDS, "warm-up", "probe"), start=1)}


@dataclass(slots=True)
class Traffic:
    """What a rank sent of one kind."""

    messages: int = 0
    bytes: int = 0


@dataclass(slots=True)
class Transfer:
    """One message; holds its tensor until the transport is done with it."""

    kind: str
    verb: str  # "send" or "receive"
    tensor: torch.Tensor
    node: int  # the other end
    work: Any = None  # the transport's handle, set when posted


class Transport(Protocol):
    """Between one pair of nodes, transfers of one direction and kind meet in posting order."""

    device: torch.device  # of the tensors that it moves

    def post(self, sends: Sequence[Transfer], receives: Sequence[Transfer]) -> None:
        """Start transfers without waiting, each with `work` set. None of them is empty."""

    def wait(self, transfer: Transfer) -> None:
        """Return when what follows may use the transfer's tensor."""

    def join(self, whole: torch.Tensor, part: torch.Tensor) -> None:
        """All-gather inside the node: every TP rank's `part` into `whole`, in rank order."""

    def closed(self, node: int) -> bool:
        """Whether the connection to a node is known to be gone."""


class GlooTransport:
    """torch.distributed over gloo, with a time limit for every wait."""

    device = torch.device("cpu")

    def __init__(
        self,
        peer_group: dist.ProcessGroup,
        *,
        timeout: float,
        node_group: dist.ProcessGroup | None = None,
    ) -> None:
        """`timeout` in seconds; gloo's own is two hours."""
        self.peer_group, self.node_group = peer_group, node_group
        self.limit = timedelta(seconds=timeout)

    def post(self, sends: Sequence[Transfer], receives: Sequence[Transfer]) -> None:
        # A posted receive lets the sender's bytes go without a further round trip.
        for t in receives:
            t.work = dist.irecv(
                t.tensor, group=self.peer_group, tag=_TAGS[t.kind], group_src=t.node
            )
        for t in sends:
            t.work = dist.isend(
                t.tensor, group=self.peer_group, tag=_TAGS[t.kind], group_dst=t.node
            )

    def wait(self, transfer: Transfer) -> None:
        transfer.work.wait(self.limit)

    def join(self, whole: torch.Tensor, part: torch.Tensor) -> None:
        # As bytes, because not every dtype has a gloo collective.
        whole, part = whole.view(torch.uint8), part.view(torch.uint8)
        work = dist.all_gather_single(whole, part, group=self.node_group, async_op=True)
        assert work is not None
        work.wait(self.limit)

    def closed(self, node: int) -> bool:
        """Asked after a failure: the awaited node may have stopped because of another."""
        probe = Transfer("probe", "receive", torch.empty(1, dtype=torch.uint8), node)
        try:
            self.post([], [probe])
        except RuntimeError as error:
            # After our own time-out gloo closes every pair, which says nothing of the peer.
            return "timeout" not in str(error).lower()
        return False
