"""The models of ours that SGLang lacks, in SGLang's model registry.

With TKNP on, every rank registers them. Without, SGLang is stock and would serve such a model by
transformers' code; its own switch adds ours: SGLANG_EXTERNAL_MODEL_PACKAGE=sglang_tknp.model_ext.
"""

from typing import Any

PACKAGE = "sglang_tknp.model_ext"
ARCHITECTURES = ("NemotronForCausalLM",)


def before_initialize(runner: Any) -> None:
    """Target: ModelRunner.initialize, on every rank."""
    register_models()


def register_models() -> None:
    """Make SGLang know our models in this process; one that it knows already stays as it is.

    Raises what importing them raises: SGLang would go on without.
    """
    # Here, since importing the registry imports every model, and with SGLang's switch this package.
    from sglang.srt.models.registry import ModelRegistry

    if not all(ModelRegistry.is_arch_supported(name) for name in ARCHITECTURES):
        ModelRegistry.register(PACKAGE, strict=True)
