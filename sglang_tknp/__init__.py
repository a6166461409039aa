"""Decode Token Parallelism (TKNP) for SGLang.

On the command line: `python -m sglang.launch_server --enable-tknp ...`. In Python: `engine(...)`.
"""

import os
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

    settings = TknpConfig(
        enable=True,
        layer_blocks=tknp_layer_blocks,
        exchange_timeout=(
            DEFAULT_EXCHANGE_TIMEOUT if tknp_exchange_timeout is None else tknp_exchange_timeout
        ),
        device_memory_gb=tknp_device_memory_gb,
    )
    activate_launcher()
    import sglang

    # The pool's processes inherit the variables while they start; the caller gets its own back,
    # so that a later engine of stock SGLang in this program is stock.
    before = dict(os.environ)
    settings.to_env()
    try:
        return sglang.Engine(**server_args)
    finally:
        os.environ.clear()
        os.environ.update(before)
