"""What a pool of N nodes of T ranks holds and moves: weights, KV room and traffic. Pure integers.

From facts about the built blocks (model_ext/meta_build.py finds them with SGLang's own modules)
to the numbers that a user decides by.
"""

from dataclasses import dataclass

from sglang_tknp.placement import ModelBytes, Placement
from sglang_tknp.traffic import RowSizes, StepTraffic, even_layout, step_traffic

GIB = 1 << 30


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeBuild:
    """Bytes of one node's block: of one TP rank (all T are alike), and of the block unsplit."""

    rank_weights: int  # parameters
    rank_buffers: int  # rotary tables and the like
    one_copy: int  # the same parameters, built with T = 1
    replicated: int  # what T-1 ranks hold again: tensors that are not split (norms, scales)
    uneven: int  # what a split adds: repeated KV heads


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolBuild:
    """What was built for a pool of N nodes of T ranks."""

    model_class: str
    nodes: tuple[NodeBuild, ...]
    tp_size: int  # T
    hidden_size: int  # D
    element_bytes: int  # of an activation
    q_size: int  # Hq*dh/T: of one row on one TP rank, the same in all layers
    kv_size: int  # Hkv*dh/T, at least one head: K alone
    head_width: int  # V/T, padded
    tied_copy: int = 0  # of the last node's one copy: its head, where that is the embedding again


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """What one TP rank may fill with weights and KV, as SGLang counts it."""

    device_gb: float  # GiB
    mem_fraction_static: float

    @property
    def rank_bytes(self) -> int:
        return int(self.device_gb * self.mem_fraction_static * GIB)


@dataclass(frozen=True, slots=True, kw_only=True)
class NodePlan:
    """One node of the plan; bytes of its T ranks together, where nothing else is said."""

    node: int
    layers: tuple[int, int]  # first, one past the last
    endpoints: tuple[str, ...]  # of the model: what this node holds beside layers
    placed_bytes: int  # by the placement: the checkpoint's tensors, or their estimate
    one_copy_bytes: int  # SGLang's modules of the block, unsplit
    weight_bytes: int  # SGLang's modules on T ranks
    rank_weight_bytes: int
    replicated_bytes: int
    uneven_bytes: int
    buffer_bytes: int
    kv_tokens: int  # 0: the weights fill the memory

    @property
    def beyond_placement(self) -> int:
        """What SGLang makes beyond the placed tensors: vocabulary padding, KV scales."""
        return self.one_copy_bytes - self.placed_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolPlan:
    """A pool of N nodes: placement, KV room and one decode step's traffic."""

    num_nodes: int
    nodes: tuple[NodePlan, ...]
    one_copy_bytes: int  # of the model, as placed
    tied_copy_bytes: int  # what the nodes hold beyond one copy: a tied head's embedding
    kv_token_bytes: int  # one token of one request on its owner: all layers, T ranks
    rank_kv_token_bytes: int
    traffic: StepTraffic

    @property
    def held_bytes(self) -> int:
        """One copy of the model as SGLang's modules hold it, in the dtype of the run."""
        return sum(node.one_copy_bytes for node in self.nodes) - self.tied_copy_bytes

    @property
    def fits(self) -> bool:
        return all(node.kv_tokens > 0 for node in self.nodes)

    @property
    def kv_tokens(self) -> int:
        return sum(node.kv_tokens for node in self.nodes)


def plan_pool(
    placement: Placement,
    model: ModelBytes,
    build: PoolBuild,
    memory: Memory,
    *,
    batch: int,
    kv_element_bytes: int,
) -> PoolPlan:
    """The plan of a pool, its `batch` rows spread evenly over the owners.

    Every owner holds the KV of all layers (paper, section 4.1), in what the weights of its own
    block leave of the memory (section 4.2).
    """
    token_bytes = 2 * build.kv_size * placement.num_layers * kv_element_bytes
    sizes = RowSizes(
        q_size=build.q_size,
        kv_size=build.kv_size,
        hidden_size=build.hidden_size,
        head_width=build.head_width,
        element_bytes=build.element_bytes,
        tp_size=build.tp_size,
    )
    return PoolPlan(
        num_nodes=placement.num_nodes,
        nodes=tuple(
            _plan_node(placement, node, build, memory, token_bytes)
            for node in range(placement.num_nodes)
        ),
        one_copy_bytes=model.one_copy,
        tied_copy_bytes=build.tied_copy,
        kv_token_bytes=token_bytes * build.tp_size,
        rank_kv_token_bytes=token_bytes,
        traffic=step_traffic(even_layout(batch, placement.num_nodes), placement.blocks, sizes),
    )


def _plan_node(
    placement: Placement, node: int, build: PoolBuild, memory: Memory, token_bytes: int
) -> NodePlan:
    built, tp_size = build.nodes[node], build.tp_size
    room = memory.rank_bytes - built.rank_weights - built.rank_buffers
    return NodePlan(
        node=node,
        layers=placement.bounds[node],
        endpoints=_endpoints(node, placement.num_nodes),
        placed_bytes=placement.node_bytes[node],
        one_copy_bytes=built.one_copy,
        weight_bytes=built.rank_weights * tp_size,
        rank_weight_bytes=built.rank_weights,
        replicated_bytes=built.replicated,
        uneven_bytes=built.uneven,
        buffer_bytes=built.rank_buffers * tp_size,
        kv_tokens=max(room // token_bytes, 0),
    )


def _endpoints(node: int, num_nodes: int) -> tuple[str, ...]:
    first = ("embedding",) if node == 0 else ()
    last = ("final norm", "head") if node == num_nodes - 1 else ()
    return first + last
