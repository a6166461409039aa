"""What the controller tells for /server_info, as a message of SGLang's own kind."""

from typing import Any

from sglang.srt.managers.io_struct import BaseReq, hook_custom_types


class PoolState(BaseReq):
    """Controller to tokenizer."""

    state: dict[str, Any] = {}


hook_custom_types(PoolState)
