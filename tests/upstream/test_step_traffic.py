"""Proves that traffic.py's bytes are those that the product's own decode step sends.

Whole steps run on recorded ranks (recorded_rank.py), and the bytes that their Exchange counts
are summed over the ranks.
"""

from collections.abc import Iterable

import pytest

from sglang_tknp.layout import OwnershipLayout
from sglang_tknp.traffic import RowSizes, step_traffic
from tests.metadata import metadata_bytes
from tests.upstream.recorded_rank import (
    BLOCKS,
    FLOAT,
    HIDDEN,
    VOCABULARY,
    K,
    Q,
    RecordedRank,
    Rows,
    run_steps,
)

pytestmark = pytest.mark.upstream

# Uneven rows, and owners without any at every place, the root's and the head's node included.
ROWS: list[Rows] = [
    (3, 2), (5, 1), (0, 2), (3, 0),
    (3, 2, 1), (1, 4, 2), (0, 2, 3), (3, 0, 1), (3, 2, 0), (0, 0, 4), (5, 0, 0),
]  # fmt: skip


def sent_bytes(ranks: Iterable[RecordedRank]) -> dict[str, int]:
    """By kind, of all these ranks together."""
    stats = [rank.exchange.stats for rank in ranks]
    return {kind: sum(found[kind].bytes for found in stats) for kind in stats[0]}


@pytest.mark.parametrize("tp_size", [1, 2])
@pytest.mark.parametrize("rows", ROWS)
def test_a_decode_step_sends_the_planned_bytes(rows: Rows, tp_size: int) -> None:
    sizes = RowSizes(
        q_size=Q,
        kv_size=K,
        hidden_size=HIDDEN,  # odd: two ranks' parts of a handoff differ
        head_width=VOCABULARY,
        element_bytes=FLOAT.itemsize,
        tp_size=tp_size,
    )
    plan = step_traffic(OwnershipLayout(rows=rows), BLOCKS[: len(rows)], sizes)
    ranks = run_steps([rows], tp_size=tp_size)
    found = sent_bytes(rank for (_, tp_rank), rank in ranks.items() if tp_rank == 0)
    assert found["scatter"] + found["gather"] == plan.exchange
    assert found["handoff"] == plan.handoffs
    assert found["logits"] == sum(plan.logits)
    assert found["metadata"] == plan.inputs
    assert sum(found.values()) == plan.peer_group
    assert sum(sent_bytes(ranks.values()).values()) == plan.pool


@pytest.mark.parametrize("rows", [(3, 2), (0, 2, 3)])
def test_every_owners_messages_are_the_planned_ones(rows: Rows) -> None:
    """What one root sends to, and gets from, each owner; the logits too."""
    sizes = RowSizes(
        q_size=Q, kv_size=K, hidden_size=HIDDEN, head_width=VOCABULARY, element_bytes=4, tp_size=1
    )
    plan = step_traffic(OwnershipLayout(rows=rows), BLOCKS[: len(rows)], sizes)
    ranks = run_steps([rows])
    head = len(rows) - 1
    for (node, _), rank in ranks.items():
        messages = [m for op in rank.rec.ops for m in op.messages if m.verb == "send"]
        sent = {
            (kind, to): {m.num_bytes for m in messages if (m.kind, m.peer[0]) == (kind, to)}
            for kind in ("scatter", "gather", "logits")
            for to in range(len(rows))
            if to != node
        }
        for to in (n for n in range(len(rows)) if n != node):
            assert sent["scatter", to] == {plan.qkv[to]} - {0}
            assert sent["gather", to] == {plan.output[node]} - {0}
            assert sent["logits", to] == ({plan.logits[to]} - {0} if node == head else set())


@pytest.mark.parametrize("slots", [False, True])
@pytest.mark.parametrize(("num_nodes", "owner"), [(2, 0), (2, 1), (3, 0), (3, 1), (3, 2)])
def test_one_request_sends_the_metadata_that_serve_tests_expect(
    num_nodes: int, owner: int, slots: bool
) -> None:
    """Two chunks of a prompt and three decode steps, on slots with a row on every node."""
    chunks, decode = (5, 2), 3

    def alone(rows: int) -> Rows:
        return tuple(rows * (node == owner) for node in range(num_nodes))

    ran = [run_steps([alone(rows)], rounds=[alone(1)]) for rows in chunks]
    decoding = (1,) * num_nodes if slots else alone(1)
    ran.append(run_steps([decoding] * decode))
    all_rows = sum(chunks) + decode * sum(decoding)
    for node in range(num_nodes):
        sent = sum(ranks[node, 0].exchange.stats["metadata"].bytes for ranks in ran)
        assert sent == metadata_bytes(
            node,
            owner,
            num_nodes,
            own_rows=sum(chunks) * (node == owner) + decode * decoding[node],
            all_rows=all_rows,
            prompt_steps=len(chunks),
        )
