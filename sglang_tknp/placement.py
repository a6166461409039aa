"""Which node holds which layers: contiguous blocks that even out the nodes' weight bytes. Pure.

The embedding lives on the first node, the final norm and the head on the last (paper, section
4.2: block boundaries balance weight bytes, endpoint parameters and quantisation included).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from sglang_tknp.tables import table


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelBytes:
    """Stored bytes of one copy of a model's weights."""

    embedding: int
    layers: tuple[int, ...]
    final_norm: int
    head: int  # 0 when tied
    tied: bool = False

    @property
    def first_node_extra(self) -> int:
        return self.embedding

    @property
    def last_node_extra(self) -> int:
        """A tied head is a copy of the embedding on the last node."""
        return self.final_norm + (self.embedding if self.tied else self.head)

    @property
    def one_copy(self) -> int:
        return self.embedding + sum(self.layers) + self.final_norm + self.head


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """Layers per node, in node order, and what the node's ranks hold together."""

    blocks: tuple[int, ...]
    node_bytes: tuple[int, ...]

    @property
    def num_nodes(self) -> int:
        return len(self.blocks)

    @property
    def num_layers(self) -> int:
        return sum(self.blocks)

    @property
    def bounds(self) -> tuple[tuple[int, int], ...]:
        """(first layer, one past the last layer) of every node."""
        return tuple(pairwise(accumulate(self.blocks, initial=0)))

    def block(self, node: int) -> range:
        return range(*self.bounds[node])


def place(model: ModelBytes, blocks: Sequence[int]) -> Placement:
    """The placement of given layer blocks; they hold every layer and no node is empty."""
    assert min(blocks) >= 1 and sum(blocks) == len(model.layers), (blocks, len(model.layers))
    starts = list(accumulate(blocks, initial=0))
    node_bytes = [sum(model.layers[a:b]) for a, b in pairwise(starts)]
    node_bytes[0] += model.first_node_extra
    node_bytes[-1] += model.last_node_extra
    return Placement(blocks=tuple(blocks), node_bytes=tuple(node_bytes))


def balance(model: ModelBytes, num_nodes: int) -> Placement:
    """Contiguous blocks, at least one layer each, that minimise the largest node's bytes.

    Among those the smallest sum of squared node bytes (the others are even too), then the one
    with more layers on earlier nodes. Exact, by dynamic programming over (nodes, layers).
    Raises ValueError for more nodes than layers.
    """
    num_layers = len(model.layers)
    _check_enough_layers(num_layers, num_nodes)
    total = list(accumulate(model.layers, initial=0))

    def cost(node: int, start: int, end: int) -> int:
        extra = model.first_node_extra if node == 0 else 0
        extra += model.last_node_extra if node == num_nodes - 1 else 0
        return total[end] - total[start] + extra

    # Two passes, because the even split of a prefix may end in a larger largest node.
    limit = _smallest_largest(cost, num_nodes, num_layers)
    best: dict[int, tuple[int, tuple[int, ...]]] = {0: (0, ())}
    for node in range(num_nodes):
        left = num_nodes - node - 1
        following: dict[int, tuple[int, tuple[int, ...]]] = {}
        for start, (squares, blocks) in best.items():
            for end in range(start + 1, num_layers - left + 1):
                size = cost(node, start, end)
                if size > limit:
                    break
                candidate = (squares + size * size, (*blocks, start - end))
                if end not in following or candidate < following[end]:
                    following[end] = candidate
        best = following
    return place(model, [-size for size in best[num_layers][1]])


def _check_enough_layers(num_layers: int, num_nodes: int) -> None:
    if num_nodes > num_layers:
        raise ValueError(
            f"--attn-dp-size={num_nodes} is more than the model's {num_layers} layers, and every "
            f"node holds at least one; use at most {num_layers}"
        )


def _smallest_largest(cost: Callable[[int, int, int], int], num_nodes: int, num_layers: int) -> int:
    """The smallest possible bytes of the largest node."""
    best = {0: 0}
    for node in range(num_nodes):
        left = num_nodes - node - 1
        following: dict[int, int] = {}
        for start, largest in best.items():
            for end in range(start + 1, num_layers - left + 1):
                size = max(largest, cost(node, start, end))
                following[end] = min(size, following.get(end, size))
        best = following
    return best[num_layers]


def parse_layer_blocks(text: str, num_layers: int, num_nodes: int) -> tuple[int, ...]:
    """Read --tknp-layer-blocks; ValueError unless it spreads all layers over all nodes."""
    _check_enough_layers(num_layers, num_nodes)  # else no example below could work
    base, extra = divmod(num_layers, num_nodes)
    example = ",".join(str(base + (node < extra)) for node in range(num_nodes))
    advice = f'for {num_layers} layers on {num_nodes} nodes use for example "{example}"'
    try:
        blocks = tuple(int(part) for part in text.split(","))
    except ValueError:
        raise ValueError(
            f'--tknp-layer-blocks="{text}" must be whole numbers between commas; {advice}'
        ) from None
    if len(blocks) != num_nodes:
        raise ValueError(
            f'--tknp-layer-blocks="{text}" names {len(blocks)} blocks for {num_nodes} nodes '
            f"(--attn-dp-size); {advice}"
        )
    if min(blocks) < 1:
        raise ValueError(
            f'--tknp-layer-blocks="{text}" leaves a node without layers, and every node holds at '
            f"least one; {advice}"
        )
    if sum(blocks) != num_layers:
        raise ValueError(
            f'--tknp-layer-blocks="{text}" sums to {sum(blocks)}, and the model has {num_layers} '
            f"layers; {advice}"
        )
    return blocks


def format_table(
    placement: Placement, model: ModelBytes, kv_tokens: Sequence[int] | None = None
) -> str:
    """The start-up table: node, layers, bytes, share of one copy, KV tokens; then what is tied."""
    header = ["node", "layers", "weights", "share"] + (["KV tokens"] if kv_tokens else [])
    rows = [header]
    for node, ((start, end), size) in enumerate(
        zip(placement.bounds, placement.node_bytes, strict=True)
    ):
        row = [str(node), f"{start}-{end - 1}", human(size), f"{size / model.one_copy:.1%}"]
        rows.append(row + ([f"{kv_tokens[node]}"] if kv_tokens else []))
    lines = table(rows)
    if model.tied:
        lines.append(tied_note(model.embedding, model.one_copy))
    return "\n".join(lines)


def tied_note(copied: int, one_copy: int) -> str:
    """Why the shares of a model with tied embeddings sum to more than one copy."""
    return (
        f"the last node's head is a copy of the tied embedding, {human(copied)}: the shares of "
        f"one copy sum to {1 + copied / one_copy:.1%}"
    )


def human(size: float) -> str:
    for unit in ("B", "KiB", "MiB"):
        if size < 1024:
            return f"{size:.1f} {unit}" if unit != "B" else f"{size:.0f} B"
        size /= 1024
    return f"{size:.2f} GiB"
