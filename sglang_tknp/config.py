"""TKNP's settings: one door, the SGLANG_TKNP_* variables, written by the flags and by `engine()`.

Environment variables are the only carrier that reaches every process SGLang spawns before it
loads its plugins. Standard library only: every process of every user imports this file.
"""

import argparse
import os
from collections.abc import MutableMapping
from dataclasses import dataclass, fields
from typing import Any

ENV_PREFIX = "SGLANG_TKNP_"
DEFAULT_EXCHANGE_TIMEOUT = 120.0
MAX_EXCHANGE_TIMEOUT = 86400.0


@dataclass(frozen=True, slots=True, kw_only=True)
class TknpConfig:
    """What the user asked for. `from_env` and `to_env` are exact inverses."""

    enable: bool = False
    layer_blocks: str | None = None  # "16,14": layers per node, in node order
    exchange_timeout: float = DEFAULT_EXCHANGE_TIMEOUT  # seconds
    device_memory_gb: float | None = None  # CPU platform only, per rank, GiB

    def __post_init__(self) -> None:
        if self.exchange_timeout > MAX_EXCHANGE_TIMEOUT:
            raise ValueError(
                f"--tknp-exchange-timeout={self.exchange_timeout:g} must be at most "
                f"{MAX_EXCHANGE_TIMEOUT:g} seconds: a transfer that takes a day is a hang"
            )
        if not self.exchange_timeout > 0:
            raise ValueError(
                f"--tknp-exchange-timeout={self.exchange_timeout:g} must be a positive number of "
                f"seconds; leave it out for {DEFAULT_EXCHANGE_TIMEOUT:g}"
            )
        if self.device_memory_gb is not None and not self.device_memory_gb > 0:
            raise ValueError(
                f"--tknp-device-memory-gb={self.device_memory_gb:g} must be a positive number of "
                "GiB; leave it out to share the machine's free memory between the ranks"
            )

    @classmethod
    def from_env(cls, env: MutableMapping[str, str] | None = None) -> "TknpConfig":
        env = os.environ if env is None else env

        def get(name: str) -> str | None:
            return env.get(ENV_PREFIX + name) or None

        timeout = _number("EXCHANGE_TIMEOUT", get)
        return cls(
            enable=_switch("ENABLE", get),
            layer_blocks=get("LAYER_BLOCKS"),
            exchange_timeout=DEFAULT_EXCHANGE_TIMEOUT if timeout is None else timeout,
            device_memory_gb=_number("DEVICE_MEMORY_GB", get),
        )

    def to_env(self, env: MutableMapping[str, str] | None = None) -> None:
        """Write every setting, so that child processes read exactly this configuration."""
        env = os.environ if env is None else env
        for field in fields(self):
            value = getattr(self, field.name)
            key = ENV_PREFIX + field.name.upper()
            if value is None or value is False:
                env.pop(key, None)
            else:
                env[key] = "1" if value is True else str(value)


def _switch(name: str, get: Any) -> bool:
    text = (get(name) or "0").lower()
    if text not in ("0", "1", "false", "true"):
        raise ValueError(f"{ENV_PREFIX}{name}={text!r} must be 1 or 0")
    return text in ("1", "true")


def _number(name: str, get: Any) -> float | None:
    text = get(name)
    if text is None:
        return None
    try:
        return float(text)
    except ValueError:
        raise ValueError(f"{ENV_PREFIX}{name}={text!r} must be a number") from None


def add_cli_args(parser: argparse.ArgumentParser) -> None:
    """Add the --tknp flags to SGLang's parser; defaults come from the environment variables."""
    default = TknpConfig.from_env()
    group = parser.add_argument_group("Decode Token Parallelism (sglang-tknp)")
    group.add_argument(
        "--enable-tknp",
        action="store_true",
        default=default.enable,
        help="Serve with Decode Token Parallelism: one copy of a dense model over N nodes in layer "
        "blocks, every request's attention on the one node that owns it. Needs --tp-size W and "
        "--attn-dp-size N, W a multiple of N, N >= 2; each node then has T = W/N ranks. Without "
        "--attn-dp-size, N is --nnodes.",
    )
    group.add_argument(
        "--tknp-layer-blocks",
        type=str,
        default=default.layer_blocks,
        help='Layers per node in node order, for example "16,14". Default: the contiguous blocks '
        "that minimise the largest node's weight bytes.",
    )
    group.add_argument(
        "--tknp-exchange-timeout",
        type=float,
        default=default.exchange_timeout,
        help="Seconds that any transfer or collective of a running pool may take before the pool "
        f"stops with its reason. Default: {DEFAULT_EXCHANGE_TIMEOUT:g}.",
    )
    group.add_argument(
        "--tknp-device-memory-gb",
        type=float,
        default=default.device_memory_gb,
        help="CPU platform only: the device memory, in GiB, that each rank pretends to have; "
        "SGLang sizes its KV pool from it as on a GPU. Default: the machine's free memory shared "
        "between its ranks. Works without --enable-tknp too.",
    )


def from_cli_args(args: argparse.Namespace) -> TknpConfig:
    return TknpConfig(
        enable=args.enable_tknp,
        layer_blocks=args.tknp_layer_blocks,
        exchange_timeout=args.tknp_exchange_timeout,
        device_memory_gb=args.tknp_device_memory_gb,
    )
