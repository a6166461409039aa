"""Proves that bytes per layer are those stored, from hand-written safetensors headers."""

import json
import re
import struct
from pathlib import Path

import pytest

from sglang_tknp.checkpoint import read_model_bytes, stored_dtypes
from sglang_tknp.estimate import estimate_model_bytes
from tests.tiny import make_tiny

Tensors = dict[str, tuple[str, tuple[int, ...], int]]  # name -> dtype, shape, bytes


def write_safetensors(file: Path, tensors: Tensors) -> None:
    """The format by hand: 8 bytes of header length, the header, then the (zero) data."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, (dtype, shape, size) in tensors.items():
        header[name] = {
            "dtype": dtype,
            "shape": list(shape),
            "data_offsets": [offset, offset + size],
        }
        offset += size
    text = json.dumps(header).encode()
    file.write_bytes(struct.pack("<Q", len(text)) + text + bytes(offset))


def write_index(folder: Path, shards: dict[str, Tensors]) -> None:
    weight_map = {name: file for file, tensors in shards.items() for name in tensors}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    for file, tensors in shards.items():
        write_safetensors(folder / file, tensors)


def llama(num_layers: int, head: bool = True) -> Tensors:
    """bfloat16: embedding 64 bytes, layers 16 + 8, final norm 4, head 80."""
    tensors: Tensors = {"model.embed_tokens.weight": ("BF16", (16, 2), 64)}
    for layer in range(num_layers):
        tensors[f"model.layers.{layer}.self_attn.q_proj.weight"] = ("BF16", (4, 2), 16)
        tensors[f"model.layers.{layer}.input_layernorm.weight"] = ("BF16", (4,), 8)
    tensors["model.norm.weight"] = ("BF16", (2,), 4)
    if head:
        tensors["lm_head.weight"] = ("BF16", (20, 2), 80)
    return tensors


def test_dtypes_are_those_stored_by_bytes(tmp_path: Path) -> None:
    tensors = {**llama(1), "model.layers.0.q.weight": ("F8_E4M3", (30, 10), 300)}
    tensors["model.layers.0.q.weight_scale"] = ("F32", (1,), 4)
    write_index(tmp_path, {"a.safetensors": llama(1), "b.safetensors": tensors})
    assert stored_dtypes(tmp_path) == ("F8_E4M3", "bfloat16", "float32")


def test_one_file(tmp_path: Path) -> None:
    write_safetensors(tmp_path / "model.safetensors", llama(3))
    found = read_model_bytes(tmp_path, 3, tied=False)
    assert (found.embedding, found.layers, found.final_norm, found.head, found.tied) == (
        64,
        (24, 24, 24),
        4,
        80,
        False,
    )
    assert found.one_copy == 64 + 72 + 4 + 80


def test_shards_with_an_index_leave_other_files_out(tmp_path: Path) -> None:
    tensors = llama(12)
    names = list(tensors)
    halves = {"a.safetensors": names[:7], "b.safetensors": names[7:]}
    write_index(tmp_path, {f: {n: tensors[n] for n in part} for f, part in halves.items()})
    # A second format of the same weights, as Mistral's checkpoints carry one.
    write_safetensors(
        tmp_path / "consolidated.safetensors", {"layers.0.attention.wq.weight": ("BF16", (4,), 999)}
    )
    found = read_model_bytes(tmp_path, 12, tied=False)
    assert found.layers == (24,) * 12  # layer 1 is not layer 10 or 11
    assert (found.embedding, found.head) == (64, 80)


def test_shards_without_an_index_count_each_tensor_once(tmp_path: Path) -> None:
    write_safetensors(tmp_path / "a.safetensors", llama(2))
    write_safetensors(tmp_path / "b.safetensors", llama(2))
    assert read_model_bytes(tmp_path, 2, tied=False).one_copy == 64 + 48 + 4 + 80


def test_fp8_layers_and_their_scales_count_as_stored(tmp_path: Path) -> None:
    tensors = llama(3)
    # Layer 1 in FP8 (half the bytes) with a float32 scale; layers 0 and 2 stay bfloat16.
    tensors["model.layers.1.self_attn.q_proj.weight"] = ("F8_E4M3", (4, 2), 8)
    tensors["model.layers.1.self_attn.q_proj.weight_scale"] = ("F32", (1,), 4)
    write_safetensors(tmp_path / "model.safetensors", tensors)
    assert read_model_bytes(tmp_path, 3, tied=False).layers == (24, 20, 24)


def test_matrices_that_are_quantised_on_load_count_as_held(tmp_path: Path) -> None:
    """The layers' matrices shrink; vectors, embedding and head stay as they are stored."""
    write_safetensors(tmp_path / "model.safetensors", llama(3))
    found = read_model_bytes(tmp_path, 3, tied=False, matrix_bytes=1)
    assert found.layers == (8 + 8,) * 3
    assert (found.embedding, found.final_norm, found.head) == (64, 4, 80)


def test_layers_beyond_the_models_do_not_count(tmp_path: Path) -> None:
    write_safetensors(tmp_path / "model.safetensors", llama(4))  # the last one predicts tokens
    found = read_model_bytes(tmp_path, 3, tied=False)
    assert found.layers == (24, 24, 24)
    assert found.one_copy == 64 + 72 + 4 + 80


