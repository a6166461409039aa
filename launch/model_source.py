"""What `--model-path` names: a built-in shape, a checkpoint on this machine, or its config.json."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sglang_tknp import shapes


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """A model by the fields of its config.json."""

    name: str
    config: dict[str, Any]
    folder: Path | None  # of its checkpoint; None for a built-in shape


def find_model(text: str) -> Model:
    """Read what `--model-path` names; ValueError if it is not on this machine."""
    if text in shapes.SHAPES:
        return Model(name=text, config=shapes.shape(text), folder=None)
    path = Path(text)
    file = path / "config.json" if path.is_dir() else path
    if not file.is_file():
        raise ValueError(
            f"--model-path={text} is neither a built-in shape nor a checkpoint on this machine "
            f"({file} is not there); use {', '.join(shapes.SHAPES)}, or a folder with a config.json"
        )
    try:
        config = json.loads(file.read_text())
    except ValueError as error:
        raise ValueError(f"--model-path={text}: {file} is not JSON ({error})") from error
    if not isinstance(config, dict) or "architectures" not in config:
        raise ValueError(
            f"--model-path={text}: {file} names no architectures, so SGLang cannot choose a "
            "model; use the config.json of a checkpoint"
        )
    return Model(name=file.parent.name, config=config, folder=file.parent)


def quantize(model: Model, quantization: str | None) -> Model:
    """The model as a checkpoint in FP8 would have it; ValueError if it is quantised already.

    No such checkpoint is there to read: a folder's own tensors are the unquantised ones.
    """
    if quantization is None:
        return model
    if found := model.config.get("quantization_config"):
        raise ValueError(
            f"--quantization={quantization}: {model.name} is quantised already "
            f"({found.get('quant_method')}); leave the flag out"
        )
    return Model(name=model.name, config=shapes.with_fp8(model.config), folder=None)
