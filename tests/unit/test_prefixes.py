"""Proves that block hashes stand for whole prefixes, and the index against a slow model of it."""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from sglang_tknp.scheduler_ext.prefixes import BLOCK_TOKENS, PrefixIndex, block_hashes

NUM_OWNERS = 3
ROOMY = 1000 * BLOCK_TOKENS


def holders(index: PrefixIndex, prefix: Sequence[int]) -> tuple[set[int], int]:
    """Who has seen most of a prefix, and how many tokens."""
    return (index.levels(prefix) or [(set(), 0)])[0]


def prompt(*blocks: int, tail: int = 0) -> "array[int]":
    """A block of equal tokens for every given token, then a part of a block."""
    tokens = [token for token in blocks for _ in range(BLOCK_TOKENS)]
    return array("q", tokens + [0] * tail)


@pytest.mark.parametrize("kind", [list, tuple, lambda tokens: array("q", tokens)])
@pytest.mark.parametrize(
    ("length", "blocks"),
    [(0, 0), (1, 0), (BLOCK_TOKENS - 1, 0), (BLOCK_TOKENS, 1), (3 * BLOCK_TOKENS - 1, 2)],
)
def test_only_whole_blocks_count(kind: type, length: int, blocks: int) -> None:
    assert len(block_hashes(kind(range(length)))) == blocks


def test_a_partial_block_changes_nothing() -> None:
    assert block_hashes(prompt(1, 2)) == block_hashes(prompt(1, 2, tail=BLOCK_TOKENS - 1))


def test_one_other_token_changes_every_hash_from_its_block_on() -> None:
    plain, changed = prompt(1, 2, 3), prompt(1, 2, 3)
    changed[2 * BLOCK_TOKENS - 1] += 1
    a, b = block_hashes(plain), block_hashes(changed)
    assert a[0] == b[0]
    assert a[1] != b[1] and a[2] != b[2]


@settings(deadline=None, max_examples=100)
@given(
    first=st.lists(st.integers(0, 2), max_size=6),
    second=st.lists(st.integers(0, 2), max_size=6),
)
def test_hashes_are_equal_exactly_as_far_as_prompts_are(
    first: list[int], second: list[int]
) -> None:
    a, b = block_hashes(prompt(*first)), block_hashes(prompt(*second))
    for depth in range(min(len(a), len(b))):
        assert (a[depth] == b[depth]) == (first[: depth + 1] == second[: depth + 1])
    assert len(set(a)) == len(a)


def test_namespaces_share_no_hash() -> None:
    tokens = prompt(1, 2, 3)
    found = [block_hashes(tokens, namespace) for namespace in (None, "lora-a", ("lora-b", 1))]
    assert len({block for hashes in found for block in hashes}) == 9
    assert block_hashes(tokens, "lora-a") == found[1]


def test_levels_go_from_those_that_have_seen_most() -> None:
    index = PrefixIndex(3)
    for owner, prefix in enumerate([(1,), (1, 2, 3), (1, 2, 3, 4)]):
        index.add(owner, prefix, 100 * BLOCK_TOKENS)
    assert index.levels((1, 2, 3, 4, 5)) == [
        ({2}, 4 * BLOCK_TOKENS),
        ({1, 2}, 3 * BLOCK_TOKENS),
        ({0, 1, 2}, BLOCK_TOKENS),
    ]


def test_holders_have_the_longest_part_of_a_prefix() -> None:
    index = PrefixIndex(NUM_OWNERS)
    index.add(0, (1, 2), ROOMY)
    index.add(1, (1, 2, 3), ROOMY)
    index.add(2, (7,), ROOMY)
    assert holders(index, (1, 2, 3, 4)) == ({1}, 3 * BLOCK_TOKENS)
    assert holders(index, (1, 2, 9)) == ({0, 1}, 2 * BLOCK_TOKENS)
    assert holders(index, (1,)) == ({0, 1}, BLOCK_TOKENS)
    assert holders(index, (9, 1)) == (set(), 0)
    assert holders(index, ()) == (set(), 0)


