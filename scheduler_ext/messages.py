"""What the controller's sockets carry: a request's header, and an owner's report. msgspec only."""

import msgspec


class Header(msgspec.Struct, array_like=True, frozen=True):
    """What the controller must know of a request; its token ids stay in the frame behind it."""

    rid: str
    input_tokens: int
    max_new_tokens: int | None = None  # None: the request names no length
    priority: int | None = None
    routed_dp_rank: int | None = None  # the owner that the client asks for
    http_worker_ipc: str | None = None  # SGLang's return route, sent back as it came
    prefix: tuple[int, ...] = ()  # chained hashes of the prompt's blocks, where they are wanted


class Live(msgspec.Struct, array_like=True, frozen=True):
    """A request that an owner holds."""

    number: int
    rid: str
    context_tokens: int  # input and output so far, whole pages


class Report(msgspec.Struct, array_like=True, frozen=True, kw_only=True):
    """What an owner says of itself. Every field but `ended` and `live` is its state by now.

    A request's number counts the requests that its owner received before it. Both sides count
    alike: a request's way from the controller to its owner keeps the order and loses nothing.
    """

    owner: int
    epoch: int  # of the owner's process; a newer process has a larger one
    seq: int  # of this report, from 1
    capacity: int  # KV tokens
    max_requests: int
    page_size: int  # tokens
    context_length: int  # tokens that a request may have, by the model
    received: int  # requests so far
    used: int  # context tokens of the requests it holds, whole pages
    waiting: int  # of these, those in its own queue
    retractions: int = 0  # so far
    ended: tuple[int, ...] = ()  # numbers of the requests that ended since the last report
    live: tuple[Live, ...] | None = None  # in an absolute report: every request it holds


encode = msgspec.msgpack.Encoder().encode
decode_header = msgspec.msgpack.Decoder(Header).decode
decode_report = msgspec.msgpack.Decoder(Report).decode
