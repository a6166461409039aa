"""Proves that every refused setting is refused with its flag and reason, and its stock value not.

Also N from the flags, and layers and heads against nodes and ranks, message by message.
"""

import re
from types import SimpleNamespace
from typing import Any

import pytest

from sglang_tknp.refusals import REFUSALS, Refusal, check_heads, num_nodes_of, refused

# Issue A, "What must work", item 9: the settings that must be in the table.
PROMISED = {
    "--pp-size",
    "--dcp-size",
    "--attn-cp-size",
    "--ep-size",
    "--dp-size",
    "--speculative-algorithm",
    "--enable-lora",
    "--enable-two-batch-overlap",
    "--dwdp-size",
    "--enable-return-hidden-states",
    "--enable-hierarchical-cache",
}


def arguments(**changes: Any) -> SimpleNamespace:
    """ServerArgs with every setting of the table at its first stock value."""
    stock = {r.field: r.stock[0] if len(r.stock) else None for r in REFUSALS}
    return SimpleNamespace(**{**stock, **changes})


def other_value(refusal: Refusal) -> Any:
    """A value that a user could set and that is not stock."""
    if not refusal.stock:
        return "EAGLE"
    stock = refusal.stock[0]
    if isinstance(stock, bool):
        return not stock
    return {int: 2, list: ["adapter=/path"], str: "daemon"}[type(stock)]


def by_flag(refusal: Refusal) -> str:
    return refusal.flag


def test_stock_settings_are_served() -> None:
    assert refused(arguments()) is None
    assert refused(SimpleNamespace(**{r.field: None for r in REFUSALS})) is None


@pytest.mark.parametrize("refusal", REFUSALS, ids=by_flag)
def test_a_refused_setting_names_flag_value_reason_and_fix(refusal: Refusal) -> None:
    value = other_value(refusal)
    fix = refusal.fix or f"leave out {refusal.flag}, or --enable-tknp"
    assert refused(arguments(**{refusal.field: value})) == (
        f"{refusal.flag} ({value!r}) does not work with --enable-tknp: {refusal.reason}; {fix}"
    )


@pytest.mark.parametrize("refusal", REFUSALS, ids=by_flag)
def test_its_stock_values_are_served(refusal: Refusal) -> None:
    for value in (*refusal.stock, None):
        assert refused(arguments(**{refusal.field: value})) is None


def test_the_table_holds_what_was_promised_once() -> None:
    flags = [refusal.flag for refusal in REFUSALS]
    assert set(flags) >= PROMISED
    assert len(flags) == len(set(flags))
    for refusal in REFUSALS:
        assert refusal.flag == "--" + refusal.field.replace("_", "-")
        assert len(refusal.reason.split()) > 3


@pytest.mark.parametrize(
    ("tp_size", "attn_dp_size", "nnodes", "nodes"),
    [
        (2, 2, 1, 2),
        (8, 4, 1, 4),
        (8, 4, 2, 4),  # two nodes of TKNP on each host
        (8, 1, 2, 2),  # no --attn-dp-size: every host is a node
        (3, 1, 3, 3),
        (6, 3, 3, 3),
    ],
)
def test_the_number_of_nodes(tp_size: int, attn_dp_size: int, nnodes: int, nodes: int) -> None:
    assert num_nodes_of(tp_size, attn_dp_size, nnodes) == nodes


@pytest.mark.parametrize(
    ("tp_size", "attn_dp_size", "nnodes", "message"),
    [
        (
            4,
            1,
            1,
            "--enable-tknp needs two nodes or more, and --attn-dp-size=1 with --nnodes=1 gives 1: "
            "set --attn-dp-size N, N >= 2, and --tp-size to N times the ranks of a node",
        ),
        (
            5,
            2,
            1,
            "--tp-size=5 must be a multiple of the 2 nodes of --enable-tknp (--attn-dp-size): "
            "every node has --tp-size / --attn-dp-size ranks; use --tp-size 6",
        ),
        (
            1,
            1,
            3,
            "--tp-size=1 must be a multiple of the 3 nodes of --enable-tknp (--attn-dp-size): "
            "every node has --tp-size / --attn-dp-size ranks; use --tp-size 3",
        ),
        (
            6,
            3,
            2,
            "--attn-dp-size=3 must be a multiple of --nnodes=2: a node of TKNP lies on one host; "
            "use --attn-dp-size 2",
        ),
        (
            8,
            2,
            4,
            "--attn-dp-size=2 must be a multiple of --nnodes=4: a node of TKNP lies on one host; "
            "use --attn-dp-size 4",
        ),
    ],
)
def test_flags_that_give_no_pool(
    tp_size: int, attn_dp_size: int, nnodes: int, message: str
) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        num_nodes_of(tp_size, attn_dp_size, nnodes)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "layers", "nodes", "ranks"),
    [
        (9, 3, 30, 2, 1),
        (9, 3, 30, 2, 3),
        (8, 2, 4, 4, 2),  # as many nodes as layers
        (8, 2, 4, 2, 4),  # more ranks than KV heads: each is on two ranks
        (8, 2, 4, 2, 8),
        (8, 1, 4, 2, 8),  # multi-query attention
        (128, 8, 126, 8, 8),
        (12, 6, 4, 2, 3),
    ],
)
def test_heads_that_divide(heads: int, kv_heads: int, layers: int, nodes: int, ranks: int) -> None:
    check_heads(heads, kv_heads, layers, nodes, ranks)


@pytest.mark.parametrize(
    ("numbers", "message"),
    [
        (
            (8, 2, 4, 5, 1),
            "--attn-dp-size=5 is more than the model's 4 layers, and every node of TKNP holds at "
            "least one; use at most 4",
        ),
        (
            (9, 3, 30, 2, 2),
            "the model's 9 attention heads do not divide over the 2 ranks of a node (--tp-size / "
            "--attn-dp-size); use 1, 3, 9 ranks per node",
        ),
        (
            (8, 2, 4, 2, 3),
            "the model's 8 attention heads do not divide over the 3 ranks of a node (--tp-size / "
            "--attn-dp-size); use 1, 2, 4, 8 ranks per node",
        ),
        (
            (12, 3, 4, 2, 2),
            "the model's 3 KV heads and the 2 ranks of a node (--tp-size / --attn-dp-size) do not "
            "divide either way; use 1, 3 ranks per node",
        ),
        (
            (12, 4, 4, 2, 6),
            "the model's 4 KV heads and the 6 ranks of a node (--tp-size / --attn-dp-size) do not "
            "divide either way; use 1, 2, 4 ranks per node",
        ),
    ],
)
def test_heads_that_do_not_divide(numbers: tuple[int, ...], message: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        check_heads(*numbers)
