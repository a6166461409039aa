"""What the controller tells for /server_info, as a message of SGLang's own kind."""

from typing import Any

from sglang.srt.managers.io_struct import BaseReq

from sglang_tknp import compat_ipc


@compat_ipc.register_message
class PoolState(BaseReq):
    """Controller to tokenizer."""

    state: dict[str, Any] = {}
