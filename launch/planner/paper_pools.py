"""The paper's pools and workloads (sections 5.1 to 5.4), simulated on one hardware file."""

from collections.abc import Callable, Iterable
from functools import lru_cache

from sglang_tknp.launch.model_source import find_model
from sglang_tknp.launch.planner import trace
from sglang_tknp.launch.planner.compare import build
from sglang_tknp.launch.planner.costs import Costs
from sglang_tknp.launch.planner.crossing import first_and_for_good
from sglang_tknp.launch.planner.hardware import GIB, Hardware
from sglang_tknp.launch.planner.layout_stock import Dp
from sglang_tknp.launch.planner.layouts import Setting
from sglang_tknp.launch.planner.metrics import Metrics, measure
from sglang_tknp.launch.planner.model import PlannedModel, planned
from sglang_tknp.launch.planner.simulate import Simulation
from sglang_tknp.launch.planner.trace import Arrival

LLAMA, NEMOTRON = "llama-3.1-405b-fp8", "nemotron-4-340b-fp8"
BATCHES = (4, 8, 16, 32, 64, 96, 128)  # of the paper's figures 8 to 11
# The paper claims its "up to" for "long-context, high-concurrency workloads".
LARGE = BATCHES[3:]
CONTEXTS = (32_768, 65_536, 98_304)
OUTPUT = 1024
SEEDS = range(1, 41)  # of arrivals
SLO = 0.1  # seconds per output token
TKNP_OVER_DP = 2.06  # what exchange_latency of the paper's hardware file is fitted to


@lru_cache(maxsize=8)
def _model(name: str) -> PlannedModel:
    return planned(find_model(name))


def paper_setting(hardware: Hardware, model: str = LLAMA, num_nodes: int = 4) -> Setting:
    """The paper's pool on this hardware, with the hardware file's presets."""
    presets = hardware.presets
    return Setting(
        model=_model(model),
        hardware=hardware,
        num_nodes=num_nodes,
        node_memory=int(hardware.usable_memory) * hardware.node_size,
        dcp_span=str(presets.get("dcp_span", "node")),
        pp_overlap=float(presets.get("pp_overlap", 1.0)),
    )


def check_paper_pool(hardware: Hardware) -> None:
    """Raise ValueError for hardware that cannot be the paper's: its models on 8 GPUs a node."""
    if hardware.node_size != 8 or not Dp(paper_setting(hardware)).fits:
        raise ValueError(
            f"--hardware={hardware.name}: the paper's pools are nodes of 8 GPUs that hold Llama "
            f"3.1 405B in FP8, and this file has {hardware.node_size} per node with "
            f"{hardware.usable_memory / GIB:.4g} GiB each; use h100-paper, h100-sxm or h200-sxm"
        )


def attention_seconds(costs: Costs, rows: int, context: float, tp_size: int) -> float:
    """One layer's attention, every row with the same context."""
    return costs.attention_rows(rows) + rows * context * costs.attention_token(tp_size)


def mean(values: Iterable[float | None]) -> float:
    found = [value or 0.0 for value in values]
    return sum(found) / len(found)


class Pools:
    """The paper's pools on one hardware file; simulates each workload once."""

    def __init__(self, hardware: Hardware) -> None:
        self.hardware = hardware
        self.run = lru_cache(maxsize=None)(self._run)

    def model(self, name: str) -> PlannedModel:
        return _model(name)

    def setting(self, model: str, nodes: int) -> Setting:
        return paper_setting(self.hardware, model, nodes)

    def _run(self, layout: str, model: str, nodes: int, requests: tuple[Arrival, ...]) -> Metrics:
        built = build(layout, self.setting(model, nodes))
        return measure(Simulation(built, requests).simulate(), SLO)

    def throughput(
        self, layout: str, nodes: int, batch: int, context: int, model: str = LLAMA
    ) -> float:
        requests = tuple(trace.fixed(batch, context, OUTPUT))
        return self.run(layout, model, nodes, requests).throughput

    def ratio(
        self, one: str, other: str, nodes: int, batch: int, context: int, model: str = LLAMA
    ) -> float:
        return self.throughput(one, nodes, batch, context, model) / self.throughput(
            other, nodes, batch, context, model
        )

    def best_ratio(
        self, one: str, other: str, nodes: int, context: int, model: str = LLAMA
    ) -> float:
        """At best, over the large batches."""
        return max(self.ratio(one, other, nodes, batch, context, model) for batch in LARGE)

    def tknp_over_dp(self) -> float:
        """Figure 8's best ratio, over its three contexts."""
        return max(self.best_ratio("tknp", "dp", 4, context) for context in CONTEXTS)

    def mixed(self, layout: str, rate: float | None, seed: int = 0) -> Metrics:
        requests = trace.paper_mixed(OUTPUT, seed)
        if rate is not None:
            requests = trace.poisson(requests, rate, seed)
        return self.run(layout, LLAMA, 4, tuple(requests))

    def crossover(self, context: int) -> int | None:
        """The batch from which TKNP is ahead of DP for good, of multiples of 4 up to 128."""
        batches = range(4, 129, 4)
        ahead = [self.ratio("tknp", "dp", 4, batch, context) > 1 for batch in batches]
        _, good = first_and_for_good(ahead)
        return None if good is None else batches[good]


def fit_exchange_latency(hardware: Hardware, target: float = TKNP_OVER_DP) -> float:
    """The exchange latency, in us, that gives the published TKNP/DP. Raises ValueError if none."""
    low, high = 0.0, 1000.0
    ratio = _ratio_at(hardware)
    if not ratio(high) < target < ratio(low):
        raise ValueError(f"no exchange latency up to {high:g} us gives TKNP/DP = {target:g}")
    while high - low > 0.005:
        middle = (low + high) / 2
        low, high = (middle, high) if ratio(middle) > target else (low, middle)
    return round(low, 1)


def _ratio_at(hardware: Hardware) -> Callable[[float], float]:
    return lambda us: Pools(hardware.with_values("fit", exchange_latency=us)).tknp_over_dp()
