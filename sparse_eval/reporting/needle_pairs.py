"""Arms of a needle run compared on the prompts both answered, never below what n can resolve."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd

from sparse_eval.reporting.proportions import Pairs, smallest_resolvable

SIGNIFICANCE = 0.05
MARGIN = 0.1
"""A share of correct answers less than dense's by no more than this is not inferior."""


@dataclass(frozen=True)
class Arm:
    """A policy's label and its budget in tokens, None where it has none."""

    policy: str
    budget: float | None

    @staticmethod
    def of(policy: Any, budget: Any) -> Arm:
        return Arm(str(policy), None if pd.isna(budget) else float(budget))


Answers = Mapping[Arm, pd.Series]
"""By arm: whether each prompt's answer is correct, indexed by prompt."""


def pairs_of(answers: Answers, first: Arm, second: Arm) -> Pairs:
    """The two arms on the prompts that both answered."""
    if first not in answers or second not in answers:
        return Pairs(0, 0, 0, 0)
    both = pd.concat([answers[first], answers[second]], axis=1, join="inner")
    return Pairs.of(both.itertuples(index=False, name=None))


def comparison(answers: Answers, dense: Arm, arm: Arm, *, gate_ran: bool = True) -> dict[str, Any]:
    """Columns of an arm against dense; difference: its share minus dense's."""
    pairs = pairs_of(answers, dense, arm)
    interval = pairs.interval()
    return {
        "pairs": pairs.n,
        "difference": pairs.difference,
        "diff_low": interval.low,
        "diff_high": interval.high,
        "p_value": pairs.p_value,
        "resolvable": smallest_resolvable(pairs.n, SIGNIFICANCE),
        "verdict": verdict(pairs, gate_ran=gate_ran),
    }


def verdict(pairs: Pairs, *, gate_ran: bool = True) -> str:
    if not pairs.n:
        return "not ranked: dense gate" + ("" if gate_ran else " not run")
    if math.isnan(smallest_resolvable(pairs.n, SIGNIFICANCE)):
        return f"not ranked: n = {pairs.n}"
    if pairs.p_value >= SIGNIFICANCE:
        lower = pairs.interval(1 - 2 * SIGNIFICANCE).low  # one-sided
        return f"not inferior ({MARGIN:g})" if lower > -MARGIN else "no difference resolved"
    return "below dense" if pairs.difference < 0 else "ABOVE dense: suspect the set-up"


def rank_of(answers: Answers, arm: Arm, rivals: Sequence[Arm]) -> float:
    """1 + the rivals that are significantly better on the same prompts; NaN without enough."""
    if arm not in answers or math.isnan(smallest_resolvable(len(answers[arm]), SIGNIFICANCE)):
        return math.nan
    compared = [pairs_of(answers, arm, rival) for rival in rivals if rival != arm]
    return 1.0 + sum(p.difference > 0 and p.p_value < SIGNIFICANCE for p in compared)
