"""Which owner a request gets: the paper's section 4.2. Pure.

A request goes to the least loaded owner that has room for its input and its expected output; ties
go to the fewest requests, then to the lowest rank (Ledger.order). If nobody has room it waits.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

from sglang_tknp.config import DEFAULT_EXPECTED_OUTPUT
from sglang_tknp.scheduler_ext.ledger import Ledger
from sglang_tknp.scheduler_ext.prefixes import PrefixIndex

NONE: frozenset[int] = frozenset()


@dataclass(slots=True, eq=False)
class Request:
    """A request that has no owner yet."""

    rid: str
    tokens: int  # KV of its whole life, whole pages
    input_tokens: int  # KV of its input, whole pages
    only_owner: int | None = None  # the client's choice
    level: int = 0  # of its priority: lower goes first
    prefix: tuple[int, ...] = ()
    arrived: float = 0.0  # seconds, the controller's clock
    payload: Any = None  # what is sent to the owner
    reply_to: str | None = None  # SGLang's return route
    # Of the queue that it waits in:
    arrival: int = 0  # its place among all that came
    overtaken: int = 0


def expected_output(
    max_new_tokens: int | None, cap: int | None, limit: int, default: int = DEFAULT_EXPECTED_OUTPUT
) -> int:
    """Output tokens to reserve for.

    Args:
        max_new_tokens: what the request names, or None.
        cap: --tknp-expected-output-tokens, or None for none.
        limit: what the model's context leaves behind the input.
        default: for a request that names no length, where there is no cap.
    """
    if max_new_tokens is None:
        max_new_tokens = default if cap is None else cap
    elif cap is not None:
        max_new_tokens = min(max_new_tokens, cap)
    return max(0, min(max_new_tokens, limit))


def choose(ledger: Ledger, tokens: int, closed: Collection[int] = NONE) -> int | None:
    """The least loaded owner with room for `tokens`, none of `closed`; None if there is none."""
    rooms, owner_of = ledger.rooms, ledger.owner_of
    for key in ledger.order:
        owner = owner_of(key)
        if rooms[owner] >= tokens and owner not in closed:
            return owner
        if tokens > ledger.most_room():
            return None
    return None


class Policy:
    """Picks owners; with `prefixes`, one that has seen the prompt's beginning may win."""

    def __init__(
        self, ledger: Ledger, prefixes: PrefixIndex | None = None, prefix_slack: int = 0
    ) -> None:
        """`prefix_slack`: KV tokens that a holder's load may lie above the least loaded's."""
        self.ledger = ledger
        self.prefixes = prefixes
        self.prefix_slack = prefix_slack
        self.prefix_hits = 0

    def pick(self, request: Request, closed: Collection[int] = NONE) -> int | None:
        if request.only_owner is not None:
            has_room = self.ledger.rooms[request.only_owner] >= request.tokens
            return request.only_owner if has_room and request.only_owner not in closed else None
        owner = choose(self.ledger, request.tokens, closed)
        if owner is None or self.prefixes is None or not request.prefix:
            return owner
        return self._nearest(request, owner, closed)

    def _nearest(self, request: Request, least: int, closed: Collection[int]) -> int:
        """Of the owners that are not too busy the one that has seen most, or `least`."""
        assert self.prefixes is not None
        ledger, limit = self.ledger, self.ledger.load_of(least) + self.prefix_slack
        for holders, _ in self.prefixes.levels(request.prefix):
            near = [
                (ledger.accounts[owner].key, owner)
                for owner in holders
                if ledger.load_of(owner) <= limit
                and ledger.rooms[owner] >= request.tokens
                and owner not in closed
            ]
            if near:
                self.prefix_hits += 1
                return min(near)[1]
        return least

    def reserve(self, request: Request, owner: int) -> int:
        """Reserve for a request that is now sent to `owner`; returns its number there."""
        number = self.ledger.reserve(owner, request.rid, request.tokens, request.input_tokens)
        if self.prefixes is not None and request.prefix:
            capacity = self.ledger.accounts[owner].capacity
            self.prefixes.add(owner, request.prefix, capacity)
        return number

    def could_take(self, request: Request) -> Sequence[int]:
        """The owners that could hold a request if they were empty."""
        accounts = self.ledger.accounts
        if request.only_owner is None and request.tokens <= self.ledger.smallest:
            return range(len(accounts))
        owners = range(len(accounts)) if request.only_owner is None else [request.only_owner]
        return [o for o in owners if accounts[o].alive and accounts[o].capacity >= request.tokens]
