"""The next-token loss."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int


class Loss(NamedTuple):
    """Means over tokens: what is minimised, and its parts in nats and squared nats."""

    total: Float[Array, ""]
    cross_entropy: Float[Array, ""]
    squared_log_z: Float[Array, ""]


def next_token_loss(logits: Float[Array, "b t v"], targets: Int[Array, "b t"], z_loss: float = 0.0) -> Loss:
    """mean(log Z - logit[target]) + z_loss mean((log Z)^2), log Z = log sum exp logits; z-loss: PaLM, arXiv 2204.02311."""
    log_z = jax.nn.logsumexp(logits, axis=-1)
    cross_entropy = jnp.mean(log_z - jnp.take_along_axis(logits, targets[..., None], axis=-1)[..., 0])
    squared_log_z = jnp.mean(jnp.square(log_z))
    return Loss(cross_entropy + z_loss * squared_log_z, cross_entropy, squared_log_z)
