"""Idle is idle: schedulers block on their sockets, and one wakes all.

The nodes of a pool step in lockstep, so a node may only sleep while its peers can be woken:
every node's first rank owns a socket on which any peer tells it that there is work.
"""

import contextlib
from collections.abc import Callable
from typing import Any

import torch
import zmq

from sglang_tknp import compat

# A sleeping node looks around this often even if nobody calls.
HEARTBEAT_MS = 1000
# A node whose requests cannot run yet (a grammar compiles, memory is short) looks this often.
WAITING_MS = 2


class PeerSleeper:
    """Sleeps until a request for this node, or a peer's call, arrives. First rank of a node."""

    def __init__(self, request_sockets: list[Any], wake_socket: Any, peers: list[Any]) -> None:
        self.wake_socket = wake_socket
        self.peers = peers
        self.before_sleep: list[Callable[[], None]] = []
        self.while_waiting: list[Callable[[], None]] = []
        self.poller = zmq.Poller()
        for socket in (*request_sockets, wake_socket):
            self.poller.register(socket, zmq.POLLIN)

    def maybe_sleep(self) -> None:
        """SGLang calls it when this node has nothing to do and the step was idle everywhere."""
        for call in self.before_sleep:
            call()
        self._rest(HEARTBEAT_MS)

    def rest_while_waiting(self) -> None:
        """This node has requests that cannot run: keep the peers stepping, and do not spin."""
        for call in self.while_waiting:
            call()
        self.wake_peers()
        self._rest(WAITING_MS)

    def _rest(self, limit_ms: int) -> None:
        ready = {socket for socket, _ in self.poller.poll(limit_ms)}
        while self.wake_socket.poll(0):
            self.wake_socket.recv(zmq.NOBLOCK)
        # Whoever called has woken all; a request here is news to them even beside an old call.
        if ready - {self.wake_socket}:
            self.wake_peers()

    def wake_peers(self) -> None:
        for peer in self.peers:
            with contextlib.suppress(zmq.Again):  # its queue is full of calls already
                peer.send(b"", zmq.NOBLOCK)


def after_init_idle_sleeper(result: Any, scheduler: Any) -> None:
    """Target: Scheduler.init_idle_sleeper, on every rank (addresses are gathered)."""
    parallel = compat.parallel()
    leads = parallel.attn_tp_rank == 0
    host = "127.0.0.1" if parallel.nnodes == 1 else compat.host_address()
    wake_socket: Any = None
    port = None
    if leads:
        wake_socket = zmq.Context.instance().socket(zmq.PULL)
        port = wake_socket.bind_to_random_port(f"tcp://{host}")
    group = parallel.tp_group
    addresses: list[Any] = [None] * group.world_size
    own = f"tcp://{host}:{port}" if leads else None
    torch.distributed.all_gather_object(addresses, own, group=group.cpu_group)
    if leads:
        peers = [_connect(a) for a in addresses if a is not None and a != own]
        channels = scheduler.ipc_channels
        requests = [channels.recv_from_tokenizer, channels.recv_from_rpc]
        sockets = [s for s in requests if s is not None]
        scheduler.idle_sleeper = PeerSleeper(sockets, wake_socket, peers)


def _connect(address: str) -> Any:
    socket: Any = zmq.Context.instance().socket(zmq.PUSH)
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.SNDHWM, 16)
    socket.connect(address)
    return socket


def before_on_idle(scheduler: Any) -> None:
    """Target: Scheduler.on_idle, on every rank after a step that was idle everywhere."""
    sleeper = scheduler.idle_sleeper
    if isinstance(sleeper, PeerSleeper) and not scheduler.is_fully_idle():
        sleeper.rest_while_waiting()
