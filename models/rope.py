"""Rotary position embedding (Su et al. 2021, arXiv 2104.09864) and the ROPE_SCALINGS table."""

import math
from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from configs.attention import Rope, RopeScaling
from models.precision import at_least_float32


class Frequencies(NamedTuple):
    """Inverse frequencies theta^(-2i/n), i < n/2, in radians per token (float64), and what they are made of."""

    inverse: Float[np.ndarray, "n/2"]
    theta: float
    n: int

    def rebased(self, stretch):
        """The inverse frequencies at base theta stretch^(n / (n - 2)): the lowest divided by the stretch, the highest untouched."""
        return self.inverse * stretch ** (-np.arange(0, self.n, 2) / max(self.n - 2, 1))


def yarn(of: Frequencies, scaling: RopeScaling, length) -> tuple:
    """inverse (ramp / factor + 1 - ramp), the ramp from beta_fast turns to beta_slow; Peng et al. 2023, arXiv 2309.00071."""
    dimension = lambda turns: of.n * math.log(scaling.original / (2 * math.pi * turns)) / (2 * math.log(of.theta))
    low, high = dimension(scaling.beta_fast), dimension(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = (min(max(end, 0), of.n - 1) for end in (low, high))
    ramp = np.clip((np.arange(of.n // 2) - low) / (high - low or 1e-3), 0, 1)
    magnitude = lambda weight: 0.1 * weight * math.log(scaling.factor) + 1
    factor = magnitude(1.0) if scaling.mscale is None else magnitude(scaling.mscale) / magnitude(scaling.mscale_all_dim)
    return of.inverse * (ramp / scaling.factor + 1 - ramp), factor


def llama3(of: Frequencies, scaling: RopeScaling, length) -> tuple:
    """inverse (s + (1 - s) / factor), s rising over the turns from low_frequency to high_frequency; Llama 3, arXiv 2407.21783."""
    low, high = scaling.low_frequency, scaling.high_frequency
    turns = scaling.original * of.inverse / (2 * math.pi)
    s = np.clip((turns - low) / (high - low), 0, 1)
    return of.inverse * (s + (1 - s) / scaling.factor), 1.0


def longrope(of: Frequencies, scaling: RopeScaling, length) -> tuple:
    """inverse / long in calls of more than the original positions, else inverse / short; Ding et al. 2024, arXiv 2402.13753."""
    inverse = jnp.where(length > scaling.original, of.inverse / np.asarray(scaling.long), of.inverse / np.asarray(scaling.short))
    return inverse, math.sqrt(1 + math.log(scaling.factor) / math.log(scaling.original))


def dynamic(of: Frequencies, scaling: RopeScaling, length) -> tuple:
    """NTK with stretch factor length / original - (factor - 1) in calls of more than the original positions, for the whole call."""
    length = jnp.maximum(length, scaling.original).astype(float)
    return of.rebased(scaling.factor * length / scaling.original - (scaling.factor - 1)), 1.0


ROPE_SCALINGS: dict[str, Callable[[Frequencies, RopeScaling, Int[Array, ""]], tuple]] = {
    "none": lambda of, scaling, length: (of.inverse, 1.0),
    "linear": lambda of, scaling, length: (of.inverse / scaling.factor, 1.0),  # Chen et al. 2023, arXiv 2306.15595
    "ntk": lambda of, scaling, length: (of.rebased(scaling.factor), 1.0),
    "dynamic": dynamic,
    "yarn": yarn,
    "llama3": llama3,
    "longrope": longrope,
}
"""Frequencies, scaling config and the length of the call (last position + 1) to scaled inverse frequencies and the attention factor."""


def inverse_frequencies(config: Rope, k: int, length=0) -> tuple:
    """The inverse frequencies of the n = fraction k rotating dimensions after scaling, radians per token, and the attention factor."""
    n = int(config.turning(k))
    of = Frequencies(config.theta ** -(np.arange(0, n, 2) / n), config.theta, n)
    inverse, factor = ROPE_SCALINGS[config.scaling.kind](of, config.scaling, length)
    return inverse, factor if config.scaling.attention_factor is None else config.scaling.attention_factor


def rotate(x: Float[Array, "b t h k"], positions: Int[Array, "t"], config: Rope) -> Float[Array, "b t h k"]:
    """Rotates each pair of the first fraction k dimensions by position times its inverse frequency; angles in at least float32.

    The rotating dimensions are multiplied by the attention factor of the scaling. Scalings dynamic and longrope look at the last
    position of the call, so a sequence in one call and the same in parts may differ.
    """
    if config.theta is None:
        return x
    dtype = at_least_float32(x)
    frequencies, factor = inverse_frequencies(config, x.shape[-1], positions.max() + 1)
    angles = positions.astype(dtype)[:, None] * jnp.asarray(frequencies, dtype)
    cos, sin = (factor * f(angles)[:, None, :] for f in (jnp.cos, jnp.sin))
    n = 2 * len(frequencies)
    turning, rest = x[..., :n].astype(dtype), x[..., n:]
    if config.layout == "half":
        first, second = jnp.split(turning, 2, axis=-1)
        turned = jnp.concatenate((first * cos - second * sin, second * cos + first * sin), axis=-1)
    else:
        first, second = turning[..., 0::2], turning[..., 1::2]
        turned = jnp.stack((first * cos - second * sin, second * cos + first * sin), axis=-1).reshape(turning.shape)
    return jnp.concatenate((turned.astype(x.dtype), rest), axis=-1)
