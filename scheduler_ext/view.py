"""The controller as seen from outside: its part of /server_info, and its log line. Pure."""

from collections import Counter
from typing import Any

from sglang_tknp.config import TknpConfig
from sglang_tknp.scheduler_ext.assigner import Assigner
from sglang_tknp.scheduler_ext.ledger import imbalance


def pool_state(assigner: Assigner, config: TknpConfig) -> dict[str, Any]:
    """For /server_info; `owners` is in order of nodes, tokens are KV tokens."""
    return {
        "policy": config.owner_policy,
        "expected_output_tokens": config.expected_output_tokens,
        "max_overtakes": config.max_overtakes,
        "prefix_slack": config.prefix_slack,
        "waiting": len(assigner.queue),
        "overtakes": sum(assigner.queue.overtakes),
        "load_imbalance": load_imbalance(assigner),
        "prefix_hits": assigner.policy.prefix_hits,
        "refusals": dict(by_reason(assigner.refusals)),
        "owners": [owner_state(assigner, owner) for owner in range(len(assigner.sent))],
    }


def by_reason(refusals: Counter[tuple[str, str]]) -> Counter[str]:
    """Refusals by their reason only."""
    found: Counter[str] = Counter()
    for (reason, _), number in refusals.items():
        found[reason] += number
    return found


def load_imbalance(assigner: Assigner) -> float:
    """Largest load of an owner over the mean, by the policy's load; 1 is perfect."""
    ledger = assigner.ledger
    return imbalance([ledger.load_of(owner) for owner in range(len(ledger.accounts))])


def owner_state(assigner: Assigner, owner: int) -> dict[str, int]:
    account = assigner.ledger.accounts[owner]
    return {
        "capacity": account.capacity,
        "page_size": account.page_size,
        "context_length": account.context_length,
        "reserved": account.reserved,
        "used": account.used,
        "requests": len(account.requests),
        "queued": account.waiting,
        "waiting": assigner.queue.waiting_for(owner),
        "sent": assigner.sent[owner],
        "overtakes": assigner.queue.overtakes[owner],
        "retractions": account.retractions,
        "drifts": assigner.drifts[owner],
    }


def waiting_line(assigner: Assigner, now: float) -> str:
    """One line on a queue that is not empty."""
    first = next(iter(assigner.queue))
    rooms = assigner.ledger.rooms
    owner = max(range(len(rooms)), key=rooms.__getitem__)
    return (
        f"TKNP: requests that wait for an owner: {len(assigner.queue)}; the first has waited "
        f"{now - first.arrived:.1f} s for {first.tokens} KV tokens, and the most room is "
        f"{max(rooms[owner], 0)} on node {owner}"
    )
