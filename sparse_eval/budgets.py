"""The one parser of budgets: tokens, or a fraction of the context."""

from __future__ import annotations

import math
from typing import Any, TypeAlias

Budget: TypeAlias = int | float


def parse_budget(value: Any) -> Budget:
    """An int >= 1 (tokens) or a float in (0, 1) (share of the context); ValueError otherwise."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(
            f"budget must be tokens (an integer >= 1) or a fraction in (0, 1), got {value!r}"
        )
    if isinstance(value, float) and value == 1:
        raise ValueError(
            "budget must be tokens (an integer >= 1) or a fraction in (0, 1), got 1.0: all tokens "
            "are policy=full, one token is 1"
        )
    if isinstance(value, float) and value.is_integer() and value >= 1:
        value = int(value)
    accepted = value >= 1 if isinstance(value, int) else 0 < value < 1
    if not accepted:
        raise ValueError(
            f"budget must be tokens (an integer >= 1) or a fraction in (0, 1), got {value!r}"
        )
    return value


def resolve_budget(value: Any, context: int) -> int:
    """Tokens: a fraction is of `context`, rounded to the nearest token."""
    budget = parse_budget(value)
    return budget if isinstance(budget, int) else max(1, math.floor(budget * context + 0.5))
