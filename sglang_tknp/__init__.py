"""Decode Token Parallelism (TKNP) for SGLang.

On the command line: `python -m sglang.launch_server --enable-tknp ...`. In Python: `engine(...)`.
"""

from typing import Any


def engine(
    *,
    tknp_layer_blocks: str | None = None,
    tknp_exchange_timeout: float | None = None,
    tknp_device_memory_gb: float | None = None,
    **server_args: Any,
) -> Any:
    """Start a TKNP pool inside this program and return its `sglang.Engine`.

    Takes the arguments of `sglang.Engine` (at least model_path, tp_size=W, attn_dp_size=N) and
    TKNP's flags by their names. Call it under `if __name__ == "__main__":`, because SGLang spawns
    its processes. Raises ValueError for a setting that TKNP refuses.
    """
    from sglang_tknp.config import DEFAULT_EXCHANGE_TIMEOUT, TknpConfig
    from sglang_tknp.plugin import activate_launcher

    TknpConfig(
        enable=True,
        layer_blocks=tknp_layer_blocks,
        exchange_timeout=tknp_exchange_timeout or DEFAULT_EXCHANGE_TIMEOUT,
        device_memory_gb=tknp_device_memory_gb,
    ).to_env()
    activate_launcher()
    import sglang

    return sglang.Engine(**server_args)
