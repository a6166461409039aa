"""Attention under TKNP: the root's side and the owner's side of one layer.

Shapes: R = rows of the step, n = this node's rows, C = Q + K + V, all of one TP rank:
Q = Hq*dh/T, K = Hkv*dh/T, V = Hkv*dv/T, O = Hq*dv/T (paper, equations 1 and 2).
"""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.layers.radix_attention import RadixAttention

if TYPE_CHECKING:
    from sglang_tknp.model_ext.step import Step


def qkv_sizes(layer: RadixAttention) -> tuple[int, int, int]:
    """(Q, K, V) of one TP rank."""
    return (
        layer.tp_q_head_num * layer.qk_head_dim,
        layer.tp_k_head_num * layer.qk_head_dim,
        layer.tp_v_head_num * layer.v_head_dim,
    )


def output_size(layer: RadixAttention) -> int:
    """O of one TP rank."""
    return int(layer.tp_q_head_num * layer.v_head_dim)


def attend(
    layer: RadixAttention, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, batch: Any
) -> torch.Tensor:
    """SGLang's own attention over this node's KV, for this node's rows: [n, Q] -> [n, O]."""
    out = RadixAttention.forward(layer, q, k, v, batch)
    return out.reshape(q.shape[0], output_size(layer))


def pack(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """[R, Q], [R, K], [R, V] -> [R, C]: one message per owner is one slice of rows.

    Three views side by side in one buffer, as a fused QKV projection leaves them, are returned
    as that buffer's rows without a copy.
    """
    q, k, v = (x.reshape(x.shape[0], -1) for x in (q, k, v))
    width = q.shape[1] + k.shape[1] + v.shape[1]
    beside = (
        q.stride() == k.stride() == v.stride() == (width, 1)
        and q.data_ptr() + q.shape[1] * q.element_size() == k.data_ptr()
        and k.data_ptr() + k.shape[1] * k.element_size() == v.data_ptr()
    )
    if beside:
        return q.as_strided((q.shape[0], width), (width, 1))
    return torch.cat((q, k, v), dim=-1)


class RootAttention:
    """Stands in for the forward of a RadixAttention of this node's block.

    The model calls it with the full batch; the batch that it attends with is the owner's.
    """

    def __init__(self, layer: RadixAttention, current_step: Callable[[], "Step"]) -> None:
        self.layer = layer
        self.current_step = current_step

    def __call__(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        forward_batch: Any,
        save_kv_cache: bool = True,
        **kwargs: Any,
    ) -> torch.Tensor:
        if not save_kv_cache or kwargs or k is None:
            raise NotImplementedError(
                f"layer {self.layer.layer_id} writes its KV itself or passes {sorted(kwargs)} to "
                "its attention, which TKNP does not carry to the owners"
            )
        step = self.current_step()
        layout, exchange, node = step.layout, step.exchange, step.node
        if 0 < layout.num_rows == layout.rows[node]:  # nothing to exchange, and nothing to pack
            return attend(self.layer, q, k, v, step.batch)
        qkv = pack(q, k, v)
        out = step.buffers.of_step("outputs", output_size(self.layer), qkv.dtype)
        exchange.scatter_begin(qkv, out, layout)
        if layout.rows[node]:
            mine = layout.slice_of(node)
            out[mine] = attend(self.layer, q[mine], k[mine], v[mine], step.batch)
        exchange.gather_end()
        return out


def attend_for_root(step: "Step", root: int, layers: Sequence[RadixAttention]) -> None:
    """The owner's side of a block: this node's rows of every layer, for another root.

    The receive of the next layer is posted as soon as this layer's outputs are on their way,
    long before the root has its rows.
    """
    if step.layout.rows[step.node] == 0:
        return
    exchange = step.exchange

    def post(layer: RadixAttention) -> None:
        width = sum(qkv_sizes(layer))
        exchange.receive_rows_begin(step.buffers.of_node("rows", width, step.stage.dtype), root)

    post(layers[0])
    for layer, following in zip(layers, [*layers[1:], None], strict=True):
        rows = exchange.receive_rows_end()
        q, k, v = rows.split(qkv_sizes(layer), dim=-1)
        exchange.return_outputs(attend(layer, q, k, v, step.batch), root)
        if following is not None:
            post(following)
