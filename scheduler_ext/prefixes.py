"""Which owner has seen which prefix: an estimate of the owners' radix caches. Pure.

Prompts are cut into whole blocks, and a block's hash includes all before it, so one hash stands
for one prefix. An owner's cache evicts what was not used for longest; so does the estimate.
"""

from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

BLOCK_TOKENS = 256


def block_hashes(token_ids: Sequence[int], namespace: Any = None) -> tuple[int, ...]:
    """The hash of every prefix of whole blocks, shortest first.

    Args:
        token_ids: SGLang's array; other types are hashed too, but not alike.
        namespace: keeps prefixes apart that must not share KV, though their tokens are equal.

    The hashes are of this process: they mean nothing to another.
    """
    found = []
    so_far = hash(namespace)
    for start in range(0, len(token_ids) - BLOCK_TOKENS + 1, BLOCK_TOKENS):
        block = token_ids[start : start + BLOCK_TOKENS]
        data = block.tobytes() if hasattr(block, "tobytes") else tuple(block)
        so_far = hash((so_far, data))
        found.append(so_far)
    return tuple(found)


class PrefixIndex:
    """The blocks that every owner has seen last, as many as its KV pool holds."""

    def __init__(self, num_owners: int) -> None:
        self.seen: list[OrderedDict[int, None]] = [OrderedDict() for _ in range(num_owners)]
        self.owners: dict[int, set[int]] = {}  # of a block's hash

    def levels(self, prefix: Sequence[int]) -> list[tuple[set[int], int]]:
        """Who has seen how many tokens of a prefix; those that have seen most first."""
        found: list[tuple[set[int], int]] = []
        for number, block in enumerate(prefix, start=1):
            there = self.owners.get(block)
            if not there:
                break
            if found and found[-1][0] == there:
                found.pop()
            found.append((there, number * BLOCK_TOKENS))
        return found[::-1]

    def add(self, owner: int, prefix: Sequence[int], capacity: int) -> None:
        """`owner`, of `capacity` KV tokens, gets a prompt with these blocks."""
        seen = self.seen[owner]
        for block in reversed(prefix):  # a cache evicts a prefix's tail first
            seen[block] = None
            seen.move_to_end(block)
            self.owners.setdefault(block, set()).add(owner)
        while len(seen) > capacity // BLOCK_TOKENS:
            self._forget(owner, seen.popitem(last=False)[0])

    def clear(self) -> None:
        """The owners' caches were flushed."""
        for seen in self.seen:
            seen.clear()
        self.owners.clear()

    def _forget(self, owner: int, block: int) -> None:
        holders = self.owners[block]
        holders.discard(owner)
        if not holders:
            del self.owners[block]
