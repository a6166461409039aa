"""Nemotron-4 (`NemotronForCausalLM`), which SGLang lacks, for SGLang's model registry.

The maths are transformers' `models/nemotron`: LayerNorms whose stored weight is off by one, rotary
positions on a part of each head, a squared ReLU between two projections in place of a gated MLP.
Nothing in it knows TKNP: it is a model with pipeline stages, as SGLang's own are.

Shapes: R = rows of the step, D = hidden size; Q and K are one TP rank's widths of queries and keys.
"""

from collections.abc import Iterable
from typing import Any

import torch
from sglang.srt.layers.activation import get_act_fn
from sglang.srt.layers.dp_attention import is_dp_attention_enabled
from sglang.srt.layers.linear import ColumnParallelLinear, QKVParallelLinear, RowParallelLinear
from sglang.srt.layers.logits_processor import LogitsProcessor
from sglang.srt.layers.quantization.base_config import QuantizationConfig
from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.layers.rotary_embedding import get_rope
from sglang.srt.layers.utils import PPMissingLayer
from sglang.srt.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding
from sglang.srt.model_executor.forward_batch_info import ForwardBatch, PPProxyTensors
from sglang.srt.model_loader.auto_loader import STANDARD_QKV_MAPPING, filter_pp_weights
from sglang.srt.model_loader.weight_utils import default_weight_loader, maybe_remap_kv_scale_name
from sglang.srt.runtime_context import get_parallel
from sglang.srt.utils import add_prefix, make_pp_layers
from torch import nn
from transformers import NemotronConfig

# Heads are split, and partial sums reduced, over the ranks that share a request's attention.
SPLIT = {"parallel_group": "attn_tp"}
REDUCE = {**SPLIT, "use_dp_attention_reduce": True}


class NemotronLayerNorm(nn.LayerNorm):
    """LayerNorm whose stored weight is the scale less one.

    The one is added in the weight's own dtype, as transformers does: a bfloat16 scale is rounded
    before it multiplies.
    """

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.layer_norm(
            x, self.normalized_shape, self.weight + 1.0, self.bias, self.eps
        )


class NemotronMLP(nn.Module):
    """down(relu(up(x))^2): two projections, no gate."""

    def __init__(
        self, config: NemotronConfig, quant_config: QuantizationConfig | None, prefix: str
    ) -> None:
        super().__init__()
        self.up_proj = ColumnParallelLinear(
            config.hidden_size,
            config.intermediate_size,
            bias=config.mlp_bias,
            quant_config=quant_config,
            prefix=add_prefix("up_proj", prefix),
            **SPLIT,
        )
        self.down_proj = RowParallelLinear(
            config.intermediate_size,
            config.hidden_size,
            bias=config.mlp_bias,
            quant_config=quant_config,
            prefix=add_prefix("down_proj", prefix),
            **REDUCE,
        )
        self.act_fn = get_act_fn(config.hidden_act)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        up, _ = self.up_proj(x)
        out, _ = self.down_proj(self.act_fn(up))
        return out


class NemotronAttention(nn.Module):
    """Grouped-query attention; only the first `partial_rotary_factor` of a head turns."""

    def __init__(
        self,
        config: NemotronConfig,
        layer_id: int,
        quant_config: QuantizationConfig | None,
        prefix: str,
    ) -> None:
        super().__init__()
        self.qkv_proj = QKVParallelLinear(
            config.hidden_size,
            config.head_dim,
            config.num_attention_heads,
            config.num_key_value_heads,
            bias=config.attention_bias,
            quant_config=quant_config,
            prefix=add_prefix("qkv_proj", prefix),
            **SPLIT,
        )
        self.o_proj = RowParallelLinear(
            config.num_attention_heads * config.head_dim,
            config.hidden_size,
            bias=config.attention_bias,
            quant_config=quant_config,
            prefix=add_prefix("o_proj", prefix),
            **REDUCE,
        )
        self.rotary_emb = _partial_rope(config)
        # One TP rank's heads, as the projection split (or repeated) them.
        num_heads, num_kv_heads = self.qkv_proj.num_heads, self.qkv_proj.num_kv_heads
        self.qkv_sizes = [heads * config.head_dim for heads in (num_heads, *[num_kv_heads] * 2)]
        self.attn = RadixAttention(
            num_heads,
            config.head_dim,
            config.head_dim**-0.5,
            num_kv_heads=num_kv_heads,
            layer_id=layer_id,
            quant_config=quant_config,
            prefix=add_prefix("attn", prefix),
        )

    def forward(
        self, positions: torch.Tensor, x: torch.Tensor, forward_batch: ForwardBatch
    ) -> torch.Tensor:
        qkv, _ = self.qkv_proj(x)
        q, k, v = qkv.split(self.qkv_sizes, dim=-1)
        q, k = self.rotary_emb(positions, q, k)
        out, _ = self.o_proj(self.attn(q, k, v, forward_batch))
        return out


