"""Shares of successes: intervals, paired comparisons, and the smallest difference they can resolve.

Standard library only. Sources: Wilson 1927 (doi 10.2307/2276774), McNemar 1947 in its exact form,
Tango 1998 (doi 10.1002/(SICI)1097-0258(19980430)17:8<891::AID-SIM780>3.0.CO;2-B).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from statistics import NormalDist

NAN = float("nan")


@dataclass(frozen=True)
class Interval:
    low: float
    high: float


def wilson(successes: float, n: int, confidence: float = 0.95) -> Interval:
    """Wilson's two-sided score interval of a share; NaN for n = 0. Of a sum of scores in [0, 1],
    which vary no more than successes do, it is at least as wide as it need be."""
    if n == 0:
        return Interval(NAN, NAN)
    z = NormalDist().inv_cdf(0.5 + confidence / 2)
    share = successes / n
    center = (share + z * z / (2 * n)) / (1 + z * z / n)
    half = z / (1 + z * z / n) * math.sqrt(share * (1 - share) / n + z * z / (4 * n * n))
    # at shares of 0 and 1 the bound is the share itself, rounding aside
    return Interval(max(0.0, min(share, center - half)), min(1.0, max(share, center + half)))


def wilson_lower(successes: float, n: int, confidence: float = 0.95) -> float:
    """The one-sided lower bound of a share."""
    return wilson(successes, n, 2 * confidence - 1).low


@dataclass(frozen=True)
class Pairs:
    """Two arms on the same n samples. only_first, only_second: samples that one alone got right."""

    n: int
    both: int
    only_first: int
    only_second: int

    @staticmethod
    def of(outcomes: Iterable[tuple[bool, bool]]) -> Pairs:
        pairs = [(bool(a), bool(b)) for a, b in outcomes]
        return Pairs(
            len(pairs),
            pairs.count((True, True)),
            pairs.count((True, False)),
            pairs.count((False, True)),
        )

    @property
    def difference(self) -> float:
        """Second's share minus first's."""
        return (self.only_second - self.only_first) / self.n if self.n else NAN

    @property
    def p_value(self) -> float:
        """McNemar's exact two-sided test that the arms are equally often right; NaN for n = 0."""
        discordant = self.only_first + self.only_second
        if not self.n:
            return NAN
        tail = sum(
            math.comb(discordant, k) for k in range(min(self.only_first, self.only_second) + 1)
        )
        return min(1.0, 2 * tail / 2**discordant)

    def interval(self, confidence: float = 0.95) -> Interval:
        """Tango's two-sided score interval of `difference`; NaN for n = 0."""
        if not self.n:
            return Interval(NAN, NAN)
        z = NormalDist().inv_cdf(0.5 + confidence / 2)
        at = self.difference
        return Interval(
            root(lambda x: self._score(x) - z, -1.0, at),
            root(lambda x: self._score(x) + z, at, 1.0),
        )

    def _score(self, difference: float) -> float:
        """How many standard errors the data lie above a supposed difference."""
        n, b, c = self.n, self.only_second, self.only_first
        # the share of only_first pairs that is likeliest under the supposed difference
        a2 = 2 * n
        a1 = -b - c + (2 * n - b + c) * difference
        a0 = -c * difference * (1 - difference)
        share = (math.sqrt(max(0.0, a1 * a1 - 4 * a2 * a0)) - a1) / (2 * a2)
        variance = n * (2 * share + difference * (1 - difference))
        above = b - c - n * difference
        if variance <= 0:
            return math.copysign(math.inf, above) if above else 0.0
        return above / math.sqrt(variance)


def root(falling: Callable[[float], float], low: float, high: float) -> float:
    """Where a falling function crosses zero in [low, high], by bisection."""
    for _ in range(80):
        middle = (low + high) / 2
        low, high = (middle, high) if falling(middle) > 0 else (low, middle)
    return (low + high) / 2


def smallest_resolvable(n: int, significance: float = 0.05) -> float:
    """The smallest difference that McNemar's exact test can tell from none on n pairs: as many
    one-sided discordant pairs as it takes, over n. NaN where even n of n would not do."""
    needed = math.ceil(1 - math.log2(significance))
    return needed / n if n >= needed else NAN
