"""The longest context that fits: sizes are in a task's own units (words, entries)."""

from __future__ import annotations

import itertools
from collections.abc import Callable


def longest(count: Callable[[int], int], smallest: int, limit: int, guess: int) -> int:
    """A size >= smallest with count(size) <= limit < count(size + 1), in few calls where count
    grows about evenly. count(smallest) must be within the limit. guess: where to look first."""
    low, tokens = smallest, count(smallest)
    assert tokens <= limit, f"{tokens} tokens at the smallest size, limit {limit}"
    high: int | None = None
    jump = max(1, guess - smallest)
    for step in itertools.count(1):
        found = count(low + jump)
        rate = max((found - tokens) / jump, 0.1)  # tokens a unit
        if found <= limit:
            low, tokens = low + jump, found
        else:
            high = low + jump
        if high == low + 1:
            return low
        jump = max(1, int((limit - tokens) / rate))
        if high is not None:
            # every fourth step halves, so that an uneven count cannot make it crawl
            jump = (high - low) // 2 if step % 4 == 0 else min(jump, high - low - 1)
    raise AssertionError("unreachable")
