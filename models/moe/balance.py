"""What keeps experts in use: the balance loss, the router's z-loss, and the rule for the selection bias."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from configs.moe import Moe


class Routing(NamedTuple):
    """What a router is judged by, over the counted tokens: balance loss, mean of (log sum exp logits)^2, assignments by expert."""

    balance: Float[Array, ""]
    squared_lse: Float[Array, ""]
    load: Float[Array, "e"]


def balance_loss(
    config: Moe, chosen: Bool[Array, "b t e"], probabilities: Float[Array, "b t e"], counted: Bool[Array, "b t"] | None
) -> Float[Array, ""]:
    """E sum_e f[e] P[e]: f the fraction of the assignments that expert e gets, P its mean probability.

    An assignment is a pair of a token and one of its top_k experts: f is divided by top_k and sums to 1. So an even load costs exactly 1
    for every top_k, and the same top_k experts for all tokens cost at most E / top_k. The gradient is that of P. Fractions and means are
    over the counted tokens of a part of the batch (the whole batch unless train.accumulate cuts it), or over those of each sequence, and
    then averaged over the sequences that have any. Source: Fedus et al. 2021, arXiv 2101.03961, equation 4, there with top_k 1; over
    sequences: DeepSeek-V3, arXiv 2412.19437, equation 17.
    """
    over = (0, 1) if config.balance_over == "batch" else (1,)
    counted = jnp.ones(chosen.shape[:2], bool) if counted is None else counted
    summed = lambda x: x.sum(over, where=counted[..., None], dtype=probabilities.dtype)
    assignments, tokens = summed(chosen), counted.sum(over, dtype=probabilities.dtype)
    f = assignments / at_least_one(assignments.sum(-1, keepdims=True))
    p = summed(probabilities) / at_least_one(tokens)[..., None]
    costs = config.experts * (f * p).sum(-1)
    return costs.sum() / at_least_one((tokens > 0).sum(dtype=costs.dtype))


def squared_lse(logits: Float[Array, "b t e"], counted: Bool[Array, "b t"] | None) -> Float[Array, ""]:
    """The mean over the counted tokens of (log sum exp logits)^2; Zoph et al. 2022, arXiv 2202.08906, equation 5."""
    squares = jnp.square(jax.nn.logsumexp(logits, axis=-1))
    return squares.mean() if counted is None else squares.sum(where=counted) / at_least_one(counted.sum(dtype=squares.dtype))


def loads(chosen: Bool[Array, "b t e"], counted: Bool[Array, "b t"] | None) -> Float[Array, "e"]:
    """The number of assignments of counted tokens to each expert."""
    return (chosen if counted is None else chosen & counted[..., None]).sum((0, 1), dtype=jnp.float32)


def bias_update(load: Float[Array, "e"], rate: float) -> Float[Array, "e"]:
    """What is added to the selection bias after a step: rate sign(mean load - load); Wang et al. 2024, arXiv 2408.15664, algorithm 1."""
    return rate * jnp.sign(load.mean(-1, keepdims=True) - load)


def at_least_one(x: Float[Array, "..."]) -> Float[Array, "..."]:
    return jnp.maximum(x, 1)
