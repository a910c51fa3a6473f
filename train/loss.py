"""The next-token loss, and what is added to it for mixtures of experts."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from configs.model import Layer
from models.moe.balance import Routing
from models.sharding import shares
from models.taps import Taps
from models.transformer import Transformer
from train.metrics import collapse

MOST = 2**26
"""Logits that a device may hold at once: 256 MB in float32."""


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


def loss_in_parts(
    model: Transformer, final: Float[Array, "b t d"], targets: Int[Array, "b t"], z_loss: float, taps: Taps, most: int = MOST
) -> tuple[Loss, dict[str, Any]]:
    """`next_token_loss` of the model's logits over equal parts of the sequence, one after the other, so that a device never holds more than
    `most` logits (one position of each sequence at least); and what the taps recorded of the logits, merged.

    The backward pass computes each part's logits again: one more product with the output head where there is more than one part.
    """
    b, t, _ = final.shape
    mesh = jax.sharding.get_abstract_mesh()
    at_once = most // (model.config.vocab * -(-b // (1 if mesh.empty else shares("b", mesh))))
    parts = next(n for n in range(1, t + 1) if t % n == 0 and (t // n <= at_once or n == t))

    def of_part(final, targets):
        tap = taps.frame()
        return next_token_loss(model.logits(final, tap), targets, z_loss), tap.records

    if parts == 1:
        return of_part(final, targets)
    cut = lambda x: x.reshape(b, parts, t // parts, *x.shape[2:]).swapaxes(0, 1)
    body = jax.checkpoint(of_part)
    losses, records = jax.lax.map(lambda part: body(*part), (cut(final), cut(targets)))
    return Loss(*(x.mean() for x in losses)), collapse(records)


def routing_loss(layers: Sequence[Layer], routing: Sequence[Routing | None]) -> Float[Array, ""]:
    """sum over the mixtures of moe.balance times its balance loss + moe.z_loss times its mean of (log sum exp router logits)^2.

    Each layer's losses are whole before they are added: opposite imbalances of two layers do not cancel. Definitions: `models.moe.balance`.
    """
    mixtures = [(layer.moe, of) for layer, of in zip(layers, routing, strict=True) if of is not None]
    return sum(((moe.balance or 0.0) * of.balance + (moe.z_loss or 0.0) * of.squared_lse for moe, of in mixtures), jnp.zeros(()))
