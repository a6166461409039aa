"""Our Nemotron in stages, without a server, groups or a KV pool; for a process of its own.

SGLang's settings and parallel configuration are global to a process: publish once, never undo.
"""

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import sglang.srt.managers.scheduler  # noqa: F401  as in a rank, before the plugin loads
import torch
from safetensors.torch import load_file
from sglang.srt import runtime_context
from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.plugins import load_plugins
from sglang.srt.server_args import ServerArgs
from torch.nn import functional
from transformers import AutoConfig

from sglang_tknp.model_ext.nemotron import NemotronForCausalLM


def publish(folder: Path) -> None:
    """Once in a process: SGLang's configuration, which layers read when they are built."""
    load_plugins()
    args = ServerArgs(model_path=str(folder), dtype="float32", skip_tokenizer_init=True)
    args.resolve_once()
    runtime_context.publish(args, role="scheduler")


@dataclass
class Group:
    """Looks like one of SGLang's groups to a model that never communicates."""

    rank_in_group: int
    world_size: int

    @property
    def is_first_rank(self) -> bool:
        return self.rank_in_group == 0

    @property
    def is_last_rank(self) -> bool:
        return self.rank_in_group == self.world_size - 1


@contextlib.contextmanager
def place(
    stage: int = 0, blocks: tuple[int, ...] = (), tp_size: int = 1, attn_dp_size: int = 1
) -> Iterator[None]:
    """In it a model is built as stage `stage` of layer blocks, and as TP rank 0 of `tp_size`."""
    num_stages = max(len(blocks), 1)
    os.environ["SGLANG_PP_LAYER_PARTITION"] = ",".join(map(str, blocks))
    if not blocks:
        del os.environ["SGLANG_PP_LAYER_PARTITION"]
    pipeline = {"pp_size": num_stages, "pp_rank": stage, "pp_group": Group(stage, num_stages)}
    attn_tp_size = tp_size // attn_dp_size
    tensor = {
        "tp_size": tp_size,
        "tp_rank": 0,
        "tp_group": Group(0, tp_size),
        "attn_dp_size": attn_dp_size,
        "attn_tp_size": attn_tp_size,
        "attn_tp_rank": 0,
        "attn_tp_group": Group(0, attn_tp_size),
        "moe_tp_size": tp_size,
    }
    with runtime_context.get_parallel().override(**pipeline, **tensor):
        yield


def build(config: Any, quant_config: Any = None, **placed: Any) -> NemotronForCausalLM:
    with place(**placed):
        return NemotronForCausalLM(config, quant_config)


class PlainAttention:
    """Causal attention of one sequence over all rows this layer has seen, in place of a KV pool."""

    def __init__(self, layer: RadixAttention) -> None:
        self.layer = layer
        self.seen = [torch.empty(0, layer.tp_k_head_num, layer.head_dim) for _ in "kv"]

    def __call__(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, batch: Any
    ) -> torch.Tensor:
        q, k, v = (x.reshape(x.shape[0], -1, self.layer.head_dim) for x in (q, k, v))
        self.seen = [torch.cat(pair) for pair in zip(self.seen, (k, v), strict=True)]
        rows, total = q.shape[0], self.seen[0].shape[0]
        mask = torch.ones(rows, total, dtype=torch.bool).tril(total - rows)
        heads_first = [x.transpose(0, 1) for x in (q, *self.seen)]
        out = functional.scaled_dot_product_attention(
            *heads_first, attn_mask=mask, scale=self.layer.scaling, enable_gqa=True
        )
        return out.transpose(0, 1).reshape(rows, -1)


class Head(torch.nn.Module):
    """Logits of all rows, in place of SGLang's processor, which picks rows by its batch."""

    def forward(self, ids: Any, hidden: torch.Tensor, head: Any, batch: Any) -> torch.Tensor:
        return functional.linear(hidden, head.weight)


class Stages:
    """A checkpoint in stages of the given layer blocks, which run one after the other."""

    def __init__(self, folder: Path, blocks: tuple[int, ...]) -> None:
        self.config = AutoConfig.from_pretrained(folder)
        self.models = [
            build(self.config, stage=stage, blocks=blocks) for stage in range(len(blocks))
        ]
        for model in self.models:
            model.load_weights(load_file(folder / "model.safetensors").items())
            model.logits_processor = Head()
            for module in model.modules():
                if isinstance(module, RadixAttention):
                    module.forward = PlainAttention(module)

    def logits(self, ids: list[int], start: int) -> torch.Tensor:
        """The next rows of the one sequence, from position `start`: [rows, vocabulary]."""
        positions = torch.arange(start, start + len(ids))
        out = None
        for model in self.models:
            with place():
                out = model(torch.tensor(ids), positions, None, pp_proxy_tensors=out)
        return out

    def num_parameters(self) -> int:
        return sum(p.numel() for model in self.models for p in model.parameters())
