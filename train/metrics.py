"""Metrics that merge: how two parts of a batch combine is carried in the type.

Each is made from an array by `of`, holds arrays with any leading axes (layers) or, in their place, shapes and shardings, and has
`collapse` (merge along the first axis) and `value`.
"""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Mean:
    """A mean, as total and count."""

    total: Any
    count: Any

    @classmethod
    def of(cls, x: Float[Array, "..."], axis=None) -> "Mean":
        """The mean of x over `axis` (default: all)."""
        total = jnp.sum(x.astype(jnp.float32), axis)
        return cls(total, jnp.full(total.shape, x.size / max(total.size, 1), jnp.float32))

    def collapse(self) -> "Mean":
        return type(self)(self.total.sum(0), self.count.sum(0))

    def value(self) -> Float[Array, "..."]:
        return self.total / self.count


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Rms(Mean):
    """A root mean square, as the total of squares and count."""

    @classmethod
    def of(cls, x: Float[Array, "..."], axis=None) -> "Rms":
        return super().of(jnp.square(x.astype(jnp.float32)), axis)

    def value(self) -> Float[Array, "..."]:
        return jnp.sqrt(self.total / self.count)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Max:
    """A maximum."""

    largest: Any

    @classmethod
    def of(cls, x: Float[Array, "..."], axis=None) -> "Max":
        return cls(jnp.max(x.astype(jnp.float32), axis))

    def collapse(self) -> "Max":
        return Max(self.largest.max(0))

    def value(self) -> Float[Array, "..."]:
        return self.largest


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Last:
    """Whatever came last."""

    last: Any

    @classmethod
    def of(cls, x) -> "Last":
        return cls(x)

    def collapse(self) -> "Last":
        return Last(jax.tree.map(lambda leaf: leaf[-1], self.last))

    def value(self):
        return self.last


def is_metric(x) -> bool:
    return isinstance(x, (Mean, Max, Last))


def collapse(records):
    """The records of several parts of a batch, stacked along the first axis, merged into one."""
    return jax.tree.map(lambda metric: metric.collapse(), records, is_leaf=is_metric)


def spike_score(series: np.ndarray, sigmas: float = 7.0, window: int = 1000, least: int = 20) -> float:
    """Percent of values that lie at least `sigmas` standard deviations above the mean of the (up to) `window` values before them.

    The first `least` values are not judged, and values that are not finite (their steps diverged or were skipped) are left out.
    Source: OLMo 2, arXiv 2501.00656, section 3 (7 standard deviations, window 1,000).
    """
    series = series[np.isfinite(series)]
    return float(100 * np.mean(spiking(series, sigmas, window, least)[least:])) if len(series) > least else 0.0


def spike_score_of_steps(loss: np.ndarray, grad_norm: np.ndarray, sigmas: float = 6.0, window: int = 128) -> float:
    """Percent of steps, of all, at which the loss or the gradient norm lies at least `sigmas` standard deviations above the mean of the
    `window` values before it, of which none may be missing.

    Source: OLMo-core, StabilityMonitorCallback (6 standard deviations, window 128).
    """
    finite = np.isfinite(loss) & np.isfinite(grad_norm)
    either = np.logical_or(*(spiking(series[finite], sigmas, window, window) for series in (loss, grad_norm)))
    return float(100 * np.mean(either)) if len(either) else 0.0


def spiking(series: Float[np.ndarray, "n"], sigmas: float, window: int, least: int) -> Bool[np.ndarray, "n"]:
    """Which values lie at least `sigmas` standard deviations above the mean of the (up to) `window`, but at least `least`, before them."""
    if len(series) <= least:
        return np.zeros(len(series), bool)
    x = np.asarray(series, np.float64) - np.median(series)  # sums of squares of what lies far from zero cancel
    sums, squares = (np.concatenate(([0.0], np.cumsum(y))) for y in (x, x * x))
    at = np.arange(least, len(x))
    start = np.maximum(at - window, 0)
    n = at - start
    mean = (sums[at] - sums[start]) / n
    deviation = np.sqrt(np.maximum((squares[at] - squares[start]) / n - mean**2, 0))
    return np.concatenate((np.zeros(least, bool), x[at] >= mean + sigmas * np.maximum(deviation, 1e-12)))
