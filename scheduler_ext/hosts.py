"""One connection between the launchers of a pool's hosts, open from the start to the end.

Until the process groups exist, ranks have no connection that a lost host would close, and SGLang
waits minutes for it. The first host's launcher listens beside --dist-init-addr, the others
connect; a connection that closes without a farewell is a lost host.
"""

import contextlib
import socket
import threading
import time
from collections.abc import Callable

# SGLang itself uses some ports after that of --dist-init-addr.
PORT_DELTA = 47
FAREWELL = b"."
RETRY_SECONDS = 0.5
# A host that vanishes without closing its connections is noticed after about nine seconds.
KEEPALIVE = (("TCP_KEEPIDLE", 3), ("TCP_KEEPINTVL", 2), ("TCP_KEEPCNT", 3))


class HostLinks:
    """This launcher's links to the others; `lost(reason)` runs once, on a thread of its own."""

    def __init__(
        self,
        node_rank: int,
        num_hosts: int,
        dist_init_addr: str,
        lost: Callable[[str], None],
        start_seconds: float,
    ) -> None:
        host, _, port = dist_init_addr.rpartition(":")
        self.address = (host.strip("[]"), int(port) + PORT_DELTA)
        self.num_hosts = num_hosts
        self.lost = lost
        self.deadline = time.monotonic() + start_seconds
        self.links: list[socket.socket] = []
        self.ended = threading.Event()
        target = self._listen if node_rank == 0 else self._connect
        threading.Thread(target=self._run, args=(target,), name="tknp-hosts", daemon=True).start()

    def say_farewell(self) -> None:
        """This host ends in order: the others must not take it for lost."""
        self.ended.set()
        for link in self.links:
            with contextlib.suppress(OSError):
                link.sendall(FAREWELL)

    def _run(self, target: Callable[[], None]) -> None:
        try:
            target()
        except OSError as error:
            self._lose(f"the link between the hosts of the pool failed at {self.address}: {error}")

    def _listen(self) -> None:
        with socket.create_server(self.address, backlog=self.num_hosts) as server:
            server.settimeout(max(self.deadline - time.monotonic(), 1))
            for _ in range(self.num_hosts - 1):
                link, (peer, *_) = server.accept()
                self._watch(link, f"host {peer}")

    def _connect(self) -> None:
        while True:
            try:
                link = socket.create_connection(self.address, timeout=5)
                break
            except OSError:
                if time.monotonic() > self.deadline:
                    raise
                time.sleep(RETRY_SECONDS)
        self._watch(link, f"the first host {self.address[0]}")

    def _watch(self, link: socket.socket, name: str) -> None:
        link.settimeout(None)
        link.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in KEEPALIVE:
            if hasattr(socket, option):
                link.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)
        self.links.append(link)
        threading.Thread(target=self._wait, args=(link, name), daemon=True).start()

    def _wait(self, link: socket.socket, name: str) -> None:
        try:
            farewell = link.recv(1) == FAREWELL
        except OSError:
            farewell = False
        if not farewell:
            self._lose(f"{name} of the pool is gone")

    def _lose(self, reason: str) -> None:
        if not self.ended.is_set():
            self.ended.set()
            self.lost(reason)
