"""The exchange on NCCL: one layer's values between two GPUs. Skipped where two are not there.

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

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.device_count() < 2, reason="needs two GPUs"
    ),
]

LAYOUT = OwnershipLayout(rows=(3, 5))
LIMIT = timedelta(seconds=60)


def one_layer(node: int, store: str) -> None:
    torch.cuda.set_device(node)
    dist.init_process_group(
        "nccl", init_method=f"file://{store}", rank=node, world_size=2, timeout=LIMIT
    )
    cpu_group = dist.new_group([0, 1], backend="gloo", timeout=LIMIT)
    exchange = Exchange(dist.group.WORLD, node, 2, timeout=60, cpu_group=cpu_group)
    exchange.warm_up()
    qkv = torch.arange(8 * 12, dtype=torch.bfloat16, device="cuda").view(8, 12)
    for root in (0, 1):
        if node == root:
            out = torch.full((8, 6), float("nan"), dtype=torch.bfloat16, device="cuda")
            exchange.scatter_begin(qkv, out, LAYOUT)
            mine = LAYOUT.slice_of(node)
            out[mine] = qkv[mine, :6] * 2
            exchange.gather_end()
            assert torch.equal(out, qkv[:, :6] * 2)
        else:
            rows = torch.empty((LAYOUT.rows[node], 12), dtype=torch.bfloat16, device="cuda")
            exchange.receive_rows_begin(rows, root)
            exchange.return_outputs(exchange.receive_rows_end()[:, :6].contiguous() * 2, root)
    exchange.finish_step()
    dist.destroy_process_group()


def test_one_layer_between_two_gpus() -> None:
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(one_layer, args=(os.path.join(folder, "store"),), nprocs=2)
