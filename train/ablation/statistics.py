"""What a sweep says, as numbers with intervals: learning-rate sensitivity, paired differences, interactions."""

from typing import NamedTuple

import numpy as np
from jaxtyping import Float
from scipy import stats

CONFIDENCE = 0.95


class Interval(NamedTuple):
    """A mean and its 95 % confidence interval; of a single value, or of values that are not all finite, it is unbounded."""

    mean: float
    low: float
    high: float

    @property
    def verdict(self) -> str:
        """What a mean difference shows."""
        if not np.isfinite(self.mean):
            return "not finite"
        if not np.isfinite(self.low):
            return "one seed cannot show a difference"
        return "no difference shown" if self.low <= 0 <= self.high else "a difference beyond chance"

    def __str__(self) -> str:
        return f"{self.mean:.4f} " + (f"[{self.low:.4f}, {self.high:.4f}]" if np.isfinite(self.low) else "(no interval)")


def interval(values: Float[np.ndarray, "n"]) -> Interval:
    """Student's interval of the mean of independent values (one per seed): mean +- t(n - 1) s / sqrt(n)."""
    values = np.asarray(values, np.float64)
    with np.errstate(invalid="ignore"):  # inf - inf
        mean = float(values.mean())
    if len(values) < 2 or not np.isfinite(mean):
        return Interval(mean, -np.inf, np.inf)
    half = float(stats.t.ppf((1 + CONFIDENCE) / 2, len(values) - 1) * values.std(ddof=1) / np.sqrt(len(values)))
    return Interval(mean, mean - half, mean + half)


def sensitivity(losses: Float[np.ndarray, "rates"]) -> float:
    """Learning-rate sensitivity: mean over the swept rates of loss - least loss, in nats per token; the losses are at most that at init.

    Infinite where no loss is finite. Source: Wortsman et al. 2023, arXiv 2309.14322, section 2.2.
    """
    least = np.nanmin(losses)
    return float(np.nanmean(losses - least)) if np.isfinite(least) else np.inf


def compare(ours: Float[np.ndarray, "seeds"], theirs: Float[np.ndarray, "seeds"]) -> Interval:
    """The mean of theirs - ours over the same seeds: positive where ours is the lower."""
    with np.errstate(invalid="ignore"):  # inf - inf
        return interval(np.asarray(theirs) - np.asarray(ours))


def interaction(losses: Float[np.ndarray, "2 2 seeds"]) -> Interval:
    """(11 - 10) - (01 - 00), paired by seed: what the second change does more on top of the first than alone."""
    losses = np.asarray(losses, np.float64)
    with np.errstate(invalid="ignore"):  # inf - inf
        return interval((losses[1, 1] - losses[1, 0]) - (losses[0, 1] - losses[0, 0]))
