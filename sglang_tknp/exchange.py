"""Every transfer between nodes: scatter, gather, handoff, small integers, logits.

One `Exchange` per rank speaks over its peer group (the ranks of equal TP rank, one per node) and,
for the second half of a handoff, inside its node, through a transport (gloo on CPU, CUDA streams
and NCCL on GPUs). It must not import sglang, and reads no device tensor on the host.

Order of one step's messages, the same on every rank, so that each pair sees one fixed order:
`collect` of ids and positions, then per block [handoff in], per layer scatter and gather,
[handoff out], then the rounds of `share_counts`, `collect` and logits, then `finish_step`.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import lru_cache
from itertools import combinations

import torch
import torch.distributed as dist

from sglang_tknp.layout import OwnershipLayout
from sglang_tknp.transport import KINDS, Traffic, Transfer, Transport


class ExchangeError(RuntimeError):
    """A transfer failed or took longer than --tknp-exchange-timeout; the pool must stop."""


class Exchange:
    """All exchange code of one rank. Peers are addressed by node index (= rank in the peer group).

    Non-blocking calls keep their tensors alive; the caller leaves a sent tensor unmodified until
    the call that is documented to wait for it. After an ExchangeError the object is unusable.
    """

    def __init__(
        self,
        transport: Transport,
        node: int,
        ranks: Sequence[int],
        *,
        timeout: float,
        tp_rank: int = 0,
        tp_size: int = 1,
        cpu_group: dist.ProcessGroup | None = None,
    ) -> None:
        """`ranks`: world ranks of the peers, in node order; `timeout` in seconds, for errors.

        `cpu_group`: a gloo group of the peers, for share_counts.
        """
        self.transport = transport
        self.node, self.num_nodes = node, len(ranks)
        self._tp_rank, self._tp_size = tp_rank, tp_size
        self._ranks, self._cpu_group = list(ranks), cpu_group
        self._limit = timedelta(seconds=timeout)
        self._others = tuple(n for n in range(self.num_nodes) if n != node)
        self._layer: list[Transfer] = []  # the root's open layer
        self._rows: Transfer | None = None  # the owner's open receive
        self._sent: dict[str, list[Transfer]] = {}  # sends not yet waited for, per kind
        self.reset_stats()

    def reset_stats(self) -> None:
        self.stats = {kind: Traffic() for kind in KINDS}

    def traffic_since(self, before: Mapping[str, Traffic]) -> dict[str, Traffic]:
        """What was sent after `before`, a copy of `stats`."""
        return {
            kind: Traffic(now.messages - before[kind].messages, now.bytes - before[kind].bytes)
            for kind, now in self.stats.items()
        }

    def add_traffic(self, traffic: Mapping[str, Traffic]) -> None:
        """Count what a captured step sends, which no Python sees."""
        for kind, sent in traffic.items():
            self._count(kind, sent.messages, sent.bytes)

    def warm_up(self) -> None:
        """One byte between every pair, in node order. All ranks must reach it, before all else.

        The first point-to-point of a group must involve all of its ranks.
        """
        ours = torch.zeros(1, dtype=torch.uint8, device=self.transport.device)
        pairs = combinations(range(self.num_nodes), 2)
        for low, high in (pair for pair in pairs if self.node in pair):
            peer = high if self.node == low else low
            send = Transfer("warm-up", "send", ours, peer)
            receive = Transfer("warm-up", "receive", torch.empty_like(ours), peer)
            # The lower node sends first: a transport may run what is posted one by one.
            for t in (send, receive) if self.node == low else (receive, send):
                self._post(*(([t], []) if t is send else ([], [t])))
            self._wait([send, receive])

    # One layer, root side.

    def scatter_begin(self, qkv: torch.Tensor, out: torch.Tensor, layout: OwnershipLayout) -> None:
        """Post this layer's rows to their owners and the receives of their outputs into `out`.

        Only the active root calls it; every other node with rows answers with receive_rows and
        return_outputs. No copies: `qkv` [R, C] and `out` [R, O] must be contiguous. Until
        gather_end, `qkv` is not written and of `out` only the root's own rows are touched.
        """
        assert not self._layer, "scatter_begin before the former layer's gather_end"
        owners = _remote_owners(layout, self.node)
        # One call each for all slices: called by layer, on a core that has just slept.
        rows, outs = qkv.split(layout.rows), out.split(layout.rows)
        receives = [Transfer("gather", "receive", outs[n], n) for n in owners]
        sends = [Transfer("scatter", "send", rows[n], n) for n in owners]
        self._post(sends, receives)
        self._layer = receives + sends

    def gather_end(self) -> None:
        """Wait until every owner's outputs are in place and `qkv` may be reused. Root only."""
        self._wait(self._layer)
        self._layer = []

    # One layer, owner side.

    def receive_rows_begin(self, buffer: torch.Tensor, root: int) -> None:
        """Post the receive of my rows of the next layer from `root`, at most one outstanding.

        Every node but the active root, in layer order; with zero rows it sends and waits nothing.
        """
        assert self._rows is None, "receive_rows_begin before the former layer's receive_rows_end"
        self._rows = Transfer("scatter", "receive", buffer, root)
        self._post([], [self._rows])

    def receive_rows_end(self) -> torch.Tensor:
        """Wait for the receive of rows and return its buffer."""
        assert self._rows is not None, "receive_rows_end before receive_rows_begin"
        transfer, self._rows = self._rows, None
        self._wait([transfer])
        return transfer.tensor

    def return_outputs(self, out: torch.Tensor, root: int) -> None:
        """Send my rows' outputs to `root`; `out` is free after the next call or finish_step."""
        self._send_later("gather", [Transfer("gather", "send", out, root)])

    # A block's end.

    def send_handoff(
        self, tensors: Sequence[torch.Tensor], positions: torch.Tensor, to_node: int
    ) -> None:
        """Send 1/T of every tensor to the next root. All T ranks of the old root must reach it.

        The tensors are contiguous and replicated over the node's TP ranks; they stay unmodified
        until finish_step. `positions` [R], small, goes whole to every rank.
        """
        parts = [self._part(_flat(tensor)) for tensor in tensors]
        self._send_later("handoff", [Transfer("handoff", "send", p, to_node) for p in parts])
        self._send_later("metadata", [Transfer("metadata", "send", positions, to_node)])

    def receive_handoff(
        self, buffers: Sequence[torch.Tensor], positions: torch.Tensor, from_node: int
    ) -> None:
        """Fill `buffers` and `positions` from the old root; all T ranks of the new one reach it.

        The node's ranks then all-gather their parts inside the node, which `stats` leaves out.
        """
        flats = [_flat(buffer) for buffer in buffers]
        receives = [Transfer("handoff", "receive", self._part(f), from_node) for f in flats]
        receives.append(Transfer("metadata", "receive", positions, from_node))
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
        with self._failing("the handoff's all-gather inside the node"):
            self.transport.join(whole, part)
        if uneven:
            flat.copy_(whole[: flat.numel()])

    # Small integers and logits.

    def collect(
        self,
        local: torch.Tensor,
        counts: Sequence[int],
        to_node: int,
        out: torch.Tensor | None = None,
    ) -> None:
        """Every node's rows of integers into `out` [sum(counts), ...] on `to_node`, in node order.

        All nodes reach it; `counts` has every node's rows, the same on all ranks, and nodes with
        none send nothing. Elsewhere there is no `out`, and `local` is free after finish_step.
        """
        assert local.shape[0] == counts[self.node]
        if self.node != to_node:
            self._send_later("metadata", [Transfer("metadata", "send", local, to_node)])
            return
        assert out is not None and out.shape[0] == sum(counts) and out.dtype == local.dtype
        parts = out.split(list(counts))
        receives = [Transfer("metadata", "receive", parts[n], n) for n in self._others]
        self._post([], receives)
        parts[self.node].copy_(local)
        self._wait(receives)

    def share_counts(self, value: int) -> list[int]:
        """Return every node's `value`, in node order, over CPU tensors. All nodes must reach it."""
        counts = torch.empty(self.num_nodes, dtype=torch.int64)
        with self._failing(f"the all-gather of row counts with ranks {self._ranks}"):
            assert self._cpu_group is not None and dist.get_backend(self._cpu_group) == "gloo"
            local = torch.tensor([value])
            work = dist.all_gather_single(counts, local, group=self._cpu_group, async_op=True)
            assert work is not None
            work.wait(self._limit)
        self._count("metadata", len(self._others), counts.itemsize * len(self._others))
        return counts.tolist()

    def send_slices(self, rows: torch.Tensor, counts: Sequence[int]) -> None:
        """Send every other node its slice of `rows` [sum(counts), V]; the head's node calls it.

        Every other node with a count above zero must call receive_slice. `rows` is free after the
        next call or finish_step.
        """
        slices = rows.split(list(counts))
        sends = [Transfer("logits", "send", slices[n], n) for n in self._others]
        self._send_later("logits", sends)

    def receive_slice(self, buffer: torch.Tensor, root: int) -> None:
        """Receive my slice of the rows that `root` sends; returns when it is in `buffer`."""
        receives = [Transfer("logits", "receive", buffer, root)]
        self._post([], receives)
        self._wait(receives)

    def finish_step(self) -> None:
        """Wait for every outstanding send. All ranks call it, at the end of a step."""
        assert not self._layer, "finish_step before gather_end"
        assert self._rows is None, "finish_step with a receive of rows outstanding"
        for transfers in self._sent.values():
            self._wait(transfers)
        self._sent = {}

    # Posting, waiting, counting, failing.

    def _send_later(self, kind: str, sends: list[Transfer]) -> None:
        """Post sends that are waited for at this kind's next send, or at finish_step.

        By then the receiver has used the former ones (the step's order says so), so this wait
        does not block; it keeps at most one send per kind and peer alive.
        """
        self._post(sends, [])
        self._wait(self._sent.pop(kind, []))
        self._sent[kind] = sends

    def _post(self, sends: list[Transfer], receives: list[Transfer]) -> None:
        sends = [t for t in sends if t.tensor.numel()]
        receives = [t for t in receives if t.tensor.numel()]
        try:
            self.transport.post(sends, receives)
        except RuntimeError as error:
            # A transport may start either first; what has no handle was not, or not quite, begun.
            batch = receives + sends
            failed = next((t for t in batch if t.work is None), batch[0])
            raise self._failure(failed, error) from error
        for t in sends:
            if t.kind in self.stats:
                self._count(t.kind, 1, t.tensor.numel() * t.tensor.element_size())

    def _count(self, kind: str, messages: int, num_bytes: int) -> None:
        traffic = self.stats[kind]
        traffic.messages += messages
        traffic.bytes += num_bytes

    def _wait(self, transfers: Sequence[Transfer]) -> None:
        for t in transfers:
            if t.work is None:  # zero rows
                continue
            try:
                self.transport.wait(t)
            except RuntimeError as error:
                raise self._failure(t, error) from error

    @contextmanager
    def _failing(self, what: str) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            raise self._error(what, error) from error

    def _failure(self, t: Transfer, error: RuntimeError) -> ExchangeError:
        preposition = "to" if t.verb == "send" else "from"
        shape = list(t.tensor.shape)
        return self._error(
            f"the {t.verb} of {t.kind} {shape} {preposition} {self._name(t.node)}", error
        )

    def _error(self, what: str, error: RuntimeError) -> ExchangeError:
        closed = ", ".join(self._name(n) for n in self._others if self.transport.closed(n))
        return ExchangeError(
            f"TKNP {self._name(self.node)} failed in {what}: {str(error).strip()}. "
            + (f"Connections closed by: {closed}. " if closed else "")
            + f"--tknp-exchange-timeout={self._limit.total_seconds():g} seconds is what a transfer "
            "may take; raise it if all processes are alive and only slow."
        )

    def _name(self, node: int) -> str:
        return f"node {node} (rank {self._ranks[node]})"


@lru_cache(maxsize=256)
def _remote_owners(layout: OwnershipLayout, root: int) -> tuple[int, ...]:
    """Every other node with rows; the same all through a step."""
    return tuple(n for n, rows in enumerate(layout.rows) if rows and n != root)


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(-1)  # raises on a tensor that would need a copy
