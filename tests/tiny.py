"""Tiny random checkpoints of real model families, float32, for parity tests. Deterministic."""

from pathlib import Path
from random import Random
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

VOCAB = 512
SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 5,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
# What makes each family different for TKNP.
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"tie_word_embeddings": True},  # SGLang gives the tied head to the first stage only
    "llama-untied": {"tie_word_embeddings": False},  # and an untied one to every stage
    "qwen2": {"tie_word_embeddings": True},  # biases
    "qwen3": {"head_dim": 16, "tie_word_embeddings": False},  # QK-norm, head_dim != hidden/heads
    "mistral": {"sliding_window": 24, "tie_word_embeddings": False, "head_dim": 8},
    # A model of ours: LayerNorms off by one, no gate, and a quarter of each head turns.
    "nemotron": {"head_dim": 16, "partial_rotary_factor": 0.25, "tie_word_embeddings": False},
}


def make_tiny(family: str, out: Path, **overrides: Any) -> Path:
    """Write a checkpoint of `family` with its tokenizer to `out`, and return `out`."""
    shape = {**SHAPE, **FAMILIES[family], **overrides}
    config = AutoConfig.for_model(family.split("-")[0], **shape)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).float()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.normal_(0, 0.2)
            elif parameter.dim() > 1:
                # Wide enough that greedy tokens depend on the prompt and do not settle on one.
                parameter.normal_(0, 0.3)
            else:
                parameter.normal_(1, 0.1)
    model.save_pretrained(out)
    make_tokenizer().save_pretrained(out)
    return out


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Byte-level, without merges: any text in, any of the 512 ids out."""
    names = ["<pad>", "<s>", "</s>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    names += [f"<{i}>" for i in range(len(names), VOCAB)]
    tokenizer = Tokenizer(models.BPE({name: i for i, name in enumerate(names)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<s>",
        eos_token="</s>",
        pad_token="<pad>",
        chat_template="{% for m in messages %}{{ m['content'] }}{% endfor %}",
    )


def random_prompts(seed: int, lengths: list[int]) -> list[list[int]]:
    """Token ids without special tokens."""
    random = Random(seed)
    return [[random.randrange(3, VOCAB) for _ in range(length)] for length in lengths]
