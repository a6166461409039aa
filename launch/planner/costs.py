"""How long the parts of a decode step take on one machine: kernels, collectives, messages.

Every function is one line of arithmetic over constants of a hardware file. Times are seconds of
one rank, and ranks of a node work alike. Nothing here knows about layouts (layouts.py does).
"""

import math
from dataclasses import dataclass
from functools import lru_cache

from sglang_tknp.launch.planner.hardware import Hardware
from sglang_tknp.launch.planner.model import Layer, PlannedModel, Product


@dataclass(frozen=True, slots=True)
class Dense:
    """One layer's dense part, or several layers'. Seconds."""

    products: float = 0.0
    elementwise: float = 0.0
    allreduce: float = 0.0

    @property
    def seconds(self) -> float:
        return self.products + self.elementwise + self.allreduce

    def __add__(self, other: "Dense") -> "Dense":
        return Dense(
            self.products + other.products,
            self.elementwise + other.elementwise,
            self.allreduce + other.allreduce,
        )


class Costs:
    """The times of one model on one machine."""

    def __init__(self, model: PlannedModel, hardware: Hardware) -> None:
        self.model = model
        self.hardware = hardware
        # Looked up for every step of a simulation.
        self.halves = lru_cache(maxsize=65536)(self._halves)
        self._kinds = {layer: model.layers.count(layer) for layer in dict.fromkeys(model.layers)}

    def product(self, product: Product, rows: float, tp_size: int) -> float:
        """A product of `rows` tokens, its weights split over T ranks: bound by reading them, or
        by its 2 x rows x weights of FLOP (lecture, equation 3.6.2 and the ridge)."""
        hw, narrow = self.hardware, product.weight_bits <= 8
        efficiency = hw.gemm_efficiency_8bit if narrow else hw.gemm_efficiency_16bit
        # Ranks beyond the KV heads repeat K and V.
        kv_split = min(tp_size, self.model.num_kv_heads)
        part = (1 - product.kv_share) / tp_size + product.kv_share / kv_split
        reading = product.weight_bytes * part / (efficiency * hw.memory_bandwidth)
        flop = 2 * rows * product.rows * product.columns * part
        return hw.gemm_fixed + max(
            reading, flop / (hw.compute_8bit if narrow else hw.compute_16bit)
        )

    def elementwise(self, elements: float) -> float:
        """Norms and activations that read and write this many elements."""
        hw = self.hardware
        return hw.elementwise_fixed + elements * self.model.element_bytes / hw.elementwise_bandwidth

    def allreduce(self, message: float, ranks: int) -> float:
        """`message` bytes over the first `ranks` of the pool: inside a node while they fit."""
        hw = self.hardware
        if ranks == 1:
            return 0.0
        if ranks <= hw.node_size:
            return hw.node_allreduce_latency + message / hw.node_allreduce_bandwidth
        doublings = math.log2(ranks / hw.node_size)
        latency = hw.cross_allreduce_latency + hw.cross_allreduce_doubling * doublings
        return latency + message / hw.cross_allreduce_bandwidth

    def hidden_allreduce(self, rows: float, ranks: int) -> float:
        """Of the hidden states of `rows` tokens: [B, D] (paper, section 4.4)."""
        return self.allreduce(rows * self.model.hidden_size * self.model.element_bytes, ranks)

    def attention_half(self, layer: Layer, rows: float, tp_size: int) -> Dense:
        """Norm, QKV and output projection of `rows` tokens, with their all-reduce."""
        return Dense(
            products=sum(self.product(p, rows, tp_size) for p in layer.attention),
            elementwise=self.elementwise(2 * rows * self.model.hidden_size),
            allreduce=self.hidden_allreduce(rows, tp_size),
        )

    def mlp_half(self, layer: Layer, rows: float, tp_size: int) -> Dense:
        """Norm, MLP with its activation, and their all-reduce."""
        norm = self.elementwise(2 * rows * self.model.hidden_size)
        return self.mlp(layer, rows, tp_size) + Dense(elementwise=norm)

    def mlp(self, layer: Layer, rows: float, tp_size: int) -> Dense:
        """The MLP and its all-reduce, as the paper's figures 3 and 4 measure it."""
        width = self.model.inner_size * (3 if self.model.gated else 2) / tp_size
        return Dense(
            products=sum(self.product(p, rows, tp_size) for p in layer.mlp),
            elementwise=self.elementwise(rows * width),
            allreduce=self.hidden_allreduce(rows, tp_size),
        )

    def dense_layer(self, layer: Layer, rows: float, tp_size: int) -> Dense:
        return self.attention_half(layer, rows, tp_size) + self.mlp_half(layer, rows, tp_size)

    def dense(self, rows: float, tp_size: int) -> Dense:
        """All layers' dense parts."""
        return self.halves(rows, tp_size, rows, tp_size)

    def _halves(self, rows: float, tp_size: int, mlp_rows: float, mlp_tp_size: int) -> Dense:
        """The same, where attention's products and the MLP have different rows and ranks."""
        total = Dense()
        for layer, count in self._kinds.items():
            one = self.attention_half(layer, rows, tp_size)
            one += self.mlp_half(layer, mlp_rows, mlp_tp_size)
            total += Dense(count * one.products, count * one.elementwise, count * one.allreduce)
        return total

    def attention_rows(self, rows: float) -> float:
        """What one layer's attention costs beside reading KV; no rows, no kernel."""
        if not rows:
            return 0.0
        return self.hardware.attention_fixed + rows * self.hardware.attention_per_request

    def attention_token(self, tp_size: int) -> float:
        """Reading the KV of one context token of one layer, on one of T ranks."""
        row = self.model.kv_token_bytes(tp_size) / self.model.num_layers
        return row / (self.hardware.attention_efficiency * self.hardware.memory_bandwidth)

    def head(self, rows: float, tp_size: int) -> float:
        """Final norm and logits, the vocabulary split over T ranks."""
        model = self.model
        product = Product(
            rows=model.vocab_size,
            columns=model.hidden_size,
            weight_bytes=model.vocab_size * model.hidden_size * model.element_bytes,
            weight_bits=8 * model.element_bytes,
        )
        return self.product(product, rows, tp_size) + self.elementwise(2 * rows * model.hidden_size)

    def message(self, size: float) -> float:
        """One rank's `size` bytes to another node."""
        return self.hardware.message_latency + size / self.hardware.message_bandwidth
