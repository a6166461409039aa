"""From the tokenizer to the controller: a request's header before its untouched frame.

The controller places a request by its header alone. Its token ids, a megabyte for a long prompt,
are encoded once here and decoded once by the owner.
"""

from collections.abc import Callable
from typing import Any

from sglang_tknp import compat_ipc
from sglang_tknp.config import TknpConfig
from sglang_tknp.scheduler_ext.messages import Header, encode
from sglang_tknp.scheduler_ext.prefixes import block_hashes


def header_of(request: Any, *, with_prefix: bool) -> Header:
    """The header of one of SGLang's tokenized requests."""
    ids = request.input_ids
    prefix = block_hashes(ids, (request.extra_key, request.cache_salt)) if with_prefix else ()
    return Header(
        rid=request.rid,
        input_tokens=len(ids),
        max_new_tokens=request.sampling_params.max_new_tokens,
        priority=request.priority,
        routed_dp_rank=request.routed_dp_rank,
        http_worker_ipc=request.http_worker_ipc,
        prefix=prefix,
    )


def after_init_request_dispatcher(result: Any, manager: Any) -> None:
    """Target: TokenizerManager.init_request_dispatcher: takes what the controller tells."""
    config = TknpConfig.from_env()
    manager.tknp_forwards = config.enable
    manager.tknp_with_prefix = config.prefix_slack is not None
    manager.tknp_pool_state = None
    if config.enable:
        from sglang_tknp.scheduler_ext.pool_state import PoolState

        def keep(message: PoolState) -> None:
            manager.tknp_pool_state = message.state

        compat_ipc.on_message_to_tokenizer(manager, PoolState, keep)


def around_dispatch_to_scheduler(original: Callable[..., None], manager: Any, obj: Any) -> None:
    """Target: TokenizerManager._dispatch_to_scheduler."""
    requests = compat_ipc.generate_requests(obj) if manager.tknp_forwards else []
    if not requests:
        original(manager, obj)
    for request in requests:
        header = header_of(request, with_prefix=manager.tknp_with_prefix)
        frames = [encode(header), compat_ipc.encode_message(request)]
        manager.send_to_scheduler.send_multipart(frames, copy=False)


async def around_get_internal_state(original: Callable[..., Any], manager: Any) -> Any:
    """Target: TokenizerControlMixin.get_internal_state: adds the ledger to what nodes tell.

    The controller sends its state before it passes the question on to the nodes.
    """
    states = await original(manager)
    if manager.tknp_forwards and manager.tknp_pool_state is not None:
        pool = dict(manager.tknp_pool_state)
        owners = pool.pop("owners")
        for state in states:
            state["tknp"]["ledger"] = owners[state["tknp"]["node"]]
            state["tknp"]["controller"] = pool
    return states
