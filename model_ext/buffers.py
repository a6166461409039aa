"""The tensors that a step writes: fresh ones for an eager step, fixed ones for a captured one."""

from collections.abc import Callable
from typing import Any

import torch

from sglang_tknp.layout import OwnershipLayout

Take = Callable[[str, int, int, torch.dtype], torch.Tensor]


class StepBuffers:
    """One set for one ownership layout; a tensor of the set is made when it is first wanted.

    The layers of a step use the same tensors one after the other: all messages of a layer are
    over before the next layer's begin.
    """

    def __init__(self, layout: OwnershipLayout, node: int, take: Take) -> None:
        self.layout = layout
        self.num_own = layout.rows[node]
        self._take = take
        self._made: dict[tuple[Any, ...], torch.Tensor] = {}

    def of_step(self, name: str, width: int, dtype: torch.dtype) -> torch.Tensor:
        """[R, width]: a row for every row of the step."""
        return self._make(name, self.layout.num_rows, width, dtype)

    def of_node(self, name: str, width: int, dtype: torch.dtype) -> torch.Tensor:
        """[n, width]: a row for every row of this node."""
        return self._make(name, self.num_own, width, dtype)

    def _make(self, *key: Any) -> torch.Tensor:
        tensor = self._made.get(key)
        if tensor is None:
            tensor = self._made[key] = self._take(*key)
        return tensor


class FixedStorage:
    """Where the buffer sets of all captured layouts lie: steps do not overlap, so they share it.

    The memory is that of the largest layout, if that one comes first; a later, larger one gets
    storage of its own, since captured graphs keep the addresses of the former.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.num_bytes = 0
        self._largest: dict[tuple[str, int, torch.dtype], torch.Tensor] = {}

    def take(self, name: str, num_rows: int, width: int, dtype: torch.dtype) -> torch.Tensor:
        key = (name, width, dtype)
        storage = self._largest.get(key)
        if storage is None or storage.shape[0] < num_rows:
            storage = torch.zeros((num_rows, width), dtype=dtype, device=self.device)
            self._largest[key] = storage
            self.num_bytes += storage.nbytes
        return storage[:num_rows]
