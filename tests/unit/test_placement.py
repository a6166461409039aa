"""Proves that layer blocks are the most even ones, by brute force, and that bad ones are refused.

Also the start-up table, the tied head's second copy, and that a large model is placed at once.
"""

import re
import time
from itertools import combinations, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_tknp.placement import (
    ModelBytes,
    Placement,
    balance,
    format_table,
    human,
    parse_layer_blocks,
    place,
)

SIZES = st.integers(0, 40)


def model_of(
    *layers: int, embedding: int = 0, final_norm: int = 0, head: int = 0, tied: bool = False
) -> ModelBytes:
    return ModelBytes(
        embedding=embedding, layers=layers, final_norm=final_norm, head=head, tied=tied
    )


@st.composite
def models(draw: st.DrawFn) -> ModelBytes:
    tied = draw(st.booleans())
    return model_of(
        *draw(st.lists(SIZES, min_size=1, max_size=8)),
        embedding=draw(SIZES),
        final_norm=draw(st.integers(0, 3)),
        head=0 if tied else draw(SIZES),
        tied=tied,
    )


def brute_force(model: ModelBytes, num_nodes: int) -> tuple[int, ...]:
    """The blocks with the smallest (largest node, sum of squares), more layers first on ties."""

    def rank(blocks: tuple[int, ...]) -> tuple[int, int, list[int]]:
        sizes = node_bytes(model, blocks)
        return max(sizes), sum(size * size for size in sizes), [-block for block in blocks]

    count = len(model.layers)
    cuts = combinations(range(1, count), num_nodes - 1)
    return min((tuple(b - a for a, b in pairwise((0, *cut, count))) for cut in cuts), key=rank)


def node_bytes(model: ModelBytes, blocks: tuple[int, ...]) -> list[int]:
    layers = list(model.layers)
    sizes = []
    for block in blocks:
        sizes.append(sum(layers[:block]))
        layers = layers[block:]
    sizes[0] += model.embedding
    sizes[-1] += model.final_norm + (model.embedding if model.tied else model.head)
    return sizes


@given(model=models(), num_nodes=st.integers(1, 4))
def test_balance_equals_brute_force(model: ModelBytes, num_nodes: int) -> None:
    num_nodes = min(num_nodes, len(model.layers))
    found = balance(model, num_nodes)
    assert found.blocks == brute_force(model, num_nodes)
    assert list(found.node_bytes) == node_bytes(model, found.blocks)
    assert min(found.blocks) >= 1
    assert found.num_layers == len(model.layers)


@given(
    layers=st.lists(st.integers(10, 100), min_size=4, max_size=30),
    ends=st.tuples(st.integers(0, 5), st.integers(0, 5)),
    num_nodes=st.integers(1, 4),
)
def test_largest_node_exceeds_the_mean_by_at_most_one_layer(
    layers: list[int], ends: tuple[int, int], num_nodes: int
) -> None:
    model = model_of(*layers, embedding=ends[0], head=ends[1])
    found = balance(model, num_nodes)
    mean = sum(found.node_bytes) / num_nodes
    assert max(found.node_bytes) <= mean + max(layers)


def test_the_largest_node_comes_before_the_sum_of_squares() -> None:
    # (2, 1, 2) gives 2, 3 and 6: a smaller sum of squares, and a larger largest node.
    assert balance(model_of(1, 1, 3, 5, 1), 3).node_bytes == (5, 5, 1)


def test_endpoints_move_the_boundaries() -> None:
    assert balance(model_of(*[10] * 8), 2).blocks == (4, 4)
    assert balance(model_of(*[10] * 8, embedding=40), 2).blocks == (2, 6)
    assert balance(model_of(*[10] * 8, head=30, final_norm=10), 2).blocks == (6, 2)


def test_mixed_precision_layers_count_as_stored() -> None:
    found = balance(model_of(40, 10, 10, 10, 10), 2)
    assert (found.blocks, found.node_bytes) == ((1, 4), (40, 40))


def test_a_huge_embedding_still_leaves_a_layer_on_every_node() -> None:
    assert balance(model_of(1, 1, 1, 1, embedding=1000, tied=True), 3).blocks == (1, 2, 1)


def test_ties_go_to_earlier_nodes() -> None:
    assert balance(model_of(*[10] * 30), 4).blocks == (8, 8, 7, 7)


def test_a_tied_head_is_a_second_copy_on_the_last_node() -> None:
    model = model_of(10, 10, embedding=100, final_norm=1, tied=True)
    assert place(model, (1, 1)).node_bytes == (110, 111)
    assert model.last_node_extra == 101
    assert model.one_copy == 121  # the copy is TKNP's, not the model's
    untied = model_of(10, 10, embedding=100, final_norm=1, head=70)
    assert place(untied, (1, 1)).node_bytes == (110, 81)
    assert untied.one_copy == 191


def test_one_node_holds_both_ends() -> None:
    found = balance(model_of(10, 10, embedding=5, final_norm=1, head=7), 1)
    assert (found.blocks, found.node_bytes) == ((2,), (33,))


