"""From a request's header to what it needs of an owner, or why no owner can ever serve it. Pure."""

import sys
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

from sglang_tknp.scheduler_ext.ledger import Ledger, whole_pages
from sglang_tknp.scheduler_ext.messages import Header
from sglang_tknp.scheduler_ext.policy import Request, expected_output

# SGLang ends a request two tokens before the model's context is full.
CONTEXT_MARGIN = 2
# It takes no prompt that leaves an owner's pool fewer tokens than this for the output.
INPUT_MARGIN = 5


class RefusedError(Exception):
    """A request that is answered with an error at once."""

    def __init__(self, status: HTTPStatus, kind: str, message: str) -> None:
        """`kind` is its label in /metrics."""
        super().__init__(message)
        self.status = status
        self.kind = kind


@dataclass(frozen=True, slots=True, kw_only=True)
class AdmissionSettings:
    """TKNP's and SGLang's settings for what a request may ask."""

    expected_output_tokens: int | None = None  # --tknp-expected-output-tokens
    max_new_tokens: int | None = None  # SGLANG_MAX_NEW_TOKENS_LIMIT
    priorities: bool = False  # --enable-priority-scheduling
    low_values_first: bool = False  # --schedule-low-priority-values-first

    def level(self, priority: int | None) -> int:
        """The place of a priority in the queue: lower goes first, no priority goes last."""
        if not self.priorities:
            return 0
        if priority is None:
            return sys.maxsize
        return priority if self.low_values_first else -priority


def admit(
    header: Header, payload: Any, now: float, ledger: Ledger, settings: AdmissionSettings
) -> Request:
    """The request that a header describes.

    Raises:
        RefusedError: it asks for an owner that there is not, or for more than any could hold.
    """
    owner, largest = header.routed_dp_rank, ledger.largest
    if owner is not None:
        _check_owner(owner, ledger)
        largest = ledger.accounts[owner].capacity
    tokens = header.input_tokens + _output(header, ledger, largest, settings)
    request = Request(
        rid=header.rid,
        tokens=whole_pages(tokens, ledger.page_size),
        input_tokens=whole_pages(header.input_tokens, ledger.page_size),
        only_owner=owner,
        level=settings.level(header.priority),
        prefix=header.prefix,
        arrived=now,
        payload=payload,
        reply_to=header.http_worker_ipc,
    )
    if request.tokens > largest:
        where = "the largest node" if owner is None else f"node {owner}"
        raise RefusedError(
            HTTPStatus.BAD_REQUEST,
            "too_large",
            f"The request needs {request.tokens} KV tokens ({header.input_tokens} of input and "
            f"{tokens - header.input_tokens} of expected output), and {where} of this pool holds "
            f"{largest}. Send a shorter prompt or a smaller max_tokens, or start the server with "
            "a lower --tknp-expected-output-tokens or with more nodes.",
        )
    return request


def _check_owner(owner: int, ledger: Ledger) -> None:
    num_owners = len(ledger.accounts)
    if not 0 <= owner < num_owners:
        raise RefusedError(
            HTTPStatus.BAD_REQUEST,
            "unknown_owner",
            f"routed_dp_rank={owner} is no node of this pool: its nodes are 0 to {num_owners - 1}.",
        )
    if not (ledger.accounts[owner].alive and ledger.accounts[owner].serving):
        raise RefusedError(
            HTTPStatus.SERVICE_UNAVAILABLE,
            "dead_owner",
            f"routed_dp_rank={owner}: this node does not serve; leave routed_dp_rank out, or name "
            "another node.",
        )


def _output(header: Header, ledger: Ledger, largest: int, settings: AdmissionSettings) -> int:
    limit = max(0, ledger.context_length - CONTEXT_MARGIN - header.input_tokens)
    if settings.max_new_tokens is not None:
        limit = min(limit, settings.max_new_tokens)
    if header.max_new_tokens is None:
        # A guess must not make a request too large that would fit with a shorter answer.
        limit = min(limit, max(1, largest - header.input_tokens))
    output = expected_output(header.max_new_tokens, settings.expected_output_tokens, limit)
    if header.input_tokens + INPUT_MARGIN > ledger.smallest:
        return max(output, INPUT_MARGIN)
    return output
