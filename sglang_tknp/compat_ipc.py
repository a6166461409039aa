"""Every private name of SGLang's messages, sockets and queues; the rest of them is in compat."""

import functools
import pickle
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from sglang_tknp.compat import parallel


def generate_requests(message: Any) -> list[Any]:
    """The tokenized requests in a message to the controller: none, one, or a batch."""
    from sglang.srt.managers import io_struct

    if isinstance(message, io_struct.TokenizedGenerateReqInput):
        return [message]
    if isinstance(message, io_struct.BatchTokenizedGenerateReqInput):
        return list(message)
    return []


def control_kind(message: Any) -> str | None:
    """Of the control messages that TKNP's controller looks at: what they are about."""
    from sglang.srt.managers import io_struct

    kinds = {
        io_struct.AbortReq: "abort",
        io_struct.FlushCacheReqInput: "flush",
        io_struct.GetInternalStateReq: "state",
        io_struct.ActiveRanksOutput: "status",
    }
    return kinds.get(type(message))


def register_message(kind: type) -> type:
    """Class decorator: SGLang's processes may send each other messages of this kind."""
    from sglang.srt.managers.io_struct import hook_custom_types

    hook_custom_types(kind)
    return kind


@functools.cache
def health_check_prefix() -> str:
    """What the rids of SGLang's health checks begin with."""
    from sglang.srt.constants import HEALTH_CHECK_RID_PREFIX

    return str(HEALTH_CHECK_RID_PREFIX)


def is_health_check(rid: str) -> bool:
    return rid.startswith(health_check_prefix())


def ended_rids(output: Any) -> list[str]:
    """Of what a scheduler sends towards its clients: the requests that it ends."""
    from sglang.srt.managers import io_struct

    if isinstance(output, io_struct.AbortReq):
        return [output.rid]
    if isinstance(output, io_struct.BatchTokenIDOutput):
        pairs = zip(output.rids or (), output.finished_reasons, strict=True)
        return [rid for rid, reason in pairs if reason is not None]
    return []


def encode_message(message: Any) -> bytes:
    """A message as SGLang's sock_send would put it into one frame."""
    from sglang.srt.managers import io_struct

    if io_struct._USE_PICKLE_IPC:
        return pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
    return io_struct.msgpack_encode(message)


def decode_message(frame: Any) -> Any:
    """What SGLang's sock_recv would make of one frame."""
    from sglang.srt.managers import io_struct

    if io_struct._USE_PICKLE_IPC:
        return pickle.loads(frame)
    return io_struct.msgpack_decode(frame)


def abort_message(rid: str, http_worker_ipc: str | None, reason: Any, text: str | None) -> Any:
    """What SGLang's tokenizer takes as the end of a request that no scheduler holds."""
    from sglang.srt.managers.io_struct import AbortReq

    return AbortReq(
        rid=rid, http_worker_ipc=http_worker_ipc, finished_reason=reason, abort_message=text
    )


def on_message_to_tokenizer(manager: Any, kind: type, handle: Callable[[Any], None]) -> None:
    """Let SGLang's tokenizer pass messages of a new kind to `handle`."""
    from sglang.utils import TypeBasedDispatcher

    manager._result_dispatcher += TypeBasedDispatcher([(kind, handle)])


def dispatch_control(controller: Any, message: Any) -> None:
    """What SGLang's controller does with a message that is no request."""
    controller._request_dispatcher(message)


def push_socket(context: Any, address: str) -> Any:
    """A PUSH socket with SGLang's options, connected."""
    import zmq
    from sglang.srt.utils.network import get_zmq_socket

    socket = get_zmq_socket(context, zmq.PUSH, address, False)
    socket.setsockopt(zmq.LINGER, 0)
    return socket


def pull_socket(context: Any, address: str) -> Any:
    """A PULL socket with SGLang's options, bound; SGLANG_ZMQ_ALLOWED_PEERS holds for it."""
    import zmq
    from sglang.srt.utils.network import get_zmq_socket

    return get_zmq_socket(context, zmq.PULL, address, True)


REPORT_PORT_DELTA = 48


def report_address(port_args: Any) -> str:
    """Where owners report to the controller; `port_args`: SGLang's, of either process."""
    from sglang.srt.utils.network import NetworkAddress

    if parallel().nnodes == 1:
        return f"ipc://{tempfile.gettempdir()}/sglang-tknp-{port_args.instance_id}"
    first = NetworkAddress.parse(parallel().dist_init_addr)
    return NetworkAddress(first.host, first.port + REPORT_PORT_DELTA).to_tcp()


@dataclass(frozen=True, slots=True)
class QueueSettings:
    """SGLang's own settings for requests that wait."""

    max_queued: int | None
    timeout: float  # seconds; none if not positive
    max_new_tokens: int | None  # SGLANG_MAX_NEW_TOKENS_LIMIT
    priorities: bool
    low_values_first: bool


def queue_settings() -> QueueSettings:
    from sglang.srt.environ import envs
    from sglang.srt.runtime_context import get_schedule

    schedule = get_schedule()
    limit = envs.SGLANG_MAX_NEW_TOKENS_LIMIT.get()
    return QueueSettings(
        max_queued=schedule.max_queued_requests,
        timeout=float(envs.SGLANG_REQ_WAITING_TIMEOUT.get()),
        max_new_tokens=limit if limit and limit > 0 else None,
        priorities=bool(schedule.enable_priority_scheduling),
        low_values_first=bool(schedule.schedule_low_priority_values_first),
    )
