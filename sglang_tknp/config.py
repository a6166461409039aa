"""TKNP's settings: one door, the SGLANG_TKNP_* variables, written by the flags and by `engine()`.

Environment variables are the only carrier that reaches every process SGLang spawns before it
loads its plugins. Standard library only: every process of every user imports this file.
"""

import argparse
import os
from collections.abc import Callable, MutableMapping
from dataclasses import dataclass, fields
from typing import Any

ENV_PREFIX = "SGLANG_TKNP_"
DEFAULT_EXCHANGE_TIMEOUT = 120.0
MAX_EXCHANGE_TIMEOUT = 86400.0
OWNER_POLICIES = ("kv-reserved", "kv-used")
DEFAULT_MAX_OVERTAKES = 16
DEFAULT_UNEVEN_LAYOUTS = 8
DEFAULT_EXPECTED_OUTPUT = 1024  # tokens, of a request that names no length


@dataclass(frozen=True, slots=True, kw_only=True)
class TknpConfig:
    """What the user asked for. `from_env` and `to_env` are exact inverses."""

    enable: bool = False
    layer_blocks: str | None = None  # "16,14": layers per node, in node order
    exchange_timeout: float = DEFAULT_EXCHANGE_TIMEOUT  # seconds
    device_memory_gb: float | None = None  # CPU platform only, per rank, GiB
    owner_policy: str = OWNER_POLICIES[0]
    expected_output_tokens: int | None = None
    max_overtakes: int = DEFAULT_MAX_OVERTAKES
    prefix_slack: int | None = None  # KV tokens; None: no prefix affinity
    force_slots: bool = False
    uneven_layouts: int = DEFAULT_UNEVEN_LAYOUTS

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
        if self.uneven_layouts < 0:
            raise ValueError(
                f"--tknp-uneven-layouts={self.uneven_layouts} must not be negative; 0 leaves "
                "layouts with the same slots for every owner only"
            )
        self._check_controller()

    def _check_controller(self) -> None:
        if self.owner_policy not in OWNER_POLICIES:
            raise ValueError(
                f"--tknp-owner-policy={self.owner_policy} must be {' or '.join(OWNER_POLICIES)}"
            )
        if self.expected_output_tokens is not None and self.expected_output_tokens < 1:
            raise ValueError(
                f"--tknp-expected-output-tokens={self.expected_output_tokens} must be a positive "
                "number of tokens; leave it out to reserve for all that a request may ask"
            )
        if self.max_overtakes < 0:
            raise ValueError(
                f"--tknp-max-overtakes={self.max_overtakes} must not be negative; 0 is strict "
                "order of arrival"
            )
        if self.prefix_slack is not None and self.prefix_slack < 0:
            raise ValueError(
                f"--tknp-prefix-slack={self.prefix_slack} must not be a negative number of KV "
                "tokens; leave it out to switch prefix affinity off"
            )

    @classmethod
    def from_env(cls, env: MutableMapping[str, str] | None = None) -> "TknpConfig":
        env = os.environ if env is None else env

        found = {
            field.name: _READERS[field.name](ENV_PREFIX + field.name.upper(), text)
            for field in fields(cls)
            if (text := env.get(ENV_PREFIX + field.name.upper()))
        }
        return cls(**found)

    def to_env(self, env: MutableMapping[str, str] | None = None) -> None:
        """Write what is not the default, and nothing else: children read exactly `self`."""
        env = os.environ if env is None else env
        for field in fields(self):
            value = getattr(self, field.name)
            key = ENV_PREFIX + field.name.upper()
            if value == field.default:
                env.pop(key, None)
            else:
                env[key] = "1" if value is True else str(value)


def _switch(name: str, text: str) -> bool:
    if text.lower() not in ("0", "1", "false", "true"):
        raise ValueError(f"{name}={text!r} must be 1 or 0")
    return text.lower() in ("1", "true")


def _number(name: str, text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ValueError(f"{name}={text!r} must be a number") from None


def _whole_number(name: str, text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise ValueError(f"{name}={text!r} must be a whole number") from None


def _text(name: str, text: str) -> str:
    return text


_READERS: dict[str, Callable[[str, str], Any]] = {
    "enable": _switch,
    "layer_blocks": _text,
    "exchange_timeout": _number,
    "device_memory_gb": _number,
    "owner_policy": _text,
    "expected_output_tokens": _whole_number,
    "max_overtakes": _whole_number,
    "prefix_slack": _whole_number,
    "force_slots": _switch,
    "uneven_layouts": _whole_number,
}


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
    _add_slot_args(group, default)
    _add_controller_args(group, default)


def _add_slot_args(group: Any, default: TknpConfig) -> None:
    group.add_argument(
        "--tknp-uneven-layouts",
        type=int,
        default=default.uneven_layouts,
        help="CUDA graphs: the most layouts with different slots per owner that are captured "
        "beside the ones with equal slots; each costs a graph and serves steps in which one owner "
        "has about twice the requests of the others. They come in groups of N, one for each owner, "
        f"so a number below N gives none. Default: {DEFAULT_UNEVEN_LAYOUTS}.",
    )
    group.add_argument(
        "--tknp-force-slots",
        action="store_true",
        default=default.force_slots,
        help="Run decode steps on the padded slots of captured layouts without capturing graphs, "
        "on CPUs too (sizes: --cuda-graph-bs-decode). To test slots and to tell a fault of graphs "
        "from one of slots; costs padded work.",
    )


def _add_controller_args(group: Any, default: TknpConfig) -> None:
    group.add_argument(
        "--tknp-owner-policy",
        choices=OWNER_POLICIES,
        default=default.owner_policy,
        help="What a new request's owner has least of: KV reserved for whole requests, input and "
        "expected output (kv-reserved), or context tokens by now (kv-used). Default: "
        f"{OWNER_POLICIES[0]}.",
    )
    group.add_argument(
        "--tknp-expected-output-tokens",
        type=int,
        default=default.expected_output_tokens,
        help="The most output tokens for which a request's owner must have room. A request may "
        "still generate all that it asks for; when many do, SGLang retracts. Default: no cap for "
        f"a request that names a length, {DEFAULT_EXPECTED_OUTPUT} for one that names none.",
    )
    group.add_argument(
        "--tknp-max-overtakes",
        type=int,
        default=default.max_overtakes,
        help="How many later, smaller requests may pass a request that waits for an owner. 0 is "
        f"strict order of arrival. Default: {DEFAULT_MAX_OVERTAKES}.",
    )
    group.add_argument(
        "--tknp-prefix-slack",
        type=int,
        default=default.prefix_slack,
        help="Prefix affinity: an owner that has seen the longest part of a prompt gets it, if it "
        "has at most this many KV tokens more load than the least loaded owner. Default: off.",
    )


def from_cli_args(args: argparse.Namespace) -> TknpConfig:
    names = [field.name for field in fields(TknpConfig) if field.name != "enable"]
    return TknpConfig(
        enable=args.enable_tknp, **{name: getattr(args, f"tknp_{name}") for name in names}
    )
