"""What one decode step moves between nodes, in bytes, from its ownership layout. Pure integers.

The same rules as exchange.py, without sending anything: for planning, and for a dry run.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from sglang_tknp.layout import OwnershipLayout, exchange_bytes

_ID_BYTES = _POSITION_BYTES = 8  # of a row, int64


@dataclass(frozen=True, slots=True, kw_only=True)
class RowSizes:
    """Elements of one row, and bytes of one element."""

    q_size: int  # Hq*dh/T, on one TP rank
    kv_size: int  # Hkv*dh/T, on one TP rank: K alone
    hidden_size: int  # D, replicated in the node
    head_width: int  # V/T, padded, on one TP rank
    element_bytes: int
    tp_size: int  # T


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTraffic:
    """Bytes of one decode step: of one peer group, TP rank 0's, where nothing else is said."""

    rows: tuple[int, ...]  # of every owner, in node order
    qkv: tuple[int, ...]  # one message of one layer, to each owner from a root elsewhere
    output: tuple[int, ...]  # the answer to it
    layer: tuple[int, ...]  # scatter and gather of one layer, by its root's node (equation 3)
    exchange: int  # of all layers
    handoff: int  # hidden and residual at one block's end, a rank's 1/T
    handoffs: int  # of all blocks' ends
    logits: tuple[int, ...]  # to each owner; 0 for the head's node
    positions: int  # with each handoff
    inputs: int  # ids and positions to the first root, positions with every handoff
    pool: int  # everything, of all T peer groups

    @property
    def peer_group(self) -> int:
        return self.exchange + self.handoffs + sum(self.logits) + self.inputs


def even_layout(batch: int, num_nodes: int) -> OwnershipLayout:
    """`batch` rows over the owners as evenly as they go: the first ones have one more."""
    rows, more = divmod(batch, num_nodes)
    return OwnershipLayout(rows=tuple(rows + (node < more) for node in range(num_nodes)))


def step_traffic(layout: OwnershipLayout, blocks: Sequence[int], sizes: RowSizes) -> StepTraffic:
    """The traffic of a decode step over layer blocks (paper, sections 4.3 and 4.4).

    Args:
        blocks: layers of each node, in node order.
    """
    num_nodes, width = layout.num_owners, sizes.element_bytes
    assert len(blocks) == num_nodes, (blocks, layout)
    layer = tuple(
        exchange_bytes(
            layout, root, q_size=sizes.q_size, kv_size=sizes.kv_size, element_bytes=width
        )
        for root in range(num_nodes)
    )
    exchange = sum(n * size for n, size in zip(blocks, layer, strict=True))
    hidden = layout.num_rows * sizes.hidden_size
    handoff = 2 * -(-hidden // sizes.tp_size) * width
    head_rows = (*layout.rows[:-1], 0)  # the last node has the head
    logits = tuple(n * sizes.head_width * width for n in head_rows)
    positions = layout.num_rows * _POSITION_BYTES
    inputs = layout.remote_rows(0) * (_ID_BYTES + _POSITION_BYTES) + (num_nodes - 1) * positions
    every_group = exchange + sum(logits) + inputs
    return StepTraffic(
        rows=layout.rows,
        qkv=tuple(n * (sizes.q_size + 2 * sizes.kv_size) * width for n in layout.rows),
        output=tuple(n * sizes.q_size * width for n in layout.rows),
        layer=layer,
        exchange=exchange,
        handoff=handoff,
        handoffs=handoff * (num_nodes - 1),
        logits=logits,
        positions=positions,
        inputs=inputs,
        pool=every_group * sizes.tp_size + 2 * hidden * width * (num_nodes - 1),
    )
