"""Rotary position embedding (Su et al. 2021, arXiv 2104.09864) and the ROPE_SCALINGS table."""

from collections.abc import Callable

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from configs.model import Rope, RopeScaling
from models.precision import at_least_float32

ROPE_SCALINGS: dict[str, Callable[[np.ndarray, RopeScaling], tuple[np.ndarray, float]]] = {
    "none": lambda frequencies, scaling: (frequencies, 1.0),
    "linear": lambda frequencies, scaling: (frequencies / scaling.factor, 1.0),  # Chen et al. 2023, arXiv 2306.15595
}
"""Inverse frequencies and scaling config to scaled inverse frequencies and the factor on the rotated vectors."""


def inverse_frequencies(config: Rope, k: int) -> tuple[np.ndarray, float]:
    """theta^(-2i/n) in radians per token for i < n/2, n = fraction k, after scaling; and the attention factor (float64)."""
    n = int(k * config.fraction)
    return ROPE_SCALINGS[config.scaling.kind](config.theta ** -(np.arange(0, n, 2) / n), config.scaling)


def rotate(x: Float[Array, "b t h k"], positions: Int[Array, "t"], config: Rope) -> Float[Array, "b t h k"]:
    """Rotates each pair of the first fraction k dimensions by position times its inverse frequency; angles in at least float32."""
    if config.theta is None:
        return x
    frequencies, factor = inverse_frequencies(config, x.shape[-1])
    dtype = at_least_float32(x)
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
