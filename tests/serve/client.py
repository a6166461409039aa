"""Concurrent greedy requests to a test server, and what a comparison needs of their replies."""

from concurrent.futures import ThreadPoolExecutor
from typing import Any

from tests.serve.server import Server
from tests.tiny import random_prompts

# More tokens than a chunk (64), whole chunks, one token, and everything between.
LENGTHS = [1, 5, 100, 200, 17, 64, 65, 130, 3, 90, 12, 33, 150, 7, 80, 128]
PROMPTS = random_prompts(7, LENGTHS)


def greedy(num_tokens: int = 24, **extra: Any) -> dict[str, Any]:
    return {"temperature": 0, "max_new_tokens": num_tokens, "ignore_eos": True, **extra}


def generate(server: Server, prompt: list[int], **extra: Any) -> Any:
    body = {"input_ids": prompt, "sampling_params": greedy(), **extra}
    return server.post("/generate", body)


def generate_all(server: Server, prompts: list[list[int]], **extra: Any) -> list[Any]:
    """All prompts at once; replies in the order of the prompts."""
    with ThreadPoolExecutor(len(prompts)) as pool:
        return list(pool.map(lambda prompt: generate(server, prompt, **extra), prompts))


def tokens(replies: list[Any]) -> list[list[int]]:
    return [reply["output_ids"] for reply in replies]


def owners(replies: list[Any]) -> set[int]:
    return {reply["meta_info"]["dp_rank"] for reply in replies}
