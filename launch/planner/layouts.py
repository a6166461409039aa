"""The layouts that a pool of N nodes of T ranks can have: what each holds, and its step's time.

An **owner** is a set of ranks that holds whole requests: a node in TKNP, a replica in DP, the whole
pool in TP, PP and DCP. A layout says how many KV tokens each owner holds, which owners wait in one
queue, which step together, and how long a step takes.

A step's time is `fixed(rows)`, which no context changes, plus the largest of `lines(rows, tokens)`,
each of which grows linearly while the contexts grow. So a simulation can take many steps at once.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

from sglang_tknp.launch.planner.costs import Costs, Dense
from sglang_tknp.launch.planner.hardware import Hardware
from sglang_tknp.launch.planner.model import PlannedModel

Rows = tuple[int, ...]  # of every owner of a group, in order
# (seconds of the next step, how much longer each step after it is)
Line = tuple[float, float]
Terms = dict[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """What all layouts of a comparison share."""

    model: PlannedModel
    hardware: Hardware
    num_nodes: int
    node_memory: int  # for weights and KV, in bytes of one node's ranks together
    # KV tokens that a server's log named, by layout: they beat the estimate.
    measured: Mapping[str, int] = field(default_factory=dict)
    dcp_span: str = "node"  # where a DCP group's ranks lie: in one "node", or "cross" nodes
    pp_overlap: float = 1.0  # 0: one stage works at a time, 1: all do
    # Fields of compare.Scenario that the user has fixed: no scenario changes them.
    known: frozenset[str] = frozenset()

    @property
    def tp_size(self) -> int:
        return self.hardware.node_size

    @property
    def sharded_memory(self) -> int:
        """`node_memory` where a node holds a part of the layers only."""
        return self.node_memory + int(self.hardware.sharded_extra)


class Layout(ABC):
    """One layout of the pool.

    Attributes:
        weights: bytes that each node's ranks hold together, by node.
        capacity: KV tokens that each owner holds; 0 or less if the weights leave no room.
        queues: owners that wait in one queue, by queue.
        groups: owners that step together, by group.
        max_overtakes: how many later requests may pass one that waits.
        splits_requests: whether the server's --max-running-requests is for all owners together.
        uncertain: the fields of compare.Scenario that its time or room depends on.
    """

    name = ""
    title = ""
    max_overtakes = 0
    splits_requests = False
    uncertain: frozenset[str] = frozenset({"memory", "network"})

    def __init__(self, setting: Setting) -> None:
        self.setting = setting
        self.model = setting.model
        self.costs = Costs(setting.model, setting.hardware)
        self.num_layers = setting.model.num_layers
        self.tp_size = setting.tp_size
        self.num_nodes = setting.num_nodes
        self.num_ranks = setting.num_nodes * setting.tp_size
        self.weights, estimate = self.memory()
        known = setting.measured.get(self.name)
        self.capacity = estimate if known is None else (known,) * len(estimate)
        owners = tuple(range(len(self.capacity)))
        self.queues, self.groups = self.arrange(owners)
        self.fixed = lru_cache(maxsize=65536)(self._fixed_seconds)

    @abstractmethod
    def memory(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """`weights` and, as estimated, `capacity`."""

    def arrange(self, owners: Rows) -> tuple[tuple[Rows, ...], tuple[Rows, ...]]:
        """`queues` and `groups`: here one of all owners."""
        return (owners,), (owners,)

    @abstractmethod
    def fixed_terms(self, rows: Rows) -> Terms:
        """Seconds of a step that no context changes, by what takes them."""

    @abstractmethod
    def lines(self, rows: Rows, tokens: Sequence[float]) -> list[Line]:
        """What grows with the contexts: the largest counts.

        Args:
            rows, tokens: requests and context tokens of each owner of the group.
        """

    def _fixed_seconds(self, rows: Rows) -> float:
        return sum(self.fixed_terms(rows).values())

    def step_seconds(self, rows: Rows, tokens: Sequence[float]) -> float:
        return self.fixed(rows) + max(line[0] for line in self.lines(rows, tokens))

    def terms(self, rows: Rows, tokens: Sequence[float]) -> Terms:
        """A step's seconds by what takes them; they sum to `step_seconds`."""
        attention = max(line[0] for line in self.lines(rows, tokens))
        return {**self.fixed_terms(rows), "attention": attention}

    @property
    def kv_tokens(self) -> int:
        return sum(max(0, tokens) for tokens in self.capacity)

    def resident(self, tokens: int) -> tuple[int, ...]:
        """Requests of so many tokens, reserved whole, that every owner holds."""
        return tuple(max(0, held) // tokens for held in self.capacity)

    def running_limit(self, max_running_requests: int) -> int:
        """Of one owner: SGLang splits the server's limit over the nodes of attention DP."""
        owners = len(self.capacity) if self.splits_requests else 1
        return max(1, max_running_requests // owners)

    @property
    def fits(self) -> bool:
        return min(self.capacity) > 0

    @classmethod
    def why_not(cls, setting: Setting) -> str | None:
        """Why this pool cannot have the layout, whatever its memory; None if it can."""
        return None

    # What layouts have in common.

    def tokens_in(self, memory: float, tp_size: int) -> int:
        """KV tokens in the bytes of T ranks."""
        return int(memory // (self.model.kv_token_bytes(tp_size) * tp_size))

    def base_terms(self, rows: float, tp_size: int) -> Terms:
        """What every layout's step has, for its dense part of `rows` over T ranks."""
        return self.terms_of(self.costs.dense(rows, tp_size), self.costs.head(rows, tp_size), rows)

    def terms_of(self, dense: Dense, head: float, rows: float) -> Terms:
        hw = self.setting.hardware
        return {
            "dense": dense.products + head,
            "elementwise": dense.elementwise,
            "all-reduce": dense.allreduce,
            "step overhead": hw.step_overhead + rows * hw.row_overhead,
        }

    def attention_lines(
        self, rows: Rows, tokens: Sequence[float], token: float, layers: int
    ) -> list[Line]:
        """One line per owner: its rows' attention in `layers` layers, `token` seconds a token."""
        costs = self.costs
        return [
            (layers * (costs.attention_rows(b) + token * k), layers * token * b)
            for b, k in zip(rows, tokens, strict=True)
        ]
