"""A two-layer step of two nodes in one process on one GPU, captured, replayed, and run eagerly.

The nodes' exchanges run on their own side streams, over copies in place of NCCL: a receive copies
from the matching send, which lies in the same process. Layer 0's root is node 0, layer 1's node 1.

Not run on a GPU yet. Run: pytest -m gpu
"""

from collections import deque
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from sglang_tknp.exchange import Exchange
from sglang_tknp.layout import OwnershipLayout
from sglang_tknp.transport import Transfer
from sglang_tknp.transport_stream import CudaStreams, StreamTransport

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]

LAYOUT = OwnershipLayout(rows=(4, 4))
HIDDEN, WIDTH, OUT = 64, 96, 32
Mail = dict[tuple[int, int, str], deque[tuple[torch.Tensor, Any]]]


class CopyTransport(StreamTransport):
    """StreamTransport whose channel is this process's memory.

    A receive is launched when it is waited for, because only then its send has been posted: one
    process runs both nodes in turn.
    """

    def __init__(self, node: int, mail: Mail) -> None:
        super().__init__(torch.device("cuda"), CudaStreams(), self)
        self.node, self.mail = node, mail

    def post(self, sends: Sequence[Transfer], receives: Sequence[Transfer]) -> None:
        super().post(sends, [])
        for t in sends:
            box = self.mail.setdefault((self.node, t.node, t.kind), deque())
            box.append((t.tensor, t.work))
        for t in receives:
            t.work = "posted"

    def wait(self, transfer: Transfer) -> None:
        if transfer.work == "posted":
            super().post([], [transfer])
        super().wait(transfer)

    def run(self, transfers: Sequence[Transfer]) -> None:
        for t in transfers:
            if t.verb == "receive":
                source, sent = self.mail[(t.node, self.node, t.kind)].popleft()
                self.streams.side.wait_event(sent)
                t.tensor.copy_(source)

    def all_gather(self, whole: torch.Tensor, part: torch.Tensor) -> None:
        raise AssertionError("one rank per node")


class Pool:
    """Two nodes of a model of two layers, one each, with fixed tensors."""

    def __init__(self) -> None:
        mail: Mail = {}
        self.exchanges = [
            Exchange(CopyTransport(node, mail), node, [0, 1], timeout=60) for node in (0, 1)
        ]
        torch.manual_seed(0)

        def weights(rows: int, columns: int) -> torch.Tensor:
            return torch.randn(rows, columns, device="cuda") / rows**0.5

        self.qkv_weights = [weights(HIDDEN, WIDTH) for _ in (0, 1)]
        self.out_weights = [weights(OUT, HIDDEN) for _ in (0, 1)]
        self.owned = [torch.randn(4, OUT, device="cuda") for _ in (0, 1)]  # in place of KV
        rows = LAYOUT.num_rows
        self.hidden = torch.zeros(rows, HIDDEN, device="cuda")
        self.handed = torch.zeros(rows, HIDDEN, device="cuda")
        self.positions = torch.arange(rows, device="cuda")
        self.their_positions = torch.zeros_like(self.positions)
        self.outs = [torch.zeros(rows, OUT, device="cuda") for _ in (0, 1)]
        self.rows = [torch.zeros(4, WIDTH, device="cuda") for _ in (0, 1)]

    def attend(self, node: int, qkv: torch.Tensor) -> torch.Tensor:
        return torch.tanh(qkv[:, :OUT] + self.owned[node])

    def layer(self, root: int, hidden: torch.Tensor) -> torch.Tensor:
        owner = 1 - root
        at_root, at_owner = self.exchanges[root], self.exchanges[owner]
        qkv = hidden @ self.qkv_weights[root]
        at_root.scatter_begin(qkv, self.outs[root], LAYOUT)
        at_owner.receive_rows_begin(self.rows[owner], root)
        rows = at_owner.receive_rows_end()
        at_owner.return_outputs(self.attend(owner, rows), root)
        mine = LAYOUT.slice_of(root)
        self.outs[root][mine] = self.attend(root, qkv[mine])
        at_root.gather_end()
        return hidden + self.outs[root] @ self.out_weights[root]

    def step(self) -> torch.Tensor:
        first = self.layer(0, self.hidden)
        self.exchanges[0].send_handoff((first,), self.positions, 1)
        self.exchanges[1].receive_handoff((self.handed,), self.their_positions, 0)
        last = self.layer(1, self.handed)
        for exchange in self.exchanges:
            exchange.finish_step()
        return last

    def reference(self) -> torch.Tensor:
        """The same without exchanges or streams."""
        hidden = self.hidden
        for root in (0, 1):
            qkv = hidden @ self.qkv_weights[root]
            outs = torch.cat([self.attend(n, qkv[LAYOUT.slice_of(n)]) for n in (0, 1)])
            hidden = hidden + outs @ self.out_weights[root]
        return hidden


def test_replayed_steps_equal_eager_ones() -> None:
    pool = Pool()
    pool.hidden.normal_()
    torch.testing.assert_close(pool.step(), pool.reference())
    torch.cuda.synchronize()

    graph, side = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    with torch.cuda.graph(graph, stream=side):
        captured = pool.step()
    for _ in range(20):
        pool.hidden.normal_()
        for owned in pool.owned:
            owned.normal_()
        pool.handed.fill_(float("nan"))
        graph.replay()
        torch.cuda.synchronize()
        torch.testing.assert_close(captured, pool.reference())
        assert torch.equal(pool.their_positions, pool.positions)
