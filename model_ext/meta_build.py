"""Build every node's block of a pool on the meta device: the bytes that ranks would hold.

SGLang's own model classes, under the scope in which a rank of the pool builds them, without
ranks, groups or memory. For a process that does not serve: SGLang caches rotary embeddings by
their parameters, and these live on the meta device.
"""

from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

import torch

from sglang_tknp import compat
from sglang_tknp.model_ext import blocks
from sglang_tknp.model_ext.attention import output_size, qkv_sizes
from sglang_tknp.model_ext.stage import Stage, build_whole_model, collect_attention, use_blocks
from sglang_tknp.placement import ModelBytes, Placement
from sglang_tknp.pool_plan import NodeBuild, PoolBuild
from sglang_tknp.topology import Topology

Sizes = dict[str, int]  # bytes by parameter name


def build_pool(
    model_config: Any, load_config: Any, placement: Placement, model: ModelBytes, tp_size: int
) -> PoolBuild:
    """Build the N blocks, each split T ways and unsplit; inside compat.planning_context.

    Sets SGLANG_PP_LAYER_PARTITION. Raises ValueError for a model that TKNP does not serve.
    """
    use_blocks(placement)
    runner = SimpleNamespace(model_config=model_config, load_config=load_config)

    def build(node: int, ranks: int) -> Stage:
        return _build_stage(runner, placement, model, node, ranks)

    whole = build_whole_model(_plan_stage(runner, placement, model, 0, tp_size), runner)
    built = []
    for node in range(placement.num_nodes):
        stage = build(node, tp_size)
        stage.whole_model = whole
        blocks.check_head(stage)
        stage.attention = collect_attention(stage)
        unsplit = build(node, 1).model
        built.append(_measure(stage.model, unsplit, tp_size))
    q_size, kv_size = _row_sizes(stage)
    return PoolBuild(
        model_class=type(whole).__name__,
        tp_size=tp_size,
        hidden_size=stage.hidden_size,
        element_bytes=stage.dtype.itemsize,
        nodes=tuple(built),
        q_size=q_size,
        kv_size=kv_size,
        head_width=stage.model.lm_head.weight.shape[0],
        tied_copy=unsplit.lm_head.weight.nbytes if model.tied else 0,
    )


def _plan_stage(
    runner: Any, placement: Placement, model: ModelBytes, node: int, tp_size: int
) -> Stage:
    """The stage of a node's first rank, as stage.plan_stage makes it in a pool that runs."""
    num_nodes = placement.num_nodes
    return Stage(
        topology=Topology(num_nodes=num_nodes, tp_size=tp_size, rank=node * tp_size),
        placement=placement,
        model_bytes=model,
        peers=compat.PlannedGroup(node, num_nodes),
        node_group=compat.PlannedGroup(0, tp_size),
        dtype=runner.model_config.dtype,
        hidden_size=runner.model_config.hidden_size,
    )


def _build_stage(
    runner: Any, placement: Placement, model: ModelBytes, node: int, tp_size: int
) -> Stage:
    stage = _plan_stage(runner, placement, model, node, tp_size)
    with stage.scope(), torch.device("meta"):
        stage.model = compat.initialize_model(runner.model_config, runner.load_config)
    if blocks.lacks_head(stage):
        blocks.make_tied_head(stage, runner.model_config)
    blocks.drop_foreign_head(stage)
    return stage


def _measure(rank: torch.nn.Module, unsplit: torch.nn.Module, tp_size: int) -> NodeBuild:
    mine, whole = _sizes(rank.named_parameters()), _sizes(unsplit.named_parameters())
    assert mine.keys() == whole.keys(), sorted(mine.keys() ^ whole.keys())
    replicated = sum(size for name, size in mine.items() if size == whole[name]) * (tp_size - 1)
    added = sum(mine.values()) * tp_size - sum(whole.values())
    return NodeBuild(
        rank_weights=sum(mine.values()),
        rank_buffers=sum(_sizes(rank.named_buffers()).values()),
        one_copy=sum(whole.values()),
        replicated=replicated,
        uneven=added - replicated,
    )


def _sizes(tensors: Iterable[tuple[str, torch.Tensor]]) -> Sizes:
    """Each tensor once: torch names a shared one by its first name only."""
    return {name: t.numel() * t.element_size() for name, t in tensors}


def _row_sizes(stage: Stage) -> tuple[int, int]:
    """(Q, K) elements of one row on one TP rank; equation 3 wants them equal in all layers."""
    found = {(*qkv_sizes(layer), output_size(layer)) for layer in stage.attention}
    q, k, v, out = next(iter(found))
    if len(found) > 1 or k != v or q != out:
        raise ValueError(
            f"{type(stage.model).__name__} has attention of the sizes (Q, K, V, output) "
            f"{sorted(found)} per row: the dry run knows models with one size in all layers, and "
            "K as wide as V"
        )
    return q, k
