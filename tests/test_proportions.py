"""Intervals and paired tests against published or brute-force values."""

from __future__ import annotations

import math

import numpy as np
import pytest

from sparse_eval.reporting.proportions import Pairs, smallest_resolvable, wilson, wilson_lower


def test_wilson_against_published_values():
    # Newcombe 1998, Statistics in Medicine 17:857, table I, method 3
    for successes, n, low, high in [
        (81, 263, 0.2553, 0.3662),
        (15, 148, 0.0624, 0.1605),
        (0, 20, 0.0, 0.1611),
        (1, 29, 0.0061, 0.1718),
    ]:
        found = wilson(successes, n)
        assert found.low == pytest.approx(low, abs=5e-5)
        assert found.high == pytest.approx(high, abs=5e-5)
    assert math.isnan(wilson(0, 0).low)


def test_wilson_lower_is_the_one_sided_bound():
    n = 20
    lower = wilson_lower(n, n)
    assert lower == pytest.approx(n / (n + 1.6448536**2), abs=1e-6)
    assert lower > wilson(n, n).low


def test_mcnemar_against_the_binomial_by_hand():
    assert Pairs(20, 10, 6, 0).p_value == pytest.approx(2 / 64)
    assert Pairs(20, 10, 5, 0).p_value == pytest.approx(2 / 32)
    assert Pairs(20, 10, 3, 3).p_value == 1.0
    assert Pairs(20, 20, 0, 0).p_value == 1.0
    assert math.isnan(Pairs(0, 0, 0, 0).p_value)


def test_pairs_are_counted():
    outcomes = [(True, True), (True, False), (False, True), (False, False), (True, False)]
    pairs = Pairs.of(outcomes)
    assert (pairs.n, pairs.both, pairs.only_first, pairs.only_second) == (5, 1, 2, 1)
    assert pairs.difference == pytest.approx(-0.2)


def test_interval_of_no_discordant_pairs_has_its_closed_form():
    found = Pairs(50, 50, 0, 0).interval()
    edge = 1.959964**2 / (50 + 1.959964**2)
    assert (found.low, found.high) == pytest.approx((-edge, edge), abs=1e-6)


@pytest.mark.parametrize(
    ("n", "first", "second"), [(50, 2, 12), (30, 1, 0), (44, 5, 9), (20, 0, 6)]
)
def test_interval_against_brute_force_likelihood(n, first, second):
    """Tango's statistic with the nuisance share found on a grid instead of in closed form."""
    found = Pairs(n, 0, first, second).interval()
    rest = n - first - second
    for bound in (found.low, found.high):
        low = max(0.0, -bound)
        share_first = np.linspace(low + 1e-9, (1 - bound) / 2 - 1e-9, 400_001)
        share_second = share_first + bound
        log_likelihood = (
            first * np.log(share_first)
            + second * np.log(share_second)
            + rest * np.log(np.clip(1 - share_first - share_second, 1e-300, None))
        )
        best = share_first[np.argmax(log_likelihood)]
        variance = n * (2 * best + bound - bound**2)
        z = (second - first - n * bound) / math.sqrt(variance)
        assert abs(z) == pytest.approx(1.959964, abs=2e-3)


def test_smallest_resolvable_difference_is_the_smallest_that_is_significant():
    for n in (6, 20, 100):
        needed = round(smallest_resolvable(n) * n)
        assert Pairs(n, 0, needed, 0).p_value < 0.05 <= Pairs(n, 0, needed - 1, 0).p_value
    assert math.isnan(smallest_resolvable(5))
