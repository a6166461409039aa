"""From the tokenizer to the controller: a request's header before its untouched frame.

The controller places a request by its header alone. Its token ids, a megabyte for a long prompt,
are encoded once here and decoded once by the owner.
"""

import math
from collections.abc import Callable
from typing import Any

from sglang_tknp import compat, compat_ipc
from sglang_tknp.config import TknpConfig
from sglang_tknp.scheduler_ext.admission import AdmissionSettings
from sglang_tknp.scheduler_ext.gate import Gate
from sglang_tknp.scheduler_ext.messages import Header, encode
from sglang_tknp.scheduler_ext.metrics import refusal_counter
from sglang_tknp.scheduler_ext.prefixes import block_hashes


def header_of(request: Any, *, with_prefix: bool) -> Header:
    """The header of one of SGLang's tokenized requests.

    Raises:
        ValueError: the controller could not place it, though SGLang would run it.
    """
    ids = request.input_ids
    for name, kind in (("rid", str), ("priority", int), ("routed_dp_rank", int)):
        value = getattr(request, name)
        if not isinstance(value, kind) and (value is not None or name == "rid"):
            raise ValueError(f"{name}={value!r} must be {kind.__name__} with --enable-tknp")
    if request.session_params is not None and request.routed_dp_rank is None:
        raise ValueError(
            "session_params needs routed_dp_rank with --enable-tknp: a session lives on one node; "
            "send the same routed_dp_rank with every request of it"
        )
    prefix = block_hashes(ids, (request.extra_key, request.cache_salt)) if with_prefix else ()
    return Header(
        rid=request.rid,
        input_tokens=len(ids),
        max_new_tokens=_whole(request.sampling_params.max_new_tokens),
        priority=request.priority,
        routed_dp_rank=request.routed_dp_rank,
        http_worker_ipc=request.http_worker_ipc,
        prefix=prefix,
    )


def _whole(max_new_tokens: Any) -> int | None:
    """SGLang takes any number here, and stops at the first length that is not below it."""
    if max_new_tokens is None:
        return None
    try:
        return max(0, math.ceil(max_new_tokens))
    except (TypeError, OverflowError, ValueError):
        raise ValueError(f"max_new_tokens={max_new_tokens!r} must be a number of tokens") from None


def admission_settings(config: TknpConfig) -> AdmissionSettings:
    """TKNP's settings, and SGLang's, for what a request may ask."""
    sglang = compat_ipc.queue_settings()
    return AdmissionSettings(
        expected_output_tokens=config.expected_output_tokens,
        max_new_tokens=sglang.max_new_tokens,
        priorities=sglang.priorities,
        low_values_first=sglang.low_values_first,
    )


def after_init_request_dispatcher(result: Any, manager: Any) -> None:
    """Target: TokenizerManager.init_request_dispatcher: takes what the controller tells."""
    from sglang_tknp.scheduler_ext.pool_state import PoolState

    config = TknpConfig.from_env()
    manager.tknp_with_prefix = config.prefix_slack is not None
    manager.tknp_gate = None
    if config.enable:
        metric = refusal_counter() if compat.metrics_enabled() else None
        manager.tknp_gate = Gate(admission_settings(config), metric)
        compat_ipc.on_message_to_tokenizer(
            manager, PoolState, lambda message: manager.tknp_gate.keep(message.state)
        )


def around_dispatch_to_scheduler(original: Callable[..., None], manager: Any, obj: Any) -> None:
    """Target: TokenizerManager._dispatch_to_scheduler."""
    requests = compat_ipc.generate_requests(obj) if manager.tknp_gate is not None else []
    if not requests:
        original(manager, obj)
        return
    headers = [header_of(r, with_prefix=manager.tknp_with_prefix) for r in requests]
    for header in headers:
        manager.tknp_gate.check(header)
    for header, request in zip(headers, requests, strict=True):
        request.sampling_params.max_new_tokens = header.max_new_tokens
        frames = [encode(header), compat_ipc.encode_message(request)]
        manager.send_to_scheduler.send_multipart(frames, copy=False)


async def around_get_internal_state(original: Callable[..., Any], manager: Any) -> Any:
    """Target: TokenizerControlMixin.get_internal_state: adds the ledger to what nodes tell.

    The controller sends its state before it passes the question on to the nodes.
    """
    states = await original(manager)
    if manager.tknp_gate is not None:
        manager.tknp_gate.add_to(states)
    return states
