"""TKNP's layouts, single copy and dual active root (paper, sections 4.1 to 4.5).

Weights, rows and bytes come from the product's own placement, layout and traffic.
"""

from collections.abc import Sequence
from functools import lru_cache

from sglang_tknp.config import DEFAULT_MAX_OVERTAKES
from sglang_tknp.launch.planner.layouts import Layout, Line, Rows, Setting, Terms
from sglang_tknp.layout import OwnershipLayout
from sglang_tknp.placement import Placement, balance
from sglang_tknp.traffic import RowSizes, StepTraffic, step_traffic

# The same for every scenario and context of a plan.
_balanced = lru_cache(maxsize=64)(balance)


class Tknp(Layout):
    """One copy over the nodes in layer blocks; every node owns requests."""

    name = "tknp"
    title = "TKNP"
    max_overtakes = DEFAULT_MAX_OVERTAKES
    splits_requests = True

    placement: Placement

    @classmethod
    def why_not(cls, setting: Setting) -> str | None:
        if setting.num_nodes < 2:
            return "TKNP needs 2 nodes or more"
        if setting.num_nodes > setting.model.num_layers:
            return f"the model has only {setting.model.num_layers} layers"
        if setting.model.num_heads % setting.tp_size:
            return f"{setting.model.num_heads} heads do not divide over {setting.tp_size} ranks"
        return None

    def memory(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        self.placement = _balanced(self.model.sizes, self.num_nodes)
        weights = self.node_weights()
        room = [self.setting.sharded_memory - held for held in weights]
        return weights, tuple(self.tokens_in(left, self.tp_size) for left in room)

    def node_weights(self) -> tuple[int, ...]:
        return self.placement.node_bytes

    def traffic(self, rows: Rows) -> StepTraffic:
        """What one decode step sends, by the product's own rules."""
        model, tp = self.model, self.tp_size
        sizes = RowSizes(
            q_size=model.num_heads * model.head_dim // tp,
            kv_size=model.kv_heads_per_rank(tp) * model.head_dim,
            hidden_size=model.hidden_size,
            head_width=-(-model.vocab_size // tp),
            element_bytes=model.element_bytes,
            tp_size=tp,
        )
        return step_traffic(OwnershipLayout.of(rows), self.placement.blocks, sizes)

    def exchange_seconds(self, rows: Rows) -> float:
        """Scatter and gather of all layers. A root that owns all rows exchanges nothing."""
        hw, traffic = self.setting.hardware, self.traffic(rows)
        exchanging = sum(
            layers
            for layers, size in zip(self.placement.blocks, traffic.layer, strict=True)
            if size
        )
        return 2 * exchanging * hw.exchange_latency + traffic.exchange / hw.message_bandwidth

    def handoff_seconds(self, rows: Rows) -> float:
        """Handoffs, ids and positions before them, logits after them."""
        costs, traffic = self.costs, self.traffic(rows)
        handoffs = (self.num_nodes - 1) * costs.message(traffic.handoff + traffic.positions)
        return handoffs + costs.message(sum(traffic.logits)) + costs.message(traffic.inputs)

    def fixed_terms(self, rows: Rows) -> Terms:
        return {
            **self.base_terms(sum(rows), self.tp_size),
            "exchange": self.exchange_seconds(rows),
            "handoff": self.handoff_seconds(rows),
        }

    def lines(self, rows: Rows, tokens: Sequence[float]) -> list[Line]:
        """The slowest owner decides: nodes step together."""
        token = self.costs.attention_token(self.tp_size)
        return self.attention_lines(rows, tokens, token, self.num_layers)


class TknpDualRoot(Tknp):
    """Two copies, two microbatches, two active roots (paper, section 4.5): an upper bound.

    One microbatch's dense part hides behind the other's attention, and nothing is lost to
    scheduling. Attention never hides behind attention: owners do one after the other.
    """

    name = "tknp-dual"
    title = "TKNP dual root"

    @classmethod
    def why_not(cls, setting: Setting) -> str | None:
        if setting.num_nodes % 2:
            return f"two roots need an even number of nodes, not {setting.num_nodes}"
        return super().why_not(setting)

    def node_weights(self) -> tuple[int, ...]:
        """Block b lies on nodes b and (b + N/2) mod N."""
        half = self.num_nodes // 2
        first = self.placement.node_bytes
        return tuple(size + first[node - half] for node, size in enumerate(first))

    def microbatches(self, rows: Rows) -> tuple[Rows, Rows]:
        """Every owner's rows in two halves, the odd ones by turns."""
        first = tuple((n + owner % 2) // 2 for owner, n in enumerate(rows))
        return first, tuple(n - half for n, half in zip(rows, first, strict=True))

    def fixed_terms(self, rows: Rows) -> Terms:
        """Only what does not overlap; the dense part is in `lines`."""
        halves = self.microbatches(rows)
        larger = max(halves, key=sum)
        terms = self.base_terms(sum(larger), self.tp_size)
        return {
            "dense": self.costs.head(sum(larger), self.tp_size),
            "step overhead": terms["step overhead"],
            "handoff": self.handoff_seconds(larger),
        }

    def lines(self, rows: Rows, tokens: Sequence[float]) -> list[Line]:
        one, other, halves = self._attention(rows, tokens)
        return self._busy_owners(one, other) + [
            (start + self._root_seconds(half), growth)
            for half, attention in zip(halves, (one, other), strict=True)
            if sum(half)
            for start, growth in attention
        ]

    def terms(self, rows: Rows, tokens: Sequence[float]) -> Terms:
        """Attention, and what of the roots' dense part and exchange does not hide behind it."""
        one, other, _ = self._attention(rows, tokens)
        attention = max(line[0] for line in self._busy_owners(one, other))
        exposed = max(line[0] for line in self.lines(rows, tokens)) - attention
        return {**self.fixed_terms(rows), "attention": attention, "not hidden": exposed}

    def _attention(
        self, rows: Rows, tokens: Sequence[float]
    ) -> tuple[list[Line], list[Line], tuple[Rows, Rows]]:
        """Every owner's lines in the one microbatch, and in the other; both microbatches."""
        halves = self.microbatches(rows)
        token = self.costs.attention_token(self.tp_size)
        split = [
            [
                k * b / all_rows if all_rows else 0.0
                for b, k, all_rows in zip(half, tokens, rows, strict=True)
            ]
            for half in halves
        ]
        one, other = (
            self.attention_lines(half, part, token, self.num_layers)
            for half, part in zip(halves, split, strict=True)
        )
        return one, other, halves

    @staticmethod
    def _busy_owners(one: Sequence[Line], other: Sequence[Line]) -> list[Line]:
        """An owner attends one microbatch after the other."""
        return [(a + c, b + d) for (a, b), (c, d) in zip(one, other, strict=True)]

    def _root_seconds(self, rows: Rows) -> float:
        """What one microbatch cannot overlap with itself."""
        return self.costs.dense(sum(rows), self.tp_size).seconds + self.exchange_seconds(rows)
