"""The link between launchers: a lost host is told on every other one, a farewell is not a loss."""

import importlib.util
import queue
import socket
import time
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[2] / "scheduler_ext" / "hosts.py"


@pytest.fixture(scope="module")
def hosts():  # type: ignore[no-untyped-def]
    """The module alone: its package's neighbours import SGLang, it does not."""
    spec = importlib.util.spec_from_file_location("tknp_hosts", SOURCE)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def address(hosts) -> str:  # type: ignore[no-untyped-def]
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{probe.getsockname()[1] - hosts.PORT_DELTA}"


def pool(hosts, count: int):  # type: ignore[no-untyped-def]
    """`count` launchers in this process, all linked."""
    where, losses = address(hosts), [queue.Queue() for _ in range(count)]
    links = [hosts.HostLinks(r, count, where, losses[r].put, 20) for r in range(count)]
    deadline = time.monotonic() + 10
    while len(links[0].links) < count - 1 or not all(link.links for link in links[1:]):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    return links, losses


def test_a_lost_host_is_told_on_the_first_one(hosts) -> None:  # type: ignore[no-untyped-def]
    links, losses = pool(hosts, 3)
    links[2].ended.set()  # a dead launcher says nothing
    links[2].links[0].shutdown(socket.SHUT_RDWR)
    assert losses[0].get(timeout=5) == "host 127.0.0.1 of the pool is gone"
    for link in links[0].links:  # as the first host's end does
        link.shutdown(socket.SHUT_RDWR)
    assert losses[1].get(timeout=5) == "the first host 127.0.0.1 of the pool is gone"


def test_a_farewell_is_no_loss(hosts) -> None:  # type: ignore[no-untyped-def]
    links, losses = pool(hosts, 2)
    links[1].say_farewell()
    links[1].links[0].close()
    time.sleep(0.3)
    assert losses[0].empty()


def test_a_taken_port_is_told(hosts) -> None:  # type: ignore[no-untyped-def]
    where = address(hosts)
    port = int(where.rpartition(":")[2]) + hosts.PORT_DELTA
    losses: queue.Queue[str] = queue.Queue()
    with socket.create_server(("127.0.0.1", port)):
        hosts.HostLinks(0, 2, where, losses.put, 20)
        assert "failed at ('127.0.0.1'" in losses.get(timeout=5)