@pytest.mark.parametrize("stored", [True, False])
def test_a_tied_head_is_not_counted_even_if_stored(tmp_path: Path, stored: bool) -> None:
    write_safetensors(tmp_path / "model.safetensors", llama(2, head=stored))
    found = read_model_bytes(tmp_path, 2, tied=True)
    assert (found.head, found.tied) == (0, True)
    assert found.last_node_extra == 4 + 64
    assert found.one_copy == 64 + 48 + 4


def test_names_of_other_families(tmp_path: Path) -> None:
    tensors: Tensors = {
        "transformer.wte.weight": ("F32", (4,), 16),
        "transformer.h.0.attn.c_attn.weight": ("F32", (8,), 32),
        "transformer.h.1.attn.c_attn.weight": ("F32", (8,), 32),
        "transformer.ln_f.weight": ("F32", (1,), 4),
        "embed_out.weight": ("F32", (5,), 20),
    }
    write_safetensors(tmp_path / "model.safetensors", tensors)
    found = read_model_bytes(tmp_path, 2, tied=False)
    assert (found.embedding, found.layers, found.final_norm, found.head) == (16, (32, 32), 4, 20)


def test_a_projection_named_output_is_not_the_head(tmp_path: Path) -> None:
    tensors = llama(1)
    tensors["model.layers.0.attention.output.dense.weight"] = ("BF16", (4,), 8)
    write_safetensors(tmp_path / "model.safetensors", tensors)
    found = read_model_bytes(tmp_path, 1, tied=False)
    assert (found.layers, found.head) == ((32,), 80)


def test_a_missing_layer_is_refused(tmp_path: Path) -> None:
    write_safetensors(tmp_path / "model.safetensors", llama(3))
    message = (
        f"the checkpoint in {tmp_path} has no tensor of layer 3, and its configuration names 5 "
        "layers"
    )
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        read_model_bytes(tmp_path, 5, tied=False)


def test_a_folder_without_weights_is_refused(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(FileNotFoundError, match=f"^no safetensors files in {tmp_path}$"):
        read_model_bytes(tmp_path, 2, tied=False)


def test_a_missing_shard_is_refused(tmp_path: Path) -> None:
    write_index(tmp_path, {"a.safetensors": llama(2), "b.safetensors": {}})
    index = {"weight_map": {"model.norm.weight": "a.safetensors", "x.weight": "c.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ValueError, match="names c.safetensors, which is not there"):
        read_model_bytes(tmp_path, 2, tied=False)


@pytest.mark.parametrize("content", [b"", b"version https://git-lfs.github.com/spec/v1\n"])
def test_a_file_that_is_not_safetensors_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "model.safetensors").write_bytes(content)
    message = f"{re.escape(str(tmp_path))}/model.safetensors is not a whole safetensors file"
    with pytest.raises(ValueError, match=message):
        read_model_bytes(tmp_path, 2, tied=False)


def test_a_consolidated_second_format_does_not_count(tmp_path: Path) -> None:
    write_safetensors(tmp_path / "model.safetensors", llama(1))
    second: Tensors = {"layers.0.attention.wq.weight": ("BF16", (4,), 999)}
    write_safetensors(tmp_path / "consolidated.safetensors", second)
    assert read_model_bytes(tmp_path, 1, tied=False).layers == (24,)


def test_gpt_neox_embedding(tmp_path: Path) -> None:
    tensors: Tensors = {
        "gpt_neox.embed_in.weight": ("F32", (4,), 16),
        "gpt_neox.layers.0.attention.dense.weight": ("F32", (8,), 32),
        "embed_out.weight": ("F32", (5,), 20),
    }
    write_safetensors(tmp_path / "model.safetensors", tensors)
    found = read_model_bytes(tmp_path, 1, tied=False)
    assert (found.embedding, found.layers, found.final_norm, found.head) == (16, (32,), 0, 20)


CONFIG = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "vocab_size": 512,
}


def test_an_estimate_counts_the_projections() -> None:
    found = estimate_model_bytes(CONFIG, 2)
    # Q and O are 64x64, K and V 16x64, the MLP three of 64x128, and two norms.
    layer = 2 * (2 * 64 * 64 + 2 * 16 * 64 + 3 * 64 * 128 + 2 * 64)
    assert found.layers == (layer,) * 3
    assert found.embedding == found.head == 2 * 512 * 64
    assert (found.final_norm, found.tied) == (128, False)


def test_an_estimate_of_a_tied_model_with_its_own_head_dim() -> None:
    config = {**CONFIG, "head_dim": 16, "num_key_value_heads": None, "tie_word_embeddings": True}
    found = estimate_model_bytes(config, 4)
    layer = 4 * (4 * 8 * 16 * 64 + 3 * 64 * 128 + 2 * 64)  # all of Q, K, V and O are 128x64
    assert found.layers == (layer,) * 3
    assert (found.head, found.tied) == (0, True)


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("llama", {"tie_word_embeddings": False}),
        ("llama", {"attention_bias": True, "mlp_bias": True}),
        ("nemotron", {}),
        ("nemotron", {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}),
    ],
)
def test_an_estimate_is_what_a_checkpoint_stores(
    family: str, changes: dict[str, bool], tmp_path: Path
) -> None:
    folder = make_tiny(family, tmp_path, **changes)
    config = json.loads((folder / "config.json").read_text())
    stored = read_model_bytes(folder, config["num_hidden_layers"], config["tie_word_embeddings"])
    assert estimate_model_bytes(config, 4) == stored
