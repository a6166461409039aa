"""At the tokenizer: what the pool could never hold is refused before it is sent.

The controller refuses it too, but its answer comes when a stream's HTTP status is already on its
way. An error here is HTTP 400 for every kind of request.
"""

from collections import Counter
from http import HTTPStatus
from typing import Any

from sglang_tknp.scheduler_ext.admission import AdmissionSettings, RefusedError, admit
from sglang_tknp.scheduler_ext.assigner import refusal_key
from sglang_tknp.scheduler_ext.ledger import Ledger
from sglang_tknp.scheduler_ext.messages import Header, Report
from sglang_tknp.scheduler_ext.view import by_reason


class Gate:
    """What the controller last told of the pool, and what was refused by it."""

    def __init__(self, settings: AdmissionSettings, metric: Any = None) -> None:
        """`metric`: counts refusals by reason, where metrics are on."""
        self.settings = settings
        self.metric = metric
        self.pool: dict[str, Any] | None = None
        self.empty: Ledger | None = None  # the pool's owners without any request
        self.refusals: Counter[tuple[str, str]] = Counter()  # by refusal_key

    def keep(self, pool: dict[str, Any]) -> None:
        """`pool`: view.pool_state, from the controller."""
        self.pool = pool
        self.empty = Ledger(len(pool["owners"]))
        for owner, state in enumerate(pool["owners"]):
            self.empty.apply(
                Report(
                    owner=owner,
                    epoch=1,
                    seq=1,
                    capacity=state["capacity"],
                    max_requests=1,
                    page_size=state["page_size"],
                    context_length=state["context_length"],
                    received=0,
                    used=0,
                    waiting=0,
                )
            )

    def check(self, header: Header) -> None:
        """Raise ValueError, HTTP 400 in SGLang, for what no owner could ever hold."""
        if self.empty is None:
            return
        try:
            admit(header, None, 0.0, self.empty, self.settings)
        except RefusedError as refused:
            if refused.status != HTTPStatus.BAD_REQUEST:
                return  # the controller knows better who serves by now
            key = refusal_key(refused.kind, header.routed_dp_rank)
            self.refusals[key] += 1
            if self.metric is not None:
                self.metric.labels(*key).inc()
            raise ValueError(str(refused)) from None

    def add_to(self, states: list[dict[str, Any]]) -> None:
        """Add the ledger to what the nodes tell for /server_info."""
        if self.pool is None:
            return
        pool = {key: value for key, value in self.pool.items() if key != "owners"}
        pool["refusals"] = dict(Counter(pool["refusals"]) + by_reason(self.refusals))
        for state in states:
            tknp = state["tknp"]
            tknp["ledger"] = self.pool["owners"][tknp["node"]]
            tknp["controller"] = pool
