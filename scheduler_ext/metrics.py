"""TKNP's Prometheus metrics, beside SGLang's own on /metrics (--enable-metrics)."""

import functools
import time
from typing import Any

from sglang_tknp.scheduler_ext.assigner import Assigner
from sglang_tknp.scheduler_ext.view import load_imbalance, owner_state

PERIOD = 1.0  # seconds between updates while the pool steps


class StepMetrics:
    """Counts a node's steps and what its first rank sends; one per process.

    Made after SGLang set metrics up. `step` is the rank's model_ext.step.Step.
    """

    def __init__(self, step: Any, node: int, kv_tokens: int, num_layers: int) -> None:
        # Here, not above: prometheus_client decides on its multiprocess mode when it is imported.
        from prometheus_client import Counter, Gauge

        def counter(name: str, text: str) -> Any:
            return Counter(f"sglang:tknp_exchange_{name}", text, ["node", "kind"])

        self.step = step
        self.node = str(node)
        self.bytes = counter("bytes", "Bytes that the first rank of a TKNP node sent to its peers")
        self.messages = counter("messages", "Messages that the first rank of a TKNP node sent")
        self.reported = dict.fromkeys(step.exchange.stats, (0, 0))
        text = (
            "Steps of a TKNP node: replayed on a captured layout, fallback (a decode step that no "
            "captured layout holds) or eager (any other)"
        )
        self.steps = Counter("sglang:tknp_steps", text, ["node", "path"])
        self.counted: dict[str, int] = {}
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
        step = self.step
        replayed = sum(step.replays.values())
        eager = step.num_steps - replayed - step.num_fallbacks
        paths = {"replayed": replayed, "fallback": step.num_fallbacks, "eager": eager}
        for path, number in paths.items():
            # A fallback is counted when it starts, so that its step may still be missing.
            new = max(0, number - self.counted.get(path, 0))
            self.steps.labels(self.node, path).inc(new)
            self.counted[path] = self.counted.get(path, 0) + new
        for kind, traffic in step.exchange.stats.items():
            num_messages, num_bytes = self.reported[kind]
            self.messages.labels(self.node, kind).inc(traffic.messages - num_messages)
            self.bytes.labels(self.node, kind).inc(traffic.bytes - num_bytes)
            self.reported[kind] = (traffic.messages, traffic.bytes)


@functools.cache
def refusal_counter() -> Any:
    """One per process; the tokenizer and the controller count into the same metric."""
    from prometheus_client import Counter

    text = "Requests that TKNP refused, by reason and the owner that they asked for"
    return Counter("sglang:tknp_refused_requests", text, ["reason", "owner"])


class ControllerMetrics:
    """What the controller knows of its owners; one per process."""

    GAUGES = (
        ("capacity_tokens", "KV tokens that an owner can hold"),
        ("reserved_tokens", "KV tokens reserved for requests at an owner"),
        ("used_tokens", "Context tokens of the requests that an owner holds"),
        ("running_requests", "Requests at an owner"),
        ("waiting_requests", "Requests in an owner's own queue, or waiting for this owner only"),
    )
    COUNTERS = (
        ("sent_requests", "Requests sent to an owner"),
        ("retractions", "Requests that an owner retracted under memory pressure"),
        ("ledger_drifts", "Differences between the ledger and an owner's report, healed"),
        ("overtakes", "Requests that reached an owner ahead of earlier ones that wanted it"),
    )

    def __init__(self, assigner: Assigner) -> None:
        from prometheus_client import Counter, Gauge, Histogram

        self.assigner = assigner
        self.due = 0.0
        self.owner_gauges = {
            name: Gauge(
                f"sglang:tknp_owner_{name}", text, ["owner"], multiprocess_mode="mostrecent"
            )
            for name, text in self.GAUGES
        }
        self.owner_counters = {
            name: Counter(f"sglang:tknp_owner_{name}", text, ["owner"])
            for name, text in self.COUNTERS
        }
        self.waiting = Gauge(
            "sglang:tknp_waiting_requests",
            "Requests that wait in the controller for an owner",
            multiprocess_mode="mostrecent",
        )
        self.imbalance = Gauge(
            "sglang:tknp_load_imbalance",
            "Largest load of an owner over the mean",
            multiprocess_mode="mostrecent",
        )
        self.prefix_hits = Counter(
            "sglang:tknp_prefix_hits", "Requests sent to an owner that holds their prefix"
        )
        self.refusals = refusal_counter()
        self.queue_time = Histogram(
            "sglang:tknp_queue_time_seconds",
            "Seconds that a request waited in the controller for its owner",
            ["owner"],
            buckets=(0.001, 0.01, 0.1, 0.5, 1, 2, 5, 10, 20, 50, 100, 200, 500),
        )
        self.counted: dict[Any, float] = {}

    def sent(self, owner: int, waited: float) -> None:
        self.queue_time.labels(str(owner)).observe(waited)

    def update_when_due(self, now: float) -> None:
        if now >= self.due:
            self.due = now + PERIOD
            self.update()

    def update(self) -> None:
        assigner = self.assigner
        for owner in range(len(assigner.sent)):
            state = owner_state(assigner, owner)
            label = str(owner)
            gauges = self.owner_gauges
            gauges["capacity_tokens"].labels(label).set(state["capacity"])
            gauges["reserved_tokens"].labels(label).set(state["reserved"])
            gauges["used_tokens"].labels(label).set(state["used"])
            running = max(0, state["requests"] - state["queued"])
            gauges["running_requests"].labels(label).set(running)
            gauges["waiting_requests"].labels(label).set(state["queued"] + state["waiting"])
            for name, field in (
                ("sent_requests", "sent"),
                ("retractions", "retractions"),
                ("ledger_drifts", "drifts"),
                ("overtakes", "overtakes"),
            ):
                self.count_up(self.owner_counters[name].labels(label), (name, owner), state[field])
        self.waiting.set(len(assigner.queue))
        self.imbalance.set(load_imbalance(assigner))
        self.count_up(self.prefix_hits, "prefix_hits", assigner.policy.prefix_hits)
        for key, number in assigner.refusals.items():
            self.count_up(self.refusals.labels(*key), key, number)

    def count_up(self, counter: Any, key: Any, total: float) -> None:
        """Bring a counter to a total that another object counts."""
        counter.inc(max(0, total - self.counted.get(key, 0)))
        self.counted[key] = total
