"""Metrics merge as their type says; spikes are counted as OLMo 2 counts them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as some
from hypothesis.extra.numpy import arrays

from tests.train.small import FLOAT32, SAME
from train.metrics import Last, Max, Mean, Rms, is_metric, spike_score

LAYERS = 2
numbers = some.floats(-1e3, 1e3, width=32)
part = some.integers(1, 3).flatmap(lambda n: arrays(np.float32, (LAYERS, n), elements=numbers))
groups = some.lists(some.lists(part, min_size=1, max_size=3), min_size=1, max_size=3)

WHOLE = {
    Mean: lambda x: x.astype(np.float64).mean(1),
    Rms: lambda x: np.sqrt(np.square(x, dtype=np.float64).mean(1)),
    Max: lambda x: x.max(1),
}


def merge(metrics: list):
    """Metrics of several parts as one."""
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *metrics).collapse()


@pytest.mark.parametrize("kind", WHOLE, ids=lambda kind: kind.__name__)
@settings(max_examples=40, deadline=None)
@given(grouped=groups)
def test_any_grouping_gives_the_whole(kind, grouped):
    """Merging the parts of a batch in any grouping, parts of unequal size among them, gives the value of the whole batch per layer."""
    of = lambda x: kind.of(jnp.asarray(x), axis=1)
    merged = merge([merge([of(x) for x in group]) for group in grouped])
    whole = np.concatenate([x for group in grouped for x in group], axis=1)
    bound = whole.size * FLOAT32 * np.abs(whole).max()  # of a float32 sum
    if kind is Rms:
        bound += np.sqrt(np.finfo(np.float32).tiny)  # squares below the smallest float32 vanish
    np.testing.assert_allclose(merged.value(), WHOLE[kind](whole), rtol=SAME, atol=bound)


def test_last_keeps_what_came_last():
    """Last forgets all parts but the last, leaf by leaf."""
    merged = merge([Last.of({"a": jnp.asarray([1.0, 2.0])}), Last.of({"a": jnp.asarray([3.0, 4.0])})])
    np.testing.assert_array_equal(merged.value()["a"], [3.0, 4.0])


def test_axes_that_are_not_reduced_remain():
    """A reducer over batch and time leaves one value per head."""
    x = np.arange(24, dtype=np.float32).reshape(2, 3, 4)
    np.testing.assert_allclose(Mean.of(jnp.asarray(x), axis=(0, 1)).value(), x.mean((0, 1)), rtol=SAME)
    np.testing.assert_array_equal(Max.of(jnp.asarray(x), axis=(0, 1)).value(), x.max((0, 1)))


def test_a_metric_is_known_by_its_type():
    """Every metric is one to `is_metric`, an array is none."""
    x = jnp.ones(3)
    assert all(is_metric(kind.of(x)) for kind in (Mean, Rms, Max, Last)) and not is_metric(x)


LEAST = 20


@pytest.mark.parametrize("value", [0.0, 0.1, 1 / 3, 3.3, 1e3, 123456.7])
def test_a_constant_series_has_no_spikes(value):
    """A gradient norm that never changes never spikes, however long the run."""
    assert spike_score(np.full(6000, value)) == 0.0


@pytest.mark.parametrize("seed", range(3))
def test_gaussian_noise_has_no_spikes(seed):
    """Seven standard deviations are beyond what 3,000 normal numbers reach."""
    assert spike_score(np.random.default_rng(seed).normal(5.0, 1.0, 3000)) == 0.0


@pytest.mark.parametrize(("places", "length"), [((100,), 400), ((LEAST,), 400), ((2500,), 3000), ((100, 300), 1000)])
def test_each_planted_spike_counts_once(places, length):
    """k values 50 standard deviations above the rest are k of the n - 20 values judged, in percent."""
    series = np.random.default_rng(0).normal(5.0, 0.1, length)
    series[list(places)] += 5.0
    assert spike_score(series) == pytest.approx(100 * len(places) / (length - LEAST))


def test_the_first_values_are_not_judged():
    """A spike within the first 20 values, and a series no longer than these, score nothing."""
    series = np.random.default_rng(0).normal(5.0, 0.1, 400)
    series[LEAST - 1] += 5.0
    assert spike_score(series) == 0.0 and spike_score(series[:LEAST]) == 0.0


def test_a_fall_is_no_spike():
    """Only values above the mean count."""
    series = np.random.default_rng(0).normal(5.0, 0.1, 400)
    series[200] -= 4.9
    assert spike_score(series) == 0.0


def test_the_window_forgets():
    """A plateau far below the present level does not count once it is more than the window of values ago."""
    series = np.concatenate((np.random.default_rng(0).normal(1.0, 0.01, 50), np.random.default_rng(1).normal(9.0, 0.1, 200)))
    series[200] += 1.0  # 10 standard deviations of the plateau, none of both plateaus together
    judged = 250 - LEAST
    with_all = spike_score(series, window=1000)
    assert spike_score(series, window=50) - with_all == pytest.approx(100 / judged)
