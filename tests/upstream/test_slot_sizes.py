"""Proves that ranks with different lists of captured sizes agree on one that all can capture."""

import pytest

pytestmark = pytest.mark.upstream


@pytest.mark.parametrize(
    ("lists", "agreed"),
    [
        ([[1, 2, 4], [1, 2, 4]], [1, 2, 4]),
        ([[1, 2, 4, 8, 10], [1, 2, 4, 8, 12]], [1, 2, 4, 8, 10]),
        ([[100], [256]], [100]),  # nothing in common: the smaller node's is one that all can hold
        ([[1, 2, 3], [1, 2, 4, 8], [1, 2, 4, 5]], [1, 2, 3]),
        ([[7]], [7]),
    ],
)
def test_ranks_agree_on_the_sizes_of_slots(lists: list[list[int]], agreed: list[int]) -> None:
    from sglang_tknp.model_ext.graphs import agreed_sizes

    assert agreed_sizes(lists) == agreed
    assert agreed_sizes(lists[::-1]) == agreed
