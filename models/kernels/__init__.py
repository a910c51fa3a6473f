"""Attention kernels: one signature, one table, the same numbers from each."""

from collections.abc import Callable
from typing import NamedTuple

import jax
from jaxtyping import Array, Float

from models.kernels.dense import dense


class AttentionStats(NamedTuple):
    """Statistics of each query's softmax, under stop-gradient; a field that a kernel cannot give is None.

    `max` is over the keys the query sees; `lse` = log sum exp z and `entropy` = -sum p log p (nats) include the learned sink;
    `sink` is the probability of the first key.
    """

    max: Float[Array, "b t h"] | None
    lse: Float[Array, "b t h"] | None
    entropy: Float[Array, "b t h"] | None
    sink: Float[Array, "b t h"] | None


KERNELS: dict[str, Callable] = {"dense": dense}


def attend(
    q: Float[Array, "b t h k"],
    k: Float[Array, "b s g k"],
    v: Float[Array, "b s g k"],
    *,
    kernel: str = "dense",
    scale: float,
    softcap: float | None = None,
    window: int | None = None,
    sinks: Float[Array, "h"] | None = None,
    operands: str = "float32",
) -> tuple[Float[Array, "b t h k"], AttentionStats | None]:
    """Causal attention with grouped queries: softmax(cap(scale q k) over 0 <= t - s < window, and the sink) v.

    The last query meets the last key. Logits and softmax are at least float32; the output has the type of v.
    """
    out, stats = KERNELS[kernel](q, k, v, scale=scale, softcap=softcap, window=window, sinks=sinks, operands=operands)
    return out, None if stats is None else jax.lax.stop_gradient(AttentionStats(*stats))
