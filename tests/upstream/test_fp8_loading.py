"""Proves that two nodes hold exactly one copy of an FP8 checkpoint, and compute with it.

Two real processes load every case through TKNP's hook, on SGLang's own groups over gloo. What a
node holds are the stored bytes of its block, and the few bytes that SGLang adds.
"""

from pathlib import Path
from typing import Any

import pytest

from tests.gloo.harness import run_ranks
from tests.tiny import SHAPE, make_tiny
from tests.tiny_fp8 import FORMATS, kv_scale, make_tiny_fp8
from tests.upstream.fp8_loading import NUM_NODES, Case, load_all

pytestmark = [pytest.mark.upstream, pytest.mark.filterwarnings("ignore")]

LAYERS = SHAPE["num_hidden_layers"]
FUSED = 4  # matrices of a layer as SGLang holds them: QKV, O, gate and up, down
KV_SCALES = 8  # bytes: SGLang gives each attention two float32 under "fp8", stored or not
WITH_KV_SCALES = ("fp8-tensor", "compressed-channel")


def cases(folder: Path) -> dict[str, Case]:
    made = {
        name: Case(
            folder=make_tiny_fp8(
                name, folder / name, plain_layers=(1,), kv_scales=name in WITH_KV_SCALES
            )
        )
        for name in FORMATS
    }
    plain = make_tiny("llama-untied", folder / "plain", num_hidden_layers=8)
    made["online"] = Case(folder=plain, arguments={"quantization": "fp8"})
    for name in ("fp8-tensor", "compressed-channel"):
        empty = make_tiny_fp8(name, folder / f"{name}-dummy", plain_layers=(1,))
        empty.joinpath("model.safetensors").unlink()
        made[f"{name}-dummy"] = Case(folder=empty, arguments={"load_format": "dummy"})
    return made


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Any]]:
    """For every case, what each node's rank found."""
    found = run_ranks(load_all, NUM_NODES, cases(tmp_path_factory.mktemp("fp8")), timeout=180)
    return {name: [rank[name] for rank in found] for name in found[0]}


def added(name: str, nodes: list[Any]) -> list[int]:
    """Bytes that each node holds beyond its stored ones, as far as they are SGLang's doing."""
    layers = nodes[0]["blocks"]
    if name == "online":
        # A scale for each fused matrix, in place of nothing; and the KV scales.
        return [count * (4 * FUSED + KV_SCALES) for count in layers]
    if name == "fp8-static":
        return [count * KV_SCALES for count in layers]
    return [0, 0]


@pytest.mark.parametrize("name", [*FORMATS, "online"])
def test_nodes_hold_one_copy_to_the_byte(loaded: dict[str, list[Any]], name: str) -> None:
    nodes = loaded[name]
    extra = added(name, nodes)
    placed = [node["placed"] for node in nodes]
    assert [node["held"] for node in nodes] == [p + e for p, e in zip(placed, extra, strict=True)]
    assert sum(placed) == nodes[0]["one_copy"]
    assert max(placed) - sum(placed) / NUM_NODES <= nodes[0]["largest_layer"]
    assert [node["has_head"] for node in nodes] == [False, True]


@pytest.mark.parametrize("name", FORMATS)
def test_an_unquantised_layer_counts_as_it_is_stored(
    loaded: dict[str, list[Any]], name: str
) -> None:
    """The plain layer 1 weighs four times an FP8 one; equal layers would make blocks 3 and 2.

    A head in FP8 leaves the last node room for the plain layer.
    """
    head = FORMATS[name].head
    nodes = loaded[name]
    assert [node["blocks"] for node in nodes] == [(1, 4) if head else (2, 3)] * NUM_NODES
    # Either way node 0 has one FP8 layer, and node 1 has three.
    assert [node["fp8"] for node in nodes] == [FUSED, 3 * FUSED + head]


@pytest.mark.parametrize("name", FORMATS)
def test_products_are_those_of_the_stored_matrices(loaded: dict[str, list[Any]], name: str) -> None:
    assert max(node["error"] for node in loaded[name]) < 1e-6


@pytest.mark.parametrize("name", [*FORMATS, "online"])
def test_the_whole_model_takes_no_memory(loaded: dict[str, list[Any]], name: str) -> None:
    """It is built with the checkpoint's quantisation, and nothing of it is loaded or converted."""
    for node in loaded[name]:
        assert node["whole_is_meta"]
        stored = 0 if name == "online" else (LAYERS - 1) * FUSED + FORMATS[name].head
        assert node["fp8_of_whole"] == stored


@pytest.mark.parametrize("name", WITH_KV_SCALES)
def test_every_node_has_the_kv_scales_of_all_layers(
    loaded: dict[str, list[Any]], name: str
) -> None:
    stored = [(kv_scale(layer, "k"), kv_scale(layer, "v")) for layer in range(LAYERS)]
    for node in loaded[name]:
        assert node["kv_scales"] == stored
        assert [tuple(pair) for pair in node["kv_tensors"]] == stored


@pytest.mark.parametrize("name", ["fp8-tensor", "compressed-channel"])
def test_dummy_weights_are_placed_as_the_checkpoint_would_be(
    loaded: dict[str, list[Any]], name: str
) -> None:
    """From the configuration alone: FP8, its scales, and the layer that it leaves out."""
    for node, (dummy, real) in enumerate(zip(loaded[f"{name}-dummy"], loaded[name], strict=True)):
        kv_scales = KV_SCALES * real["blocks"][node]
        assert dummy["blocks"] == real["blocks"]
        assert dummy["placed"] == real["placed"] - kv_scales  # stored ones, which dummies lack
        made = kv_scales if FORMATS[name].method == "fp8" else 0
        assert dummy["held"] == dummy["placed"] + made
