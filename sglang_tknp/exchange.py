"""Every transfer between nodes: scatter, gather, handoff, small integers, logits.

One `Exchange` per rank speaks over its peer group (the ranks of equal TP rank, one per node) and,
for the second half of a handoff, over its node group. torch.distributed only: gloo on CPU, NCCL on
CUDA (not run on a GPU yet). It must not import sglang, and reads no device tensor on the host.

Order of one step's messages, the same on every rank, so that each pair sees one fixed order:
`share`, then per block [handoff in], per layer scatter and gather, [handoff out], then the rounds
of `share_counts` and logits, then `finish_step`.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from itertools import accumulate, pairwise

import torch
import torch.distributed as dist

from sglang_tknp.layout import OwnershipLayout

KINDS = ("scatter", "gather", "handoff", "metadata", "logits")
# gloo matches messages by tag, in order within one; 0 is left to other users of the group.
_TAGS = {kind: tag for tag, kind in enumerate((*KINDS, "warm-up", "probe"), start=1)}
_MAX_ROWS_AHEAD = 2


class ExchangeError(RuntimeError):
    """A transfer failed or took longer than --tknp-exchange-timeout; the pool must stop."""


@dataclass(slots=True)
class Traffic:
    """What this rank sent of one kind."""

    messages: int = 0
    bytes: int = 0


@dataclass(slots=True)
class _Transfer:
    """One message; holds its tensor until the transport is done with it."""

    kind: str
    verb: str  # "send" or "receive"
    tensor: torch.Tensor
    node: int  # the other end
    work: dist.Work | None = None  # set when posted; stays None for zero rows


class Exchange:
    """All exchange code of one rank. Peers are addressed by node index (= rank in `peer_group`).

    Non-blocking calls keep their tensors alive; the caller leaves a sent tensor unmodified until
    the call that is documented to wait for it. After an ExchangeError the object is unusable.
    NCCL: a wait orders the current stream and does not block the host, so there the groups' own
    time-out (give them the same one) ends a stuck transfer through NCCL's watchdog.
    """

    def __init__(
        self,
        peer_group: dist.ProcessGroup,
        node: int,
        num_nodes: int,
        *,
        timeout: float,
        node_group: dist.ProcessGroup | None = None,
        tp_rank: int = 0,
        tp_size: int = 1,
        cpu_group: dist.ProcessGroup | None = None,
    ) -> None:
        """`cpu_group`: a gloo group of the same peers, needed where `peer_group` is not gloo."""
        assert (dist.get_rank(peer_group), dist.get_world_size(peer_group)) == (node, num_nodes)
        assert tp_size == 1 or (node_group and dist.get_rank(node_group) == tp_rank)
        self.node, self.num_nodes = node, num_nodes
        self._tp_rank, self._tp_size = tp_rank, tp_size
        self._peer_group, self._node_group = peer_group, node_group or peer_group
        self._limit = timedelta(seconds=timeout)
        self._ranks = dist.get_process_group_ranks(peer_group)
        self._others = tuple(n for n in range(num_nodes) if n != node)
        self._is_gloo = dist.get_backend(peer_group) == "gloo"
        self._cpu_group = cpu_group or peer_group
        assert dist.get_backend(self._cpu_group) == "gloo", "share_counts needs a gloo cpu_group"
        self._post_on_wire = _receives_first if self._is_gloo else _sends_first
        self._posts_ahead = self._is_gloo
        self._layer: list[_Transfer] = []  # the root's open layer
        self._rows: deque[_Transfer] = deque()  # the owner's receives, oldest first
        self._sent: dict[str, list[_Transfer]] = {}  # sends not yet waited for, per kind
        self.reset_stats()

    def reset_stats(self) -> None:
        self.stats = {kind: Traffic() for kind in KINDS}

    def warm_up(self) -> None:
        """One byte between every pair, in node order. All ranks must reach it, before all else.

        The first point-to-point of a group must involve all of its ranks (both backends).
        """
        device = torch.device("cpu")
        if not self._is_gloo:
            device = torch.device("cuda", torch.cuda.current_device())
        ours = torch.zeros(1, dtype=torch.uint8, device=device)
        receives = [_receive("warm-up", torch.empty_like(ours), n) for n in self._others]
        sends = [_send("warm-up", ours, n) for n in self._others]
        self._post(sends, receives, symmetric=True)
        self._wait(receives + sends)

    # One layer, root side.

    def scatter_begin(self, qkv: torch.Tensor, out: torch.Tensor, layout: OwnershipLayout) -> None:
        """Post this layer's rows to their owners and the receives of their outputs into `out`.

        Only the active root calls it; every other node with rows answers with receive_rows and
        return_outputs. No copies: `qkv` [R, C] and `out` [R, Q] must be contiguous. Until
        gather_end, `qkv` is not written and of `out` only the root's own rows are touched.
        """
        assert not self._layer, "scatter_begin before the former layer's gather_end"
        owners = [n for n in self._others if layout.rows[n]]
        slices = [layout.slice_of(n) for n in owners]
        receives = [_receive("gather", out[s], n) for s, n in zip(slices, owners, strict=True)]
        sends = [_send("scatter", qkv[s], n) for s, n in zip(slices, owners, strict=True)]
        self._post(sends, receives)
        self._layer = receives + sends

    def gather_end(self) -> None:
        """Wait until every owner's outputs are in place and `qkv` may be reused. Root only."""
        self._wait(self._layer)
        self._layer = []

    # One layer, owner side.

    def receive_rows_begin(self, buffer: torch.Tensor, root: int) -> None:
        """Post the receive of my rows of the next layer from `root`, at most two outstanding.

        Every node but the active root, in layer order; with zero rows it sends and waits nothing.
        """
        assert len(self._rows) < _MAX_ROWS_AHEAD, "more than two receives of rows outstanding"
        transfer = _receive("scatter", buffer, root)
        if self._posts_ahead:
            self._post([], [transfer])
        self._rows.append(transfer)

    def receive_rows_end(self) -> torch.Tensor:
        """Wait for the oldest receive of rows and return its buffer."""
        transfer = self._rows.popleft()
        if not self._posts_ahead:
            self._post([], [transfer])
        self._wait([transfer])
        return transfer.tensor

    def return_outputs(self, out: torch.Tensor, root: int) -> None:
        """Send my rows' outputs to `root`; `out` is free after the next call or finish_step."""
        self._send_later("gather", [_send("gather", out, root)])

    # A block's end.

    def send_handoff(self, tensors: Sequence[torch.Tensor], to_node: int) -> None:
        """Send 1/T of every tensor to the next root. All T ranks of the old root must reach it.

        The tensors are contiguous and replicated over the node's TP ranks; they stay unmodified
        until finish_step.
        """
        parts = [self._part(_flat(tensor)) for tensor in tensors]
        self._send_later("handoff", [_send("handoff", part, to_node) for part in parts])

    def receive_handoff(self, buffers: Sequence[torch.Tensor], from_node: int) -> None:
        """Fill `buffers` from the old root. All T ranks of the new root must reach it.

        The node's ranks then all-gather their parts inside the node, which `stats` leaves out.
        """
        flats = [_flat(buffer) for buffer in buffers]
        receives = [_receive("handoff", self._part(flat), from_node) for flat in flats]
        self._post([], receives)
        self._wait(receives)
        if self._tp_size > 1:
            for flat in flats:
                self._join_parts(flat)

    def _part(self, flat: torch.Tensor) -> torch.Tensor:
        chunk = -(-flat.numel() // self._tp_size)
        return flat[self._tp_rank * chunk : (self._tp_rank + 1) * chunk]

    def _join_parts(self, flat: torch.Tensor) -> None:
        """All-gather in place; through a padded copy where T does not divide the elements."""
        if not flat.numel():
            return
        part, whole = self._part(flat), flat
        if uneven := flat.numel() % self._tp_size:
            chunk = -(-flat.numel() // self._tp_size)
            whole = flat.new_zeros(chunk * self._tp_size)
            padded = self._part(whole)
            padded[: part.numel()] = part
            part = padded
        # As bytes, because not every dtype has a gloo collective.
        self._collect("handoff", whole.view(torch.uint8), part.view(torch.uint8), self._node_group)
        if uneven:
            flat.copy_(whole[: flat.numel()])

    # Small integers and logits.

    def share(
        self, local: torch.Tensor, counts: Sequence[int], out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return every node's integers in node order. All nodes must reach it.

        `counts` has every node's length, the same on all ranks; a zero count sends nothing.
        """
        assert local.shape[0] == counts[self.node]
        bounds = list(accumulate(counts, initial=0))
        if out is None:
            out = local.new_empty((bounds[-1], *local.shape[1:]))
        assert out.shape[0] == bounds[-1] and out.dtype == local.dtype
        parts = [out[start:end] for start, end in pairwise(bounds)]
        receives = [_receive("metadata", parts[n], n) for n in self._others]
        sends = [_send("metadata", local, n) for n in self._others]
        self._post(sends, receives, symmetric=True)
        parts[self.node].copy_(local)
        self._wait(receives + sends)
        return out

    def share_counts(self, value: int) -> list[int]:
        """Return every node's `value`, in node order, over CPU tensors. All nodes must reach it."""
        counts = torch.empty(self.num_nodes, dtype=torch.int64)
        self._collect("metadata", counts, torch.tensor([value]), self._cpu_group)
        self._count("metadata", len(self._others), counts.itemsize * len(self._others))
        return counts.tolist()

    def send_slices(self, rows: torch.Tensor, counts: Sequence[int]) -> None:
        """Send every other node its slice of `rows` [sum(counts), V]; the head's node calls it.

        Every other node with a count above zero must call receive_slice. `rows` is free after the
        next call or finish_step.
        """
        bounds = pairwise(accumulate(counts, initial=0))
        slices = [rows[start:end] for start, end in bounds]
        self._send_later("logits", [_send("logits", slices[n], n) for n in self._others])

    def receive_slice(self, buffer: torch.Tensor, root: int) -> None:
        """Receive my slice of the rows that `root` sends; returns when it is in `buffer`."""
        receives = [_receive("logits", buffer, root)]
        self._post([], receives)
        self._wait(receives)

    def finish_step(self) -> None:
        """Wait for every outstanding send. All ranks call it, at the end of a step."""
        assert not self._layer, "finish_step before gather_end"
        assert not self._rows, "finish_step with a receive of rows outstanding"
        for transfers in self._sent.values():
            self._wait(transfers)
        self._sent = {}

    # Posting, waiting, counting, failing.

    def _send_later(self, kind: str, sends: list[_Transfer]) -> None:
        """Post sends that are waited for at this kind's next send, or at finish_step.

        By then the receiver has used the former ones (the step's order says so), so this wait
        does not block; it keeps at most one send per kind and peer alive.
        """
        self._post(sends, [])
        self._wait(self._sent.pop(kind, []))
        self._sent[kind] = sends

    def _post(
        self, sends: list[_Transfer], receives: list[_Transfer], *, symmetric: bool = False
    ) -> None:
        sends = [t for t in sends if t.tensor.numel()]
        receives = [t for t in receives if t.tensor.numel()]
        try:
            self._post_on_wire(self._peer_group, sends, receives, symmetric)
        except RuntimeError as error:
            failed = next(t for t in receives + sends if t.work is None)
            raise self._failure(failed, error) from error
        for t in sends:
            if t.kind in self.stats:
                self._count(t.kind, 1, t.tensor.numel() * t.tensor.element_size())

    def _count(self, kind: str, messages: int, num_bytes: int) -> None:
        traffic = self.stats[kind]
        traffic.messages += messages
        traffic.bytes += num_bytes

    def _wait(self, transfers: Sequence[_Transfer]) -> None:
        for t in transfers:
            if t.work is None:
                continue
            try:
                self._complete(t.work, self._is_gloo)
            except RuntimeError as error:
                raise self._failure(t, error) from error

    def _complete(self, work: dist.Work | None, is_gloo: bool) -> None:
        assert work is not None
        # gloo's default is hours. On NCCL a time-out would make wait() block the host.
        if is_gloo:
            work.wait(self._limit)
        else:
            work.wait()

    def _collect(
        self, kind: str, out: torch.Tensor, local: torch.Tensor, group: dist.ProcessGroup
    ) -> None:
        try:
            work = dist.all_gather_single(out, local, group, async_op=True)
            self._complete(work, dist.get_backend(group) == "gloo")
        except RuntimeError as error:
            what = f"the {kind} all-gather with ranks {dist.get_process_group_ranks(group)}"
            raise self._error(what, error) from error

    def _failure(self, t: _Transfer, error: RuntimeError) -> ExchangeError:
        preposition = "to" if t.verb == "send" else "from"
        shape = list(t.tensor.shape)
        return self._error(
            f"the {t.verb} of {t.kind} {shape} {preposition} {self._name(t.node)}", error
        )

    def _error(self, what: str, error: RuntimeError) -> ExchangeError:
        closed = ", ".join(self._name(n) for n in self._closed_nodes())
        return ExchangeError(
            f"TKNP {self._name(self.node)} failed in {what}: {str(error).strip()}. "
            + (f"Connections closed by: {closed}. " if closed else "")
            + f"--tknp-exchange-timeout={self._limit.total_seconds():g} seconds is what a transfer "
            "may take; raise it if all processes are alive and only slow."
        )

    def _name(self, node: int) -> str:
        return f"node {node} (rank {self._ranks[node]})"

    def _closed_nodes(self) -> list[int]:
        """Ask gloo which peers are gone: the awaited one may have stopped because of another."""
        closed = []
        for node in self._others if self._is_gloo else ():
            probe = _receive("probe", torch.empty(1, dtype=torch.uint8), node)
            try:
                _receive_now(self._peer_group, probe)
            except RuntimeError as error:
                # After our own time-out gloo closes every pair, which says nothing of the peer.
                if "timeout" not in str(error).lower():
                    closed.append(node)
        return closed


def _send(kind: str, tensor: torch.Tensor, node: int) -> _Transfer:
    return _Transfer(kind, "send", tensor, node)


def _receive(kind: str, tensor: torch.Tensor, node: int) -> _Transfer:
    return _Transfer(kind, "receive", tensor, node)


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(-1)  # raises on a tensor that would need a copy


def _receive_now(group: dist.ProcessGroup, t: _Transfer) -> None:
    t.work = dist.irecv(t.tensor, group=group, tag=_TAGS[t.kind], group_src=t.node)


# How a backend wants messages posted; callers of Exchange never see it. `symmetric`: both ends of
# every pair send and receive in this one call.


def _receives_first(
    group: dist.ProcessGroup, sends: list[_Transfer], receives: list[_Transfer], symmetric: bool
) -> None:
    """gloo: a posted receive lets the sender's bytes go without a further round trip."""
    for t in receives:
        _receive_now(group, t)
    for t in sends:
        t.work = dist.isend(t.tensor, group=group, tag=_TAGS[t.kind], group_dst=t.node)


def _sends_first(
    group: dist.ProcessGroup, sends: list[_Transfer], receives: list[_Transfer], symmetric: bool
) -> None:
    """NCCL: a group's kernels run in posting order, so a receive would block later sends.

    Always batched, even one message: NCCL runs single ones on another communicator per pair, where
    they would never meet a batched other end. Sends and receives share one batch only when both
    ends do both, so that the sends of a layer do not last until its outputs are back.
    """
    for batch in [sends + receives] if symmetric else [sends, receives]:
        operations = [dist.isend if t.verb == "send" else dist.irecv for t in batch]
        ops = [
            dist.P2POp(operation, t.tensor, group=group, group_peer=t.node)
            for operation, t in zip(operations, batch, strict=True)
        ]
        works = dist.batch_isend_irecv(ops) if ops else []
        for i, t in enumerate(batch):
            # NCCL returns one work for the whole batch, other backends one each.
            t.work = works[i if len(works) == len(batch) else 0]
