"""Optional check X1: the step model against measured steps of another engine on real H100.

`aiconfigurator-core` (NVIDIA, Apache-2.0) carries rows that servers were measured with. Those of
Llama 3.1 70B in FP8 on vLLM, TP 2, 4 and 8, with 1,024 input and 8,192 output tokens are decode
almost alone. Nothing of this model was fitted to them. Its kernel tables, from which h100-sxm's
constants are, are another part of the package.
"""

import csv
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib import metadata, util
from pathlib import Path

from sglang_tknp.launch.model_source import find_model, quantize
from sglang_tknp.launch.planner.costs import Costs
from sglang_tknp.launch.planner.hardware import Hardware, load
from sglang_tknp.launch.planner.model import planned
from sglang_tknp.launch.planner.paper_pools import attention_seconds

PACKAGE, MODULE, VERSION = "aiconfigurator-core", "aiconfigurator_core", "0.12.0"
INSTALL = f'pip install "sglang-tknp[validate]" (or pip install --no-deps {PACKAGE}=={VERSION})'
TOLERANCE = 0.10  # mean absolute error, relative
MODEL = "llama-3.1-70b"  # with all projections in FP8, as engines quantise it on load
WANTED = {
    "backend": "vllm",
    "model_path": "meta-llama/Llama-3.1-70B",
    "system": "h100_sxm",
    "precision": "fp8",
    "mode": "agg",
    "isl": "1024",
    "osl": "8192",
    "pp_size": "1",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A measured server; times in seconds per output token."""

    tp_size: int
    batch: int  # requests in flight
    context: float  # tokens of a request, on average over its decode
    measured: float
    predicted: float

    @property
    def error(self) -> float:
        """Relative; above 0: the model is too slow."""
        return self.predicted / self.measured - 1


def compare(hardware: Hardware | None = None, table: Path | None = None) -> list[Row]:
    """Every wanted row of the installed package's table beside the model's step.

    Raises:
        ModuleNotFoundError: the package is not there; the message says how to install it.
        ValueError: it is another version, or its table lacks the rows.
    """
    table = table or _installed_table()
    model = planned(quantize(find_model(MODEL), "fp8"))
    costs = Costs(model, hardware or load("h100-sxm"))
    with table.open(newline="") as stream:
        rows = [_row(row, costs) for row in csv.DictReader(stream) if _wanted(row)]
    if not rows:
        raise ValueError(f"{table.name} has no rows of {WANTED['model_path']} as {WANTED}")
    return sorted(rows, key=lambda row: (row.tp_size, row.batch))


def mean_error(rows: Iterable[Row]) -> float:
    """Mean absolute error, relative (MAPE)."""
    errors = [abs(row.error) for row in rows]
    return sum(errors) / len(errors)


def _installed_table() -> Path:
    found = util.find_spec(MODULE)
    if found is None or found.origin is None:
        raise ModuleNotFoundError(f"X1 needs {PACKAGE}, which is not installed: {INSTALL}")
    if (version := metadata.version(PACKAGE)) != VERSION:
        raise ValueError(f"X1 is pinned to {PACKAGE} {VERSION}, and {version} is here: {INSTALL}")
    return Path(found.origin).parent / "systems" / "silicon_sample.csv"


def _wanted(row: Mapping[str, str]) -> bool:
    return all(row[name] == value for name, value in WANTED.items())


def _row(row: Mapping[str, str], costs: Costs) -> Row:
    tp_size, batch = int(row["tp_size"]), int(row["batch_size"])
    context = int(row["isl"]) + int(row["osl"]) / 2
    return Row(
        tp_size=tp_size,
        batch=batch,
        context=context,
        measured=float(row["silicon_tpot_ms"]) * 1e-3,
        predicted=step_seconds(costs, tp_size, batch, context),
    )


def step_seconds(costs: Costs, tp_size: int, batch: int, context: float) -> float:
    """A decode step of one replica on T ranks of one node."""
    attention = attention_seconds(costs, batch, context, tp_size)
    return (
        costs.hardware.step_overhead
        + costs.dense(batch, tp_size).seconds
        + costs.head(batch, tp_size)
        + costs.model.num_layers * attention
    )
