"""The one parser of budgets: tokens, or a fraction of the context."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, TypeAlias

if TYPE_CHECKING:
    from sparse_eval.policies.base import Policy

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


def check_budget(policy: Policy, budget: Any) -> None:
    """Tokens, where the policy needs them: ValueError in one line for anything else."""
    name = type(policy).__name__
    if budget is None and not (policy.adaptive or policy.dense):
        raise ValueError(f"{name} needs a budget in tokens, got None")
    if budget is not None and policy.adaptive:
        raise ValueError(
            f"{name} is adaptive and takes no budget (its cap is max_tokens), got budget={budget!r}"
        )
    check_tokens(budget)
    if budget is not None and not policy.dense:
        policy.checked(budget)


def check_tokens(budget: Any) -> None:
    """ValueError for what is neither None nor a whole number of tokens."""
    is_whole = isinstance(budget, int) and not isinstance(budget, bool)
    if budget is not None and (not is_whole or budget < 1):
        raise ValueError(f"budget must be tokens here (an integer >= 1), got {budget!r}")
