"""Hardware files: what a GPU, its node and its network do, each number with where it is from.

A file is TOML: `name`, `description`, and one table per constant in `[constants]` with `value`,
`unit`, `source`, `status`, and where it is uncertain `low` and `high`. No constant is optional, so
that no number of a plan comes from a default that nobody sees.
"""

import math
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from importlib import resources
from pathlib import Path
from typing import Any

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

GIB = 1 << 30
SPANS = ("node", "cross")  # where the ranks of a DCP group lie
STATUSES = ("datasheet", "measured", "derived", "prior", "fitted", "user")

# Every constant: its unit, the factor from that to base units (bytes, seconds, FLOP), its meaning.
CONSTANTS: Mapping[str, tuple[str, float, str]] = {
    "gpus_per_node": ("count", 1, "ranks that share the fast network of one node"),
    "usable_memory": ("GiB", GIB, "of one GPU, for weights and KV together"),
    "sharded_extra": ("GiB", GIB, "more of it on a node that holds a part of the layers only"),
    "memory_bandwidth": ("GB/s", 1e9, "peak, of one GPU"),
    "attention_efficiency": ("ratio", 1, "of the peak bandwidth, while decode attention reads KV"),
    "attention_fixed": ("us", 1e-6, "of one layer's attention, beside reading KV"),
    "attention_per_request": ("us", 1e-6, "of one layer's attention, for every row of the batch"),
    "gemm_efficiency_8bit": ("ratio", 1, "of the peak bandwidth, reading 8-bit weights"),
    "gemm_efficiency_16bit": ("ratio", 1, "of the peak bandwidth, reading wider weights"),
    "gemm_fixed": ("us", 1e-6, "of one matrix product"),
    "compute_8bit": ("TFLOP/s", 1e12, "reached by products with 8-bit weights"),
    "compute_16bit": ("TFLOP/s", 1e12, "reached by products with wider weights"),
    "elementwise_fixed": ("us", 1e-6, "of the norms and activations of half a layer"),
    "elementwise_bandwidth": ("GB/s", 1e9, "of their reads and writes"),
    "node_allreduce_latency": ("us", 1e-6, "of an all-reduce inside a node"),
    "node_allreduce_bandwidth": ("GB/s", 1e9, "message bytes over time, inside a node"),
    "cross_allreduce_latency": ("us", 1e-6, "of an all-reduce over nodes, beside doublings"),
    "cross_allreduce_doubling": ("us", 1e-6, "more for every doubling of the nodes"),
    "cross_allreduce_bandwidth": ("GB/s", 1e9, "message bytes over time, over nodes"),
    "exchange_latency": ("us", 1e-6, "of a scatter, and of a gather, over all peers of a group"),
    "message_latency": ("us", 1e-6, "of one message between nodes: handoffs, pipeline hops"),
    "message_bandwidth": ("GB/s", 1e9, "of one rank's messages between nodes"),
    "step_overhead": ("us", 1e-6, "of one step: scheduler, sampling, launch"),
    "row_overhead": ("us", 1e-6, "of one step, for every row: sampling, detokenising, streaming"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Constant:
    """One number of a hardware file, in the file's unit."""

    value: float
    unit: str
    source: str
    status: str  # one of STATUSES
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Hardware:
    """A hardware file. Attributes named as in CONSTANTS are in bytes, seconds and FLOP."""

    name: str
    description: str
    constants: Mapping[str, Constant]
    presets: Mapping[str, Any]  # of the layouts: dcp_span, pp_overlap, ...

    def __getattr__(self, name: str) -> float:
        try:
            constant = self.constants[name]
        except KeyError:
            raise AttributeError(name) from None
        return constant.value * CONSTANTS[name][1]

    @property
    def node_size(self) -> int:
        """T: ranks of one node."""
        return int(self.constants["gpus_per_node"].value)

    def with_values(self, source: str, status: str = "user", **values: float) -> "Hardware":
        """The same machine with other numbers, in the file's units; they have no range.

        Raises ValueError, naming `source`, for a number that the constant cannot have.
        """
        changed = {
            name: replace(
                self.constants[name], value=value, source=source, status=status, low=None, high=None
            )
            for name, value in values.items()
        }
        for name, constant in changed.items():
            _check_range(name, constant, source)
        return replace(self, constants={**self.constants, **changed})

    def fitted(self) -> list[str]:
        """What was fitted to published results, for the head of every output."""
        return [
            f"{name} = {c.value:g} {c.unit} ({c.source})"
            for name, c in self.constants.items()
            if c.status == "fitted"
        ]


def built_in() -> list[str]:
    """Names of the hardware files that come with the package."""
    files = resources.files(__package__).joinpath("machines").iterdir()
    return sorted(f.name.removesuffix(".toml") for f in files if f.name.endswith(".toml"))


def load(name: str) -> Hardware:
    """A built-in hardware file by its name, or the user's by its path.

    Raises:
        ValueError: there is no such file, or it lacks or misspells something; the message names
            the file, the setting, its value and the fix.
    """
    if name in built_in():
        text = resources.files(__package__).joinpath("machines", f"{name}.toml").read_text()
        return parse(text, name)
    path = Path(name)
    if not path.is_file():
        raise ValueError(
            f"--hardware={name} is neither a built-in hardware file ({', '.join(built_in())}) nor "
            "a TOML file on this machine; `sglang-tknp calibrate` writes one"
        )
    return parse(path.read_text(), name)


def parse(text: str, where: str) -> Hardware:
    """Read a hardware file's text; ValueError as `load`."""
    try:
        data = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ValueError(f"hardware file {where} is not TOML ({error})") from None
    given = data.get("constants", {})
    if unknown := sorted(set(given) - set(CONSTANTS)):
        raise ValueError(
            f"hardware file {where} has unknown constants {', '.join(unknown)}; those that exist: "
            f"{', '.join(CONSTANTS)}"
        )
    if missing := [name for name in CONSTANTS if name not in given]:
        raise ValueError(
            f"hardware file {where} lacks {', '.join(missing)}; copy them from a built-in file "
            f"({', '.join(built_in())}) or write one with `sglang-tknp calibrate`"
        )
    if unknown := sorted(set(data) - {"name", "description", "constants", "presets"}):
        raise ValueError(f"hardware file {where} has unknown {', '.join(unknown)}")
    return Hardware(
        name=str(data.get("name", Path(where).stem)),
        description=str(data.get("description", "")),
        constants={name: _constant(name, given[name], where) for name in CONSTANTS},
        presets=_presets(data.get("presets", {}), where),
    )


def _presets(given: Mapping[str, Any], where: str) -> Mapping[str, Any]:
    if unknown := sorted(set(given) - {"dcp_span", "pp_overlap"}):
        raise ValueError(f"hardware file {where}: [presets] has unknown {', '.join(unknown)}")
    if (span := given.get("dcp_span", SPANS[0])) not in SPANS:
        raise ValueError(f"hardware file {where}: dcp_span = {span!r}; use {' or '.join(SPANS)}")
    overlap = given.get("pp_overlap", 1)
    if not isinstance(overlap, int | float) or not 0 <= overlap <= 1:
        raise ValueError(f"hardware file {where}: pp_overlap = {overlap!r} must lie in 0 to 1")
    return given


def _constant(name: str, fields: Mapping[str, Any], where: str) -> Constant:
    unit = CONSTANTS[name][0]
    allowed = set(Constant.__dataclass_fields__)
    if not isinstance(fields, dict) or not {"value", "unit", "source", "status"} <= set(fields):
        raise ValueError(
            f"hardware file {where}: [constants.{name}] needs value, unit, source and status"
        )
    if unknown := sorted(set(fields) - allowed):
        raise ValueError(f"hardware file {where}: [constants.{name}] has unknown {unknown}")
    if fields["unit"] != unit:
        raise ValueError(
            f'hardware file {where}: [constants.{name}] has unit "{fields["unit"]}", and it is '
            f'read in "{unit}" (GiB are 2**30 bytes, GB are 10**9); convert its value'
        )
    if fields["status"] not in STATUSES:
        raise ValueError(
            f'hardware file {where}: [constants.{name}] has status "{fields["status"]}"; use one '
            f"of {', '.join(STATUSES)}"
        )
    constant = Constant(**fields)
    _check_range(name, constant, f"hardware file {where}")
    return constant


def _check_range(name: str, constant: Constant, where: str) -> None:
    unit = CONSTANTS[name][0]
    numbers = [constant.value, constant.low, constant.high]
    positive = unit in ("count", "ratio", "GB/s", "TFLOP/s") or name == "usable_memory"
    for number in (n for n in numbers if n is not None):
        if isinstance(number, bool) or not isinstance(number, int | float):
            raise ValueError(f"{where}: {name} has {number!r}, which is no number")
        if not math.isfinite(number) or number < 0 or (positive and number == 0):
            kind = "positive" if positive else "zero or more"
            raise ValueError(f"{where}: {name} = {number:g} {unit} must be {kind}")
    largest = max(n for n in numbers if n is not None)
    if unit == "ratio" and largest > 1:
        raise ValueError(f"{where}: {name} = {largest:g} is a part of the peak, at most 1")
    if unit == "count" and constant.value != int(constant.value):
        raise ValueError(f"{where}: {name} = {constant.value:g} must be whole")
    low = constant.value if constant.low is None else constant.low
    high = constant.value if constant.high is None else constant.high
    if not low <= constant.value <= high:
        raise ValueError(
            f"{where}: {name} = {constant.value:g} {unit} lies outside its own range "
            f"{low:g} to {high:g}"
        )
