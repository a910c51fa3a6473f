"""Which values are spikes: far above the mean of those before them, judged on the host line by line, or inside a step."""

from collections import deque
from collections.abc import Iterable, Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float

from configs.schema import Spikes

SINGLE = ("train/loss", "train/grad_norm", "train/update_rms")
LARGEST_LOGIT = "attention_logit_max"
LEAST = 20
"""Values that a value is compared with at least."""
FLAT = 1e-12
"""The least deviation that a distance is measured in."""

Recent = dict[str, Float[Array, "n"]]
"""The last finite values of each of SINGLE, the newest last, NaN where there were none yet."""


def watched(line: Mapping[str, Any]) -> dict[str, float]:
    """The numbers of a line of metrics.jsonl that are judged, those that are finite: single ones, and the largest logit of all layers."""
    found = {key: float(line[key]) for key in SINGLE if key in line}
    logits = [float(x) for x in line.get(LARGEST_LOGIT, ()) if x is not None]
    if logits:
        found[LARGEST_LOGIT] = max(logits)
    return {key: value for key, value in found.items() if np.isfinite(value)}


class Detector:
    """Judges lines of metrics.jsonl, each by the lines before it alone: a resumed run that reads its lines decides as if never stopped, and
    every process decides the same."""

    def __init__(self, config: Spikes, lines: Iterable[Mapping[str, Any]] = ()):
        self.config = config
        self.before: dict[str, deque[float]] = {}
        for line in lines:
            self.judge(line)

    def judge(self, line: Mapping[str, Any]) -> dict[str, float]:
        """The watched numbers that spike, with their distance from the mean of those before, in standard deviations."""
        found = {}
        for key, value in watched(line).items():
            before = self.before.setdefault(key, deque(maxlen=self.config.window))
            if len(before) >= LEAST:
                distance = (value - np.mean(before)) / max(np.std(before), FLAT)
                if distance >= self.config.deviations:
                    found[key] = float(f"{distance:.4g}")
            before.append(value)
        return found


def no_values(config: Spikes) -> Recent:
    """What a step is judged by before the first one; nothing unless spikes.action is skip."""
    return {key: jnp.full(config.window, jnp.nan) for key in SINGLE} if config.action == "skip" else {}


def judge(config: Spikes, recent: Recent, values: Mapping[str, Float[Array, ""]]) -> tuple[Bool[Array, ""], Recent]:
    """Whether one of a step's values spikes, by the rule of `Detector` in float32, and the recent values with these."""
    spikes, after = jnp.zeros((), bool), {}
    for key, before in recent.items():
        there, value = ~jnp.isnan(before), values[key]
        distance = (value - before.mean(where=there)) / jnp.maximum(before.std(where=there), FLAT)
        judged = jnp.isfinite(value)
        spikes |= judged & (there.sum(dtype=jnp.int32) >= LEAST) & (distance >= config.deviations)
        after[key] = jnp.where(judged, jnp.append(before[1:], value), before)
    return spikes, after
