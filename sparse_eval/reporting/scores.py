"""Two arms' scores on the same documents: difference, interval, test, and what to say of it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from sparse_eval.reporting.paired import paired, t_quantile
from sparse_eval.reporting.proportions import Pairs, smallest_resolvable

SIGNIFICANCE = 0.05
MARGIN = 0.1
"""A score worse than dense's by no more than this is not inferior."""
WORSE_AND_HIGHER = "above dense, worse"
"""Of a score that is better when lower."""
NAN = float("nan")


@dataclass(frozen=True)
class Difference:
    """Second's mean less first's over n documents.

    low, high: 95 %, Tango's for successes and failures, Student's else, the rule of three's where
    documents do not differ; within [-1, 1] where scores are in [0, 1]. low_90, high_90: the ends of
    one-sided 95 % intervals. p: exact McNemar, or sign flips. resolvable: the smallest difference
    that the test can tell from none, NaN where there is none or the scores are not successes."""

    n: int
    mean: float
    low: float
    high: float
    low_90: float
    high_90: float
    p: float
    resolvable: float


def difference(first: Sequence[float], second: Sequence[float]) -> Difference:
    """Documents that either arm has no score of its own for are left out."""
    both = [(a, b) for a, b in zip(first, second, strict=True) if a == a and b == b]
    if not both:
        return Difference(0, NAN, NAN, NAN, NAN, NAN, NAN, NAN)
    if all(x in (0, 1) for pair in both for x in pair):
        pairs = Pairs.of((bool(a), bool(b)) for a, b in both)
        interval, narrower = pairs.interval(), pairs.interval(1 - 2 * SIGNIFICANCE)
        return Difference(
            pairs.n,
            pairs.difference,
            interval.low,
            interval.high,
            narrower.low,
            narrower.high,
            pairs.p_value,
            smallest_resolvable(pairs.n, SIGNIFICANCE),
        )
    found = paired([a for a, _ in both], [b for _, b in both])
    is_share = all(0 <= x <= 1 for pair in both for x in pair)
    half = (found.high - found.low) / 2
    if half == 0:  # no spread says nothing of the spread: the rule of three, for scores in [0, 1]
        half = min(1.0, 3 / found.n) if is_share else NAN
    half_90 = half * narrower_by(found.n)
    least, most = (-1.0, 1.0) if is_share else (-math.inf, math.inf)
    low, high, low_90, high_90 = (
        end if math.isnan(end) else min(most, max(least, end))
        for end in (
            found.mean - half,
            found.mean + half,
            found.mean - half_90,
            found.mean + half_90,
        )
    )
    return Difference(found.n, found.mean, low, high, low_90, high_90, found.p, NAN)


def narrower_by(n: int) -> float:
    """A one-sided 95 % interval of a mean's half-width over a two-sided one's."""
    return t_quantile(0.95, n - 1) / t_quantile(0.975, n - 1) if n > 1 else NAN


def verdict(
    found: Difference, p: float, *, gated: bool, higher_is_better: bool, gate_ran: bool = True
) -> str:
    """In words that fit the score's direction. p: corrected for the tasks looked at."""
    if gated:
        return "not ranked: dense gate" + ("" if gate_ran else " not run")
    if not found.n:
        return "not ranked: its score is no mean over documents"
    if math.isnan(p) or found.n < math.ceil(1 - math.log2(SIGNIFICANCE)):
        return f"not ranked: n = {found.n}"
    if p >= SIGNIFICANCE:
        worst = found.low_90 if higher_is_better else -found.high_90
        return f"not inferior ({MARGIN:g})" if worst > -MARGIN else "no difference resolved"
    if (found.mean < 0) == higher_is_better:
        return "below dense" if higher_is_better else WORSE_AND_HIGHER
    return f"{'ABOVE' if higher_is_better else 'BELOW'} dense: suspect the set-up"


def mark(verdict: str) -> str:
    """▼ where a verdict says worse than dense, ▲ where better, else nothing. Rows of older runs say
    "below" of whatever is worse."""
    if verdict in ("below dense", WORSE_AND_HIGHER):
        return "▼"
    return "▲" if verdict.endswith("dense: suspect the set-up") else ""
