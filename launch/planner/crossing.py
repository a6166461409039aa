"""Where one curve over batches passes another. Waves make both rise and fall. Pure."""

from collections.abc import Sequence


def first_and_for_good(ahead: Sequence[bool]) -> tuple[int | None, int | None]:
    """Where a layout is first ahead, and where for good; waves let it fall back between."""
    first = next((i for i, wins in enumerate(ahead) if wins), None)
    good = len(ahead) - next((i for i, wins in enumerate(reversed(ahead)) if not wins), len(ahead))
    return first, good if good < len(ahead) else None


def batches_up_to(most: int) -> list[int]:
    """1, 2, 3, ... 32, then steps of about an eighth."""
    found = list(range(1, min(32, most) + 1))
    while found[-1] < most:
        found.append(min(most, found[-1] + max(4, found[-1] // 8)))
    return found
