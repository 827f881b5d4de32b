"""Differences between two runs on the same samples: an interval and an exact test.

Source: Fisher 1935, The Design of Experiments, section 21 (sign flips of paired differences); Holm
1979, https://www.jstor.org/stable/4615733. Student's quantile is found by bisection of its CDF.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass

NAN = float("nan")
EXACT_UP_TO = 14
DRAWS = 20_000


@dataclass(frozen=True)
class Paired:
    """mean of b - a over n samples; low, high: 95 % by Student's t; p: two-sided sign-flip test
    (exact up to 14 samples). NaN where n is too small: intervals and tests need two samples."""

    n: int
    mean: float
    low: float
    high: float
    p: float


def paired(first: Sequence[float], second: Sequence[float]) -> Paired:
    """Raises ValueError for sequences of different lengths or without samples."""
    if len(first) != len(second) or not first:
        raise ValueError(
            f"expected as many samples twice, at least one, got {len(first)}, {len(second)}"
        )
    differences = [b - a for a, b in zip(first, second, strict=True)]
    n, mean = len(differences), sum(differences) / len(differences)
    if n < 2:
        return Paired(n, mean, NAN, NAN, NAN)
    spread = math.sqrt(sum((d - mean) ** 2 for d in differences) / (n - 1) / n)
    half = t_quantile(0.975, n - 1) * spread
    return Paired(n, mean, mean - half, mean + half, sign_flip_p(differences))


def sign_flip_p(differences: Sequence[float]) -> float:
    """How often sums of randomly signed differences are at least as far from zero."""
    observed = abs(sum(differences)) * (1 - 1e-12)
    n = len(differences)
    if n <= EXACT_UP_TO:
        sums = [
            sum(s * d for s, d in zip(signs, differences, strict=True))
            for signs in itertools.product((1, -1), repeat=n)
        ]
        return sum(abs(x) >= observed for x in sums) / len(sums)
    draw = random.Random(0)
    hits = sum(
        abs(sum(d if draw.random() < 0.5 else -d for d in differences)) >= observed
        for _ in range(DRAWS)
    )
    return (hits + 1) / (DRAWS + 1)


def least_p(n: int) -> float:
    """The smallest p-value that n pairs can give: all differences of one sign."""
    return 2 / 2**n if n >= 2 else NAN


def holm(p_values: Sequence[float]) -> list[float]:
    """p-values adjusted for looking at all of them; NaN stays NaN and is not counted."""
    known = sorted((p, i) for i, p in enumerate(p_values) if not math.isnan(p))
    adjusted, worst = [NAN] * len(p_values), 0.0
    for rank, (p, i) in enumerate(known):
        worst = max(worst, min(1.0, p * (len(known) - rank)))
        adjusted[i] = worst
    return adjusted


def t_quantile(share: float, freedom: int) -> float:
    """Student's t: the value that `share` (above 0.5) of the distribution lies below."""
    low, high = 0.0, 1000.0
    for _ in range(80):
        middle = (low + high) / 2
        low, high = (middle, high) if t_cdf(middle, freedom) < share else (low, middle)
    return (low + high) / 2


def t_cdf(t: float, freedom: int) -> float:
    """For t >= 0: Abramowitz and Stegun 26.7.3, 26.7.4."""
    angle = math.atan(t / math.sqrt(freedom))
    cosine, sine = math.cos(angle), math.sin(angle)
    if freedom % 2:
        term, total = cosine, cosine if freedom > 1 else 0.0
        for k in range(3, freedom - 1, 2):
            term *= cosine * cosine * (k - 1) / k
            total += term
        both = 2 / math.pi * (angle + sine * total)
    else:
        term, total = 1.0, 1.0
        for k in range(2, freedom - 1, 2):
            term *= cosine * cosine * (k - 1) / k
            total += term
        both = sine * total
    return 0.5 + both / 2
