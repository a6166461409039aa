"""Checkpoints made once, and stock SGLang's answers asked for once, for all serve tests."""

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.serve.client import PROMPTS, generate_all, tokens
from tests.serve.server import base_args, check_native, serve
from tests.tiny import make_tiny

# Without TKNP, SGLang knows our models by its own switch only.
STOCK_ENV = {"nemotron": {"SGLANG_EXTERNAL_MODEL_PACKAGE": "sglang_tknp.model_ext"}}


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    folder = tmp_path_factory.mktemp("checkpoints")

    @functools.cache
    def make(family: str) -> Path:
        return make_tiny(family, folder / family)

    return make


@pytest.fixture(scope="session")
def stock_tokens(
    checkpoint: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str, int], Any]:
    """Greedy tokens of stock SGLang at --tp-size T, for PROMPTS and for PROMPTS continued."""
    logs = tmp_path_factory.mktemp("stock")

    @functools.cache
    def ask(family: str, ranks: int) -> list[list[int]]:
        args = base_args(checkpoint(family), tp_size=ranks)
        with serve(args, logs / f"{family}-{ranks}.log", STOCK_ENV.get(family)) as server:
            check_native(server)
            return tokens(generate_all(server, PROMPTS))

    return ask
