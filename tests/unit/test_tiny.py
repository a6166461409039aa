"""Proves that the tiny checkpoints can tell right tokens from wrong ones: transformers alone.

A checkpoint whose greedy tokens do not depend on the prompt would make every parity test pass.
"""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.tiny import FAMILIES, VOCAB, make_tiny, random_prompts


def greedy(folder: Path, prompt: list[int]) -> tuple[int, ...]:
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert model.dtype == torch.float32
    out = model.generate(torch.tensor([prompt]), max_new_tokens=16, do_sample=False)
    return tuple(out[0, len(prompt) :].tolist())


@pytest.mark.parametrize("family", FAMILIES)
def test_tokens_depend_on_the_prompt(family: str, tmp_path: Path) -> None:
    folder = make_tiny(family, tmp_path)
    long = random_prompts(1, [60])[0]
    # Differing in the first token alone, beyond one layer's sliding window.
    prompts = [*random_prompts(2, [1, 7, 60]), long, [(long[0] + 1) % VOCAB, *long[1:]]]
    answers = [greedy(folder, prompt) for prompt in prompts]
    assert len(set(answers)) == len(prompts)
    assert min(len(set(answer)) / len(answer) for answer in answers) > 0.5


def test_same_call_makes_the_same_bytes(tmp_path: Path) -> None:
    first, second = (make_tiny("qwen2", tmp_path / name) for name in "ab")
    name = "model.safetensors"
    assert (first / name).read_bytes() == (second / name).read_bytes()


def test_overrides_reach_the_config(tmp_path: Path) -> None:
    folder = make_tiny("llama", tmp_path, num_hidden_layers=3, tie_word_embeddings=False)
    config = AutoModelForCausalLM.from_pretrained(folder).config
    assert (config.num_hidden_layers, config.tie_word_embeddings) == (3, False)


def test_tokenizer_keeps_any_text(tmp_path: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(make_tiny("llama", tmp_path))
    text = "caf\u00e9 \u6771\u4eac\n\t{}"
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert max(ids) < VOCAB == len(tokenizer)
    chat = [{"role": "user", "content": "hi"}]
    assert tokenizer.apply_chat_template(chat, tokenize=False) == "hi"