def test_what_was_used_last_stays_and_a_prefix_loses_its_tail_first() -> None:
    index = PrefixIndex(NUM_OWNERS)
    capacity = 4 * BLOCK_TOKENS + 1
    index.add(0, (1, 2), capacity)
    index.add(0, (3, 4), capacity)
    index.add(0, (1,), capacity)
    index.add(0, (5,), capacity)  # the oldest is 2: 1 was used again
    assert [holders(index, (b,))[1] > 0 for b in (1, 2, 3, 4, 5)] == [True, False, True, True, True]
    index.add(0, (6,), capacity)
    assert holders(index, (3, 4)) == ({0}, BLOCK_TOKENS)


def test_of_a_prompt_longer_than_the_pool_its_beginning_stays() -> None:
    index = PrefixIndex(NUM_OWNERS)
    index.add(1, tuple(range(9)), 3 * BLOCK_TOKENS)
    assert holders(index, tuple(range(9))) == ({1}, 3 * BLOCK_TOKENS)
    index.add(1, (20,), BLOCK_TOKENS - 1)  # a pool of less than a block
    assert (index.owners, len(index.seen[1])) == ({}, 0)


def test_a_flush_forgets_everything() -> None:
    index = PrefixIndex(NUM_OWNERS)
    for owner in range(NUM_OWNERS):
        index.add(owner, (1, 2), ROOMY)
    index.clear()
    assert holders(index, (1, 2)) == (set(), 0)
    index.add(1, (1,), ROOMY)
    assert holders(index, (1, 2)) == ({1}, BLOCK_TOKENS)


@dataclass
class SlowCache:
    """One owner's blocks, the one to evict first."""

    blocks: list[int] = field(default_factory=list)

    def add(self, prefix: Sequence[int], room: int) -> None:
        kept = [block for block in self.blocks if block not in prefix]
        blocks = [*kept, *reversed(prefix)]
        self.blocks = blocks[max(0, len(blocks) - room) :]

    def depth(self, prefix: Sequence[int]) -> int:
        missing = [i for i, block in enumerate(prefix) if block not in self.blocks]
        return missing[0] if missing else len(prefix)


OWNERS = st.integers(0, NUM_OWNERS - 1)
# Paths down a small tree: a block names its whole path, as a chained hash does.
PATHS = st.lists(st.integers(1, 2), max_size=5).map(
    lambda steps: tuple(int("".join(map(str, steps[: i + 1]))) for i in range(len(steps)))
)


class Indexes(RuleBasedStateMachine):
    @initialize()
    def start(self) -> None:
        self.index = PrefixIndex(NUM_OWNERS)
        self.caches = [SlowCache() for _ in range(NUM_OWNERS)]

    @rule(owner=OWNERS, prefix=PATHS, room=st.integers(0, 12))
    def add(self, owner: int, prefix: tuple[int, ...], room: int) -> None:
        self.index.add(owner, prefix, room * BLOCK_TOKENS)
        self.caches[owner].add(prefix, room)

    @rule()
    def flush(self) -> None:
        self.index.clear()
        self.caches = [SlowCache() for _ in range(NUM_OWNERS)]

    @rule(prefix=PATHS)
    def look(self, prefix: tuple[int, ...]) -> None:
        depths = [cache.depth(prefix) for cache in self.caches]
        best = max(depths)
        owners = {o for o, depth in enumerate(depths) if best and depth == best}
        assert holders(self.index, prefix) == (owners, best * BLOCK_TOKENS)

    @invariant()
    def both_sides_of_the_index_agree(self) -> None:
        assert [list(seen) for seen in self.index.seen] == [c.blocks for c in self.caches]
        there = {block for cache in self.caches for block in cache.blocks}
        assert self.index.owners == {
            block: {o for o, cache in enumerate(self.caches) if block in cache.blocks}
            for block in there
        }


Indexes.TestCase.settings = settings(deadline=None, max_examples=100, stateful_step_count=40)
test_the_index_equals_a_slow_model = Indexes.TestCase
