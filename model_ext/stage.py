"""Build a node's layer block: SGLang's pipeline stage inside the node, attention for every layer.

A node runs the dense layers of its block only, but owns requests whose attention spans all
layers. So it loads the block as stage `node` of N under a scope in which SGLang sees tensor
parallelism of T, and takes the attention modules of the other layers from a copy of the whole
model on the meta device: attention has no weights of its own (paper, section 4.1).
"""

import contextlib
import logging
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from sglang.srt.layers.radix_attention import RadixAttention

from sglang_tknp import compat
from sglang_tknp.config import TknpConfig
from sglang_tknp.model_ext import blocks, checks
from sglang_tknp.placement import ModelBytes, Placement
from sglang_tknp.topology import Topology

logger = logging.getLogger(__name__)

# A layer's KV scales, which only the node that loads the layer reads from the checkpoint.
KV_SCALES = ("k_scale", "v_scale", "k_scale_float", "v_scale_float")


@dataclass(kw_only=True)
class Stage:
    """What one rank holds of the model, and the scope in which its block runs."""

    topology: Topology
    placement: Placement
    model_bytes: ModelBytes  # of the whole checkpoint
    peers: Any  # GroupCoordinator of the matching TP ranks, in node order
    node_group: Any  # GroupCoordinator of this node's T ranks
    dtype: torch.dtype  # of activations
    hidden_size: int
    model: Any = None  # SGLang's model with this node's block; set by load
    whole_model: Any = None  # the same model, all layers, on the meta device; set by load
    attention: tuple[RadixAttention, ...] = ()  # by layer id, all layers; set by load
    step: Any = None  # the Step that runs the model; set by install_step

    @property
    def node(self) -> int:
        return self.topology.node

    @property
    def device(self) -> torch.device:
        device: torch.device = next(self.model.parameters()).device
        return device

    @property
    def is_head_node(self) -> bool:
        """The last block's node: it holds the final norm and the head."""
        return self.node == self.topology.num_nodes - 1

    @contextlib.contextmanager
    def scope(self) -> Iterator[None]:
        """In it, SGLang's model code sees TP of T in this node and pipeline stage `node` of N."""
        stage = {
            "pp_size": self.topology.num_nodes,
            "pp_rank": self.node,
            "pp_group": self.peers,
        }
        with compat.node_scope(self.node_group), compat.parallel_override(**stage):
            yield


_stage: Stage | None = None


def current_stage() -> Stage:
    assert _stage is not None, "TKNP's model is not loaded yet"
    return _stage


def around_load_model(original: Callable[[Any], None], runner: Any) -> None:
    """Target: ModelRunner.load_model, on every rank (the peer groups are made here)."""
    global _stage
    from sglang_tknp.model_ext.step import install_step

    stage = plan_stage(runner)
    with stage.scope():
        original(runner)
    stage.model = runner.model
    stage.whole_model = build_whole_model(stage, runner)
    stage.attention = collect_attention(stage)
    share_kv_scales(stage)
    blocks.place_head(stage, runner)
    compat.record_loaded_model(runner.model)
    _stage = stage
    install_step(stage)


def around_resolve_layer_indices(original: Callable[..., Any], *, model: Any, **kwargs: Any) -> Any:
    """Target: resolve_layer_indices, on every rank: the KV pool spans the whole model's layers."""
    return original(model=current_stage().whole_model, **kwargs)


def plan_stage(runner: Any) -> Stage:
    """Decide this rank's place and its node's block; reached by all ranks."""
    parallel = compat.parallel()
    topology = Topology(
        num_nodes=parallel.attn_dp_size, tp_size=parallel.attn_tp_size, rank=parallel.tp_rank
    )
    placement, model_bytes = blocks.agree_on_placement(
        runner.model_config, TknpConfig.from_env(), topology.num_nodes
    )
    use_blocks(placement)
    return Stage(
        topology=topology,
        placement=placement,
        model_bytes=model_bytes,
        peers=compat.make_group(topology.all_peer_groups(), "tknp_peers"),
        node_group=parallel.attn_tp_group,
        dtype=runner.model_config.dtype,
        hidden_size=runner.model_config.hidden_size,
    )


def use_blocks(placement: Placement) -> None:
    """Set SGLang's own override of its even split of layers over pipeline stages."""
    os.environ["SGLANG_PP_LAYER_PARTITION"] = ",".join(map(str, placement.blocks))


def build_whole_model(stage: Stage, runner: Any) -> Any:
    """All layers on the meta device: no memory, and no weights.

    After the real block, never before: SGLang caches rotary embeddings by their parameters, and
    the block must not find one that lives on the meta device.
    """
    single = {"pp_size": 1, "pp_rank": 0, "pp_group": compat.SingleMemberGroup()}
    with (
        compat.node_scope(stage.node_group),
        compat.parallel_override(**single),
        torch.device("meta"),
    ):
        return compat.initialize_model(runner.model_config, runner.load_config)


def attention_of(model: Any) -> dict[int, list[RadixAttention]]:
    found: dict[int, list[RadixAttention]] = {}
    for module in model.modules():
        if isinstance(module, RadixAttention):
            found.setdefault(module.layer_id, []).append(module)
    return found


def collect_attention(stage: Stage) -> tuple[RadixAttention, ...]:
    """One attention module per layer: the loaded one in this node's block, else the meta copy's."""
    name = type(stage.model).__name__
    whole, mine = attention_of(stage.whole_model), attention_of(stage.model)
    num_layers = stage.placement.num_layers
    checks.one_attention_per_layer(name, whole, num_layers)
    checks.dense(name, stage.whole_model)
    block = stage.placement.block(stage.node)
    if sorted(mine) != list(block):
        raise ValueError(
            f"{name} built attention for layers {sorted(mine)} on node {stage.node}, whose block "
            f"is {list(block)}: the model does not support pipeline stages, which TKNP needs"
        )
    return tuple(mine[i][0] if i in block else whole[i][0] for i in range(num_layers))


def share_kv_scales(stage: Stage) -> None:
    """Give every node the FP8 KV scales of all layers; reached by all ranks of a peer group."""
    block = stage.placement.block(stage.node)
    mine = {
        layer: {name: _to_cpu(getattr(stage.attention[layer], name)) for name in KV_SCALES}
        for layer in block
    }
    gathered: list[Any] = [None] * stage.topology.num_nodes
    torch.distributed.all_gather_object(gathered, mine, group=stage.peers.cpu_group)
    for layer, scales in ((i, s) for node in gathered for i, s in node.items() if i not in block):
        module = stage.attention[layer]
        module.quant_method = None  # its weights were for loading the scales
        for name, value in scales.items():
            # As plain attributes: a parameter of the meta copy would keep its place.
            module._parameters.pop(name, None)
            setattr(module, name, value.to(stage.device) if torch.is_tensor(value) else value)


def _to_cpu(value: Any) -> Any:
    return value.detach().cpu() if torch.is_tensor(value) else value
