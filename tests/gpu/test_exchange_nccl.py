"""The exchange on NCCL: one layer's values between two GPUs, eager and replayed from a graph.

Not run on a GPU yet. Run: pytest -m gpu
"""

import os
import tempfile
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from sglang_tknp.exchange import Exchange
from sglang_tknp.layout import OwnershipLayout
from sglang_tknp.transport_stream import CudaStreams, NcclChannel, StreamTransport

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.device_count() < 2, reason="needs two GPUs"
    ),
]

LAYOUT = OwnershipLayout(rows=(3, 5))
LIMIT = timedelta(seconds=60)


class Node:
    """One layer with either node as its root, on fixed tensors."""

    def __init__(self, node: int, exchange: Exchange) -> None:
        self.node, self.exchange = node, exchange
        self.qkv = torch.arange(8 * 12, dtype=torch.bfloat16, device="cuda").view(8, 12)
        self.out = torch.empty((8, 6), dtype=torch.bfloat16, device="cuda")
        self.rows = torch.empty((LAYOUT.rows[node], 12), dtype=torch.bfloat16, device="cuda")

    def step(self) -> None:
        for root in (0, 1):
            if self.node == root:
                self.exchange.scatter_begin(self.qkv, self.out, LAYOUT)
                mine = LAYOUT.slice_of(self.node)
                self.out[mine] = self.qkv[mine, :6] * 2
                self.exchange.gather_end()
            else:
                self.exchange.receive_rows_begin(self.rows, root)
                rows = self.exchange.receive_rows_end()
                self.exchange.return_outputs(rows[:, :6].contiguous() * 2, root)
        self.exchange.finish_step()


def two_gpus(rank: int, store: str) -> None:
    from sglang.srt.distributed.device_communicators.pynccl import PyNcclCommunicator

    torch.cuda.set_device(rank)
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=2, timeout=LIMIT
    )
    communicator = PyNcclCommunicator(dist.group.WORLD, torch.device("cuda", rank))
    channel = NcclChannel(communicator, None)
    transport = StreamTransport(torch.device("cuda", rank), CudaStreams(), channel)
    exchange = Exchange(transport, rank, [0, 1], timeout=60)
    exchange.warm_up()
    node = Node(rank, exchange)
    node.step()
    torch.cuda.synchronize()
    assert torch.equal(node.out, node.qkv[:, :6] * 2)

    graph = torch.cuda.CUDAGraph()
    dist.barrier()
    with torch.cuda.graph(graph):
        node.step()
    for factor in (2, 3):
        node.qkv.mul_(factor)
        node.out.fill_(float("nan"))
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(node.out, node.qkv[:, :6] * 2)
    dist.barrier()
    dist.destroy_process_group()


def test_one_layer_between_two_gpus() -> None:
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(two_gpus, args=(os.path.join(folder, "store"),), nprocs=2)