def test_more_nodes_than_layers_are_refused() -> None:
    message = (
        "--attn-dp-size=3 is more than the model's 2 layers, and every node holds at least one; "
        "use at most 2"
    )
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        balance(model_of(1, 1), 3)


def test_layer_blocks_for_more_nodes_than_layers_are_refused() -> None:
    with pytest.raises(ValueError, match=r"^--attn-dp-size=3 is more than the model's 2 layers"):
        parse_layer_blocks("1,1,1", 2, 3)


@pytest.mark.parametrize("blocks", [(1, 1), (2, 2), (3, 0)])
def test_blocks_that_are_not_the_models_layers_are_our_bug(blocks: tuple[int, ...]) -> None:
    with pytest.raises(AssertionError):
        place(model_of(1, 1, 1), blocks)


def test_llama_405b_on_eight_nodes_is_placed_at_once() -> None:
    layer, ends = 6_374_000_000, 4_202_000_000
    model = model_of(*[layer] * 126, embedding=ends, head=ends, final_norm=32768)
    begin = time.perf_counter()
    found = balance(model, 8)
    assert time.perf_counter() - begin < 2
    assert sum(found.blocks) == 126
    assert set(found.blocks) == {15, 16}
    assert max(found.node_bytes) == 16 * layer  # 126 layers on 8 nodes: some node has 16
    assert (found.blocks[0], found.blocks[-1]) == (15, 15)  # the ends weigh two thirds of a layer


def test_bounds_blocks_and_layers_agree() -> None:
    found = Placement(blocks=(2, 1, 3), node_bytes=(0, 0, 0))
    assert (found.num_nodes, found.num_layers) == (3, 6)
    assert found.bounds == ((0, 2), (2, 3), (3, 6))
    assert [list(found.block(node)) for node in range(3)] == [[0, 1], [2], [3, 4, 5]]
    assert [list(found.block(node)) for node in range(3)] == [[0, 1], [2], [3, 4, 5]]


@pytest.mark.parametrize(
    ("text", "layers", "nodes", "blocks"),
    [("16,14", 30, 2, (16, 14)), (" 1 , 2,3", 6, 3, (1, 2, 3)), ("5", 5, 1, (5,))],
)
def test_layer_blocks_are_read(text: str, layers: int, nodes: int, blocks: tuple[int, ...]) -> None:
    assert parse_layer_blocks(text, layers, nodes) == blocks


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("16,x", "must be whole numbers between commas"),
        ("", "must be whole numbers between commas"),
        ("16;14", "must be whole numbers between commas"),
        ("15.0,15", "must be whole numbers between commas"),
        ("10,10,10", "names 3 blocks for 2 nodes (--attn-dp-size)"),
        ("30", "names 1 blocks for 2 nodes (--attn-dp-size)"),
        ("30,0", "leaves a node without layers, and every node holds at least one"),
        ("31,-1", "leaves a node without layers, and every node holds at least one"),
        ("16,13", "sums to 29, and the model has 30 layers"),
        ("16,15", "sums to 31, and the model has 30 layers"),
    ],
)
def test_bad_layer_blocks_are_refused(text: str, problem: str) -> None:
    advice = 'for 30 layers on 2 nodes use for example "15,15"'
    message = f'--tknp-layer-blocks="{text}" {problem}; {advice}'
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        parse_layer_blocks(text, 30, 2)


def test_the_suggested_layer_blocks_are_good() -> None:
    for layers, nodes in [(30, 4), (7, 7), (126, 8)]:
        with pytest.raises(ValueError, match="use for example") as refused:
            parse_layer_blocks("no", layers, nodes)
        suggested = str(refused.value).rsplit('"', 2)[1]
        assert len(parse_layer_blocks(suggested, layers, nodes)) == nodes


def test_the_table_shows_layers_bytes_and_share() -> None:
    model = model_of(1024, 1024, 2048, embedding=1024, final_norm=0, tied=True)
    lines = format_table(place(model, (2, 1)), model).splitlines()
    *table, tied = lines
    assert [line.split() for line in table] == [
        ["node", "layers", "weights", "share"],
        ["0", "0-1", "3.0", "KiB", "60.0%"],
        ["1", "2-2", "3.0", "KiB", "60.0%"],
    ]
    assert len({len(line) for line in table}) == 1  # columns are aligned
    assert tied == (
        "the last node's head is a copy of the tied embedding, 1.0 KiB: the shares of one copy "
        "sum to 120.0%"
    )


def test_the_table_shows_each_nodes_kv_tokens() -> None:
    model = model_of(1, 1)
    lines = format_table(place(model, (1, 1)), model, [1000, 77]).splitlines()
    assert [line.split()[-1] for line in lines] == ["tokens", "1000", "77"]


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (1536 << 10, "1.5 MiB"),
        (5 << 30, "5.00 GiB"),
        (3 << 40, "3072.00 GiB"),
    ],
)
def test_sizes_are_written_for_people(size: int, text: str) -> None:
    assert human(size) == text
