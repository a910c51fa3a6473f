"""The numbers of a report against references of their own; losses here are multiples of 2^-10 below 8, so that sums of them are exact."""

import math

import numpy as np
import pytest
from scipy import stats

from train.ablation.statistics import compare, interaction, interval, sensitivity

DOUBLE = 2.0**-52


def losses(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(1024, 4096, shape) / 1024


@pytest.mark.parametrize("count", [2, 3, 5, 40])
def test_the_interval_is_students(count):
    """Mean and bounds are those of scipy's t interval at 95 % with count - 1 degrees of freedom."""
    values = losses(count, seed=count)
    low, high = stats.t.interval(0.95, count - 1, loc=np.mean(values), scale=stats.sem(values))
    found = interval(values)
    assert found.mean == pytest.approx(math.fsum(values) / count, rel=4 * DOUBLE)
    # the quantile is found by iteration to some 1e-12 of itself; everything else is a handful of roundings
    assert (found.low, found.high) == pytest.approx((low, high), rel=0, abs=1e-11 * (high - low))


def test_the_interval_of_two_values_in_closed_form():
    """Of two values the quantile is the Cauchy distribution's, tan(0.475 pi), and the standard error half their distance."""
    found = interval(np.asarray([1.0, 2.0]))
    half = math.tan(0.475 * math.pi) / 2
    assert found == pytest.approx((1.5, 1.5 - half, 1.5 + half), rel=1e-11)
    assert found.verdict == "no difference shown"


def test_one_value_bounds_nothing():
    """A single seed has a mean and an unbounded interval, said in words."""
    found = interval(np.asarray([0.75]))
    assert found == (0.75, -math.inf, math.inf) and "no interval" in str(found) and "one seed" in found.verdict


def test_the_interval_covers_as_often_as_it_says():
    """Over 4,000 draws of five normal values, 95 % of the intervals hold the mean, within five standard errors of that share."""
    draws = np.random.default_rng(1).normal(3.0, 2.0, (4000, 5))
    share = np.mean([found.low <= 3.0 <= found.high for found in map(interval, draws)])
    assert abs(share - 0.95) < 5 * math.sqrt(0.95 * 0.05 / 4000)


@pytest.mark.parametrize(("swept", "expected"), [
    ([2.5, 2.5, 2.5], 0.0),
    ([2.0, 2.5, 4.0], 2.5 / 3),  # 0 + 0.5 + 2
    ([3.0], 0.0),
    ([np.nan, 2.0, 3.0], 0.5),  # a run that is missing counts nowhere
])
def test_sensitivity_by_hand(swept, expected):
    """Sensitivity is the mean excess over the best: zero where every rate does equally well."""
    assert sensitivity(np.asarray(swept)) == pytest.approx(expected, rel=4 * DOUBLE)


def test_a_comparison_turned_round_changes_sign():
    """Ours against theirs is minus theirs against ours, bound for bound."""
    ours, theirs = losses(5, seed=1), losses(5, seed=2)
    there, back = compare(ours, theirs), compare(theirs, ours)
    assert (there.mean, there.low, there.high) == (-back.mean, -back.high, -back.low)
    assert there.mean == pytest.approx(np.mean(theirs) - np.mean(ours), rel=1e-12)


def test_a_comparison_is_paired():
    """What a seed adds to both sides changes nothing, however large; a constant gap has an interval of no width around it."""
    ours, theirs = losses(5, seed=3), losses(5, seed=4)
    shift = np.asarray([0.0, 64.0, -32.0, 7.0, 1000.0])
    assert compare(ours + shift, theirs + shift) == compare(ours, theirs)
    assert compare(ours + shift, ours + shift + 0.125) == (0.125, 0.125, 0.125)
    assert "no difference" not in compare(ours + shift, ours + shift + 0.125).verdict


def test_an_additive_table_has_no_interaction():
    """Where first change, second change and seed add up, the interaction is zero with no width; a planted one comes back as planted."""
    table = np.asarray([0.0, 0.5])[:, None, None] + np.asarray([0.0, -0.25])[None, :, None] + losses(4, seed=5)
    assert interaction(table) == (0.0, 0.0, 0.0)
    planted = np.asarray([0.125, 0.25, 0.375, 0.5])
    table[1, 1] += planted
    assert interaction(table) == interval(planted)