def _partial_rope(config: NemotronConfig) -> nn.Module:
    rope = config.rope_parameters
    made: nn.Module = get_rope(
        config.head_dim,
        rotary_dim=int(config.head_dim * rope["partial_rotary_factor"]),
        max_position=config.max_position_embeddings,
        base=rope["rope_theta"],
        rope_scaling=rope,
    )
    return made


class NemotronDecoderLayer(nn.Module):
    def __init__(
        self,
        config: NemotronConfig,
        layer_id: int,
        quant_config: QuantizationConfig | None,
        prefix: str,
    ) -> None:
        super().__init__()
        self.self_attn = NemotronAttention(
            config, layer_id, quant_config, add_prefix("self_attn", prefix)
        )
        self.mlp = NemotronMLP(config, quant_config, add_prefix("mlp", prefix))
        self.input_layernorm = NemotronLayerNorm(config.hidden_size, eps=config.norm_eps)
        self.post_attention_layernorm = NemotronLayerNorm(config.hidden_size, eps=config.norm_eps)

    def forward(
        self,
        positions: torch.Tensor,
        hidden: torch.Tensor,
        residual: torch.Tensor | None,
        forward_batch: ForwardBatch,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """[R, D] twice -> the MLP's output and the sum of all before it, [R, D] each.

        The sum stays open, so that a stage hands on what the next layer would have seen.
        """
        residual = hidden if residual is None else residual + hidden
        residual = residual + self.self_attn(
            positions, self.input_layernorm(residual), forward_batch
        )
        return self.mlp(self.post_attention_layernorm(residual)), residual


class NemotronModel(nn.Module):
    """The layers of one pipeline stage; the embedding on the first, the final norm on the last."""

    def __init__(
        self, config: NemotronConfig, quant_config: QuantizationConfig | None, prefix: str
    ) -> None:
        super().__init__()
        self.pp_group = get_parallel().pp_group
        self.embed_tokens = PPMissingLayer()
        if self.pp_group.is_first_rank:
            self.embed_tokens = VocabParallelEmbedding(
                config.vocab_size,
                config.hidden_size,
                quant_config=quant_config,
                prefix=add_prefix("embed_tokens", prefix),
                use_attn_tp_group=is_dp_attention_enabled(),
            )
        self.layers, self.start_layer, self.end_layer = make_pp_layers(
            config.num_hidden_layers,
            lambda idx, prefix: NemotronDecoderLayer(config, idx, quant_config, prefix),
            prefix=add_prefix("layers", prefix),
        )
        self.norm = PPMissingLayer()
        if self.pp_group.is_last_rank:
            self.norm = NemotronLayerNorm(config.hidden_size, eps=config.norm_eps)

    def forward(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        forward_batch: ForwardBatch,
        input_embeds: torch.Tensor | None,
        pp_proxy_tensors: PPProxyTensors | None,
    ) -> torch.Tensor | PPProxyTensors:
        residual: Any = None
        if self.pp_group.is_first_rank:
            hidden = self.embed_tokens(input_ids) if input_embeds is None else input_embeds
        else:
            assert pp_proxy_tensors is not None, "a later stage needs the handoff of the one before"
            hidden, residual = pp_proxy_tensors["hidden_states"], pp_proxy_tensors["residual"]
        for i in range(self.start_layer, self.end_layer):
            hidden, residual = self.layers[i](positions, hidden, residual, forward_batch)
        if not self.pp_group.is_last_rank:
            return PPProxyTensors({"hidden_states": hidden, "residual": residual})
        return self.norm(residual + hidden)


class NemotronForCausalLM(nn.Module):
    # What a quantised checkpoint names apart is one projection here.
    packed_modules_mapping = {"qkv_proj": ["q_proj", "k_proj", "v_proj"]}

    def __init__(
        self,
        config: NemotronConfig,
        quant_config: QuantizationConfig | None = None,
        prefix: str = "",
    ) -> None:
        super().__init__()
        self.config = config
        self.quant_config = quant_config
        self.pp_group = get_parallel().pp_group
        self.model = NemotronModel(config, quant_config, add_prefix("model", prefix))
        self.lm_head = self._make_head(add_prefix("lm_head", prefix))
        self.logits_processor = LogitsProcessor(config)

    def _make_head(self, prefix: str) -> nn.Module:
        if not self.pp_group.is_last_rank:
            return PPMissingLayer()
        if self.config.tie_word_embeddings and self.pp_group.is_first_rank:
            return self.model.embed_tokens
        return ParallelLMHead(
            self.config.vocab_size,
            self.config.hidden_size,
            quant_config=self.quant_config,
            prefix=prefix,
            use_attn_tp_group=get_parallel().enable_dp_lm_head,
        )

    @property
    def start_layer(self) -> int:
        return int(self.model.start_layer)

    @property
    def end_layer(self) -> int:
        return int(self.model.end_layer)

    def get_input_embeddings(self) -> nn.Module:
        return self.model.embed_tokens

    @torch.no_grad()
    def forward(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        forward_batch: ForwardBatch,
        input_embeds: torch.Tensor | None = None,
        pp_proxy_tensors: PPProxyTensors | None = None,
    ) -> Any:
        """[R] token ids and positions -> the logits of SGLang's processor, or the next handoff."""
        out = self.model(input_ids, positions, forward_batch, input_embeds, pp_proxy_tensors)
        if not self.pp_group.is_last_rank:
            return out
        return self.logits_processor(input_ids, out, self.lm_head, forward_batch)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Load what this stage holds. Raises ValueError on a tensor that no stage holds."""
        params = dict(self.named_parameters())
        for name, tensor in filter_pp_weights(weights, self.start_layer, self.end_layer):
            for target in self._targets(name):
                self._load(target, tensor, params)

    def _targets(self, name: str) -> list[str]:
        """Where a tensor of the checkpoint goes: the embedding is a later stage's tied head."""
        if self.config.tie_word_embeddings:
            if name == "lm_head.weight":
                return []  # some checkpoints store it although it is tied
            if name == "model.embed_tokens.weight" and self.lm_head is not self.model.embed_tokens:
                return [name, "lm_head.weight"]
        return [name]

    def _load(self, name: str, tensor: torch.Tensor, params: dict[str, nn.Parameter]) -> None:
        name = maybe_remap_kv_scale_name(name, params) if "scale" in name else name
        if name is None or "rotary_emb." in name or self._is_missing(name):
            return
        if STANDARD_QKV_MAPPING.try_load(name, tensor, params) is not None:
            return
        if name not in params:
            raise ValueError(f"the checkpoint's {name} is no parameter of NemotronForCausalLM")
        param = params[name]
        getattr(param, "weight_loader", default_weight_loader)(param, tensor)

    def _is_missing(self, name: str) -> bool:
        """Whether another stage holds the embedding, the final norm or the head of this name."""
        ends = {"model.embed_tokens.": self.model.embed_tokens, "model.norm.": self.model.norm}
        ends["lm_head."] = self.lm_head
        return any(
            name.startswith(prefix) and isinstance(module, PPMissingLayer)
            for prefix, module in ends.items()
        )


EntryClass = NemotronForCausalLM
