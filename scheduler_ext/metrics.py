"""TKNP's Prometheus metrics, beside SGLang's own on /metrics (--enable-metrics)."""

import time
from typing import Any

from sglang_tknp.exchange import Exchange

PERIOD = 1.0  # seconds between updates while the pool steps


class ExchangeMetrics:
    """Counts what the first rank of a node sends; one per process, after SGLang set metrics up."""

    def __init__(self, exchange: Exchange, node: int, kv_tokens: int, num_layers: int) -> None:
        # Here, not above: prometheus_client decides on its multiprocess mode when it is imported.
        from prometheus_client import Counter, Gauge

        def counter(name: str, text: str) -> Any:
            return Counter(f"sglang:tknp_exchange_{name}", text, ["node", "kind"])

        self.exchange = exchange
        self.node = str(node)
        self.bytes = counter("bytes", "Bytes that the first rank of a TKNP node sent to its peers")
        self.messages = counter("messages", "Messages that the first rank of a TKNP node sent")
        self.reported = dict.fromkeys(exchange.stats, (0, 0))
        self.due = 0.0
        for name, text, value in (
            ("kv_tokens", "KV tokens that a TKNP node can hold", kv_tokens),
            ("layers", "Layers whose weights a TKNP node holds", num_layers),
        ):
            gauge = Gauge(
                f"sglang:tknp_node_{name}", text, ["node"], multiprocess_mode="mostrecent"
            )
            gauge.labels(self.node).set(value)

    def update_when_due(self) -> None:
        """After a step; cheap."""
        now = time.monotonic()
        if now >= self.due:
            self.due = now + PERIOD
            self.update()

    def update(self) -> None:
        for kind, traffic in self.exchange.stats.items():
            num_messages, num_bytes = self.reported[kind]
            self.messages.labels(self.node, kind).inc(traffic.messages - num_messages)
            self.bytes.labels(self.node, kind).inc(traffic.bytes - num_bytes)
            self.reported[kind] = (traffic.messages, traffic.bytes)
