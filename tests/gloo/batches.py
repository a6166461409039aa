"""Made batches: every rank knows the whole one, so it computes what must arrive where."""

import torch

from sglang_tknp.layout import OwnershipLayout

HQ, HKV, DH = 4, 2, 8
NAN = float("nan")


def batch_qkv(num_rows: int, layer: int, tp_rank: int, tp_size: int) -> torch.Tensor:
    width = (HQ + 2 * HKV) * DH // tp_size
    values = torch.arange(num_rows * width).view(num_rows, width)
    return (values * 7 + layer * 31 + tp_rank * 13) % 64  # exact in bfloat16 too


def attend(qkv: torch.Tensor, owner: int, tp_size: int) -> torch.Tensor:
    return qkv[:, : HQ * DH // tp_size] * 2 + owner


def batch_outputs(qkv: torch.Tensor, layout: OwnershipLayout, tp_size: int) -> torch.Tensor:
    owners = range(len(layout.rows))
    return torch.cat([attend(qkv[layout.slice_of(n)], n, tp_size) for n in owners])


def padded(num_rows: int, width: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """A buffer inside a larger NaN-filled one: whatever is written must be exactly the buffer."""
    canary = torch.full((num_rows + 2, width), NAN, dtype=dtype)
    return canary, canary[1 : num_rows + 1]


def assert_only_inside(canary: torch.Tensor) -> None:
    assert canary[0].isnan().all() and canary[-1].isnan().all(), "written outside the buffer"
    assert not canary[1:-1].isnan().any(), "part of the buffer was not written"
