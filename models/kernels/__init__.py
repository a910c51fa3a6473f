"""Attention kernels: one signature, one table, the same numbers from each."""

from collections.abc import Callable
from typing import NamedTuple

import jax
from jaxtyping import Array, Float, Int

from models.kernels.chunked import chunked
from models.kernels.dense import dense
from models.kernels.library import library
from models.kernels.pallas import pallas


class AttentionStats(NamedTuple):
    """Statistics of each query's softmax, under stop-gradient; a field that a kernel cannot give is None.

    `max` is over the keys the query sees; `lse` = log sum exp z and `entropy` = -sum p log p (nats) include the learned sink;
    `sink` is the probability of key 0, zero where the query does not see it.
    """

    max: Float[Array, "b t h"] | None
    lse: Float[Array, "b t h"] | None
    entropy: Float[Array, "b t h"] | None
    sink: Float[Array, "b t h"] | None


KERNELS: dict[str, Callable] = {"dense": dense, "chunked": chunked, "library": library, "pallas": pallas}

DENSE = {"cpu": 128, "gpu": 1024, "tpu": 1024}
"""Longest sequence by platform for which `auto` is `dense`; above, it is `chunked`. Measured on a CPU; `python -m scripts.kernels`."""


def choose(kernel: str, length: int, platform: str) -> str:
    """The row of KERNELS that a kernel's name stands for, on sequences of so many tokens: itself, unless it is `auto`."""
    if kernel != "auto":
        return kernel
    return "dense" if length <= DENSE[platform] else "chunked"


def attend(
    q: Float[Array, "b t h k"],
    k: Float[Array, "b s g k"],
    v: Float[Array, "b s g k"],
    *,
    kernel: str = "auto",
    scale: float,
    softcap: float | None = None,
    window: int | None = None,
    sinks: Float[Array, "h"] | None = None,
    segments: Int[Array, "b s"] | None = None,
    offset: int | Int[Array, ""] | None = None,
    operands: str = "float32",
) -> tuple[Float[Array, "b t h k"], AttentionStats | None]:
    """Causal attention with grouped queries: softmax(cap(scale q k) over the keys seen, and the sink) v.

    Query i is the token at key position offset + i, 0 <= offset <= s - t; None: s - t, the last query meets the last key. The token at
    position n sees key j where 0 <= n - j < window and segments[n] = segments[j] (`segments`: the document of each key). So every
    query sees itself, and no softmax is empty. An unfilled part of a key cache lies behind the last query, or has a document of its own.
    q, k and v have one type, the output's; logits and softmax are at least float32. Raises ValueError for an offset out of range.
    """
    longest = k.shape[1] - q.shape[1]
    offset = longest if offset is None else offset
    if isinstance(offset, int) and not 0 <= offset <= longest:
        raise ValueError(f"offset = {offset}: {q.shape[1]} queries over {k.shape[1]} keys start between 0 and {longest}")
    options = {"scale": scale, "softcap": softcap, "window": window, "sinks": sinks, "segments": segments, "offset": offset}
    kernel = choose(kernel, k.shape[1], jax.default_backend())
    out, stats = KERNELS[kernel](q, k, v, **options, operands=operands)
    return out, None if stats is None else jax.lax.stop_gradient(AttentionStats(*stats))
