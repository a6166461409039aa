"""Where the weights go: the placement that all ranks agree on, and the head on the last node."""

import logging
from pathlib import Path
from typing import Any

import torch

from sglang_tknp import compat, placement
from sglang_tknp.checkpoint import read_model_bytes
from sglang_tknp.config import TknpConfig
from sglang_tknp.estimate import estimate_model_bytes
from sglang_tknp.placement import ModelBytes, Placement

logger = logging.getLogger(__name__)

# SGLang's methods that make FP8 of a layer's matrices where the checkpoint is not quantised.
FP8_METHODS = ("fp8", "w8a8_fp8")


def agree_on_placement(
    model_config: Any, settings: TknpConfig, num_nodes: int
) -> tuple[Placement, ModelBytes]:
    """World rank 0 decides and every rank takes its decision; reached by all ranks."""
    decision: list[Any] = [None]
    group = compat.parallel().tp_group
    if group.rank_in_group == 0:
        decision[0] = decide_placement(model_config, settings, num_nodes)
    torch.distributed.broadcast_object_list(decision, src=group.ranks[0], group=group.cpu_group)
    chosen, model = decision[0]
    if group.rank_in_group == 0:
        logger.info("TKNP places the weights:\n%s", placement.format_table(chosen, model))
    return chosen, model


def decide_placement(
    model_config: Any, settings: TknpConfig, num_nodes: int
) -> tuple[Placement, ModelBytes]:
    model = model_bytes(model_config)
    if settings.layer_blocks is None:
        chosen = placement.balance(model, num_nodes)
    else:
        layers = placement.parse_layer_blocks(settings.layer_blocks, len(model.layers), num_nodes)
        chosen = placement.place(model, layers)
    return chosen, model


def model_bytes(model_config: Any) -> ModelBytes:
    """Bytes of the checkpoint's tensors; estimated from the configuration for dummy weights.

    Where SGLang quantises on load, the bytes that it makes of them.
    """
    config = model_config.hf_text_config
    tied = bool(getattr(config, "tie_word_embeddings", False))
    folder = checkpoint_folder(model_config)
    on_load = model_config.quantization in FP8_METHODS and not model_config.hf_quant_config
    try:
        matrix_bytes = 1 if on_load else None
        return read_model_bytes(folder, config.num_hidden_layers, tied, matrix_bytes)
    except FileNotFoundError as error:
        logger.warning("%s; placing layers by sizes estimated from the configuration", error)
        fields = config.to_dict()
        if on_load:
            fields["quantization_config"] = {"quant_method": "fp8"}
        return estimate_model_bytes(fields, model_config.dtype.itemsize)


def checkpoint_folder(model_config: Any) -> Path:
    """The local folder of the checkpoint, downloaded from the hub as SGLang's loader would."""
    path = Path(model_config.model_path)
    if path.exists():
        return path if path.is_dir() else path.parent
    from huggingface_hub import snapshot_download

    patterns = ["*.safetensors", "*.json"]
    return Path(
        snapshot_download(
            model_config.model_path, revision=model_config.revision, allow_patterns=patterns
        )
    )


def place_head(stage: Any, runner: Any) -> None:
    """Leave one head in the pool, on the last node; reached by all ranks.

    SGLang's Llama builds an untied head on every stage, and gives a tied head to none but the
    first: the last node then takes a copy of the embedding from the first one, rank by rank.
    """
    check_head(stage)
    flags: list[Any] = [None] * stage.topology.num_nodes
    torch.distributed.all_gather_object(flags, lacks_head(stage), group=stage.peers.cpu_group)
    if flags[-1]:
        _copy_tied_head(stage, runner.model_config)
    drop_foreign_head(stage)


def check_head(stage: Any) -> None:
    """Raise ValueError for a model whose head is not called lm_head."""
    if getattr(stage.whole_model, "lm_head", None) is None:
        raise ValueError(
            f"{type(stage.model).__name__} has no lm_head: TKNP does not know its head, so it "
            "cannot serve it; serve it without --enable-tknp"
        )


def lacks_head(stage: Any) -> bool:
    """Whether this is the last node and SGLang gave it no head, because it is tied."""
    return stage.is_head_node and not hasattr(stage.model.lm_head, "weight")


def make_tied_head(stage: Any, model_config: Any) -> None:
    """Give the last node a head of its own, not filled yet, beside its other parameters."""
    config = model_config.hf_text_config
    like = next(p for p in stage.model.parameters() if p.is_floating_point())
    with stage.scope(), like.device:
        stage.model.lm_head = compat.make_head(config.vocab_size, config.hidden_size, model_config)


def drop_foreign_head(stage: Any) -> None:
    if not stage.is_head_node:
        stage.model.lm_head = compat.missing_layer()


def _copy_tied_head(stage: Any, model_config: Any) -> None:
    """The first node's embedding shard goes to the last node's matching TP rank."""
    group = stage.peers.device_group
    if stage.node == 0:
        weight = stage.model.lm_head.weight
        last = stage.topology.num_nodes - 1
        torch.distributed.send(weight.data, group_dst=last, group=group)
    elif stage.is_head_node:
        make_tied_head(stage, model_config)
        torch.distributed.recv(stage.model.lm_head.weight.data, group_src=0, group=group)
