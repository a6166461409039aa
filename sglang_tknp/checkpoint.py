"""Bytes of a checkpoint's tensors, from the headers of its safetensors files. Standard library.

True stored bytes, so quantised and mixed-precision layers and their scales count as they are.
"""

import json
import math
import re
import struct
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from sglang_tknp.placement import ModelBytes

_LAYER = re.compile(r"(?:^|\.)(?:layers|h|blocks)\.(\d+)\.")
_EMBEDDING = re.compile(r"(?:^|\.)(?:embed_tokens|embed_in|wte|word_embeddings|tok_embeddings)\.")
_HEAD = re.compile(r"^(?:.*\.)?(?:lm_head|output|embed_out)\.")

_TORCH_NAMES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}


def read_model_bytes(
    folder: Path, num_layers: int, tied: bool, matrix_bytes: int | None = None
) -> ModelBytes:
    """Bytes per layer and endpoint of the checkpoint in `folder`.

    Layers from `num_layers` on (multi-token prediction) do not count, nor a stored head when the
    model ties it. `matrix_bytes` is what an element of a layer's matrices takes where SGLang
    quantises on load; endpoints and vectors stay as stored. Raises FileNotFoundError without
    safetensors files, ValueError if a layer of the model has no tensor or the checkpoint is
    incomplete.
    """
    layers = [0] * num_layers
    embedding = norm = head = 0
    for name, shape, size, _ in _tensors(folder):
        layer = _LAYER.search(name)
        if layer:
            if int(layer.group(1)) < num_layers:
                if matrix_bytes is not None and len(shape) == 2:
                    size = math.prod(shape) * matrix_bytes
                layers[int(layer.group(1))] += size
        elif _EMBEDDING.search(name):
            embedding += size
        elif _HEAD.search(name):
            head += 0 if tied else size
        else:
            norm += size
    if 0 in layers:
        raise ValueError(
            f"the checkpoint in {folder} has no tensor of layer {layers.index(0)}, and its "
            f"configuration names {num_layers} layers"
        )
    return ModelBytes(
        embedding=embedding, layers=tuple(layers), final_norm=norm, head=head, tied=tied
    )


def stored_dtypes(folder: Path) -> tuple[str, ...]:
    """What the tensors are stored in, by bytes, most first; raises as read_model_bytes does.

    In torch's names for what is not quantised, and else in those of safetensors ("F8_E4M3").
    """
    sizes: Counter[str] = Counter()
    for _, _, size, dtype in _tensors(folder):
        sizes[_TORCH_NAMES.get(dtype, dtype)] += size
    return tuple(name for name, _ in sizes.most_common())


def _tensors(folder: Path) -> Iterator[tuple[str, list[int], int, str]]:
    """Name, shape, bytes and dtype of every stored tensor, once."""
    seen = set()
    for file in _files(folder):
        for name, entry in _header(file).items():
            if name != "__metadata__" and name not in seen:
                seen.add(name)
                start, end = entry["data_offsets"]
                yield name, entry["shape"], end - start, entry["dtype"]


def _files(folder: Path) -> list[Path]:
    """The files that the index names, else every safetensors file of the folder."""
    index = folder / "model.safetensors.index.json"
    if index.exists():
        names = json.loads(index.read_text())["weight_map"].values()
        indexed = [folder / name for name in sorted(set(names))]
        # Not FileNotFoundError: that means "no weights here, estimate them" to the caller.
        for file in indexed:
            if not file.exists():
                raise ValueError(
                    f"{index} names {file.name}, which is not there: download the checkpoint again"
                )
        return indexed
    files = sorted(folder.glob("*.safetensors"))
    if [file.name for file in files] == ["consolidated.safetensors", "model.safetensors"]:
        return files[1:]  # Mistral's second format of the same weights; SGLang skips it too
    if not files:
        raise FileNotFoundError(f"no safetensors files in {folder}")
    return files


def _header(file: Path) -> dict[str, Any]:
    """The JSON header of a safetensors file: 8 bytes of length, then the text."""
    with file.open("rb") as stream:
        prefix = stream.read(8)
        length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else 0
        # The text of a Git LFS pointer reads as a length of exabytes: check before reading.
        if not 0 < length <= file.stat().st_size - 8:
            raise ValueError(
                f"{file} is not a whole safetensors file (a Git LFS pointer or a broken "
                "download?): download the checkpoint again"
            )
        header: dict[str, Any] = json.loads(stream.read(length))
    return header
