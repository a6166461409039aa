"""Who wakes whom: a request wakes the peers even beside an old call; a call alone wakes nobody."""

from typing import Any

import pytest
import zmq

from sglang_tknp.scheduler_ext.idle import PeerSleeper

pytestmark = pytest.mark.upstream


def pair(context: Any) -> tuple[Any, Any]:
    """A connected (PULL, PUSH)."""
    pull, push = context.socket(zmq.PULL), context.socket(zmq.PUSH)
    push.connect(f"tcp://127.0.0.1:{pull.bind_to_random_port('tcp://127.0.0.1')}")
    return pull, push


@pytest.mark.parametrize(
    ("request_waits", "called", "wakes"),
    [(True, False, True), (False, True, False), (True, True, True), (False, False, False)],
)
def test_a_request_wakes_the_peers(request_waits: bool, called: bool, wakes: bool) -> None:
    context = zmq.Context()
    requests, send_request = pair(context)
    wake, call = pair(context)
    peer, to_peer = pair(context)
    try:
        for wanted, sender, receiver in (
            (request_waits, send_request, requests),
            (called, call, wake),
        ):
            if wanted:
                sender.send(b"")
                assert receiver.poll(2000)
        PeerSleeper([requests], wake, [to_peer])._rest(1)
        assert bool(peer.poll(500)) == wakes
        assert not wake.poll(0), "a call must be taken, or the next sleep ends at once"
    finally:
        context.destroy(linger=0)
