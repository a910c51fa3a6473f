"""Attention that never holds its logits: what the kernels `chunked` and `pallas` share.

Queries meet the keys block by block. For each query three sums run over the keys met so far: the largest logit m,
l = sum e^(z - m) and u = sum e^(z - m) (z - m); when the maximum moves by d = m_old - m_new, l <- e^d l and u <- e^d (u + d l). In the end
lse = m + log l and entropy = log l - u / l. The backward pass computes p = e^(z - lse) anew, so memory is linear in time both ways
(Rabe and Staats 2021, arXiv 2112.05682; Dao et al. 2022, arXiv 2205.14135). A learned sink is a logit that has no value: it changes lse
and with it the scale of the output, so it is added after the pass. A kernel owns only its two loops over blocks.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from models.kernels.scores import first_key_mass


class Options(NamedTuple):
    """What is known when a kernel is compiled; `blocks` are queries and keys in a block."""

    scale: float
    softcap: float | None
    window: int | None
    blocks: tuple[int, int]


class Softmax(NamedTuple):
    """Output and statistics of each query over the keys it sees."""

    out: Float[Array, "b t h k"]
    max: Float[Array, "b t h"]
    lse: Float[Array, "b t h"]
    entropy: Float[Array, "b t h"]


class Passes(NamedTuple):
    """The two loops of a kernel: (options, q, k, v, segments, offset) to a Softmax; and the same with the output's gradient, lse and
    delta = sum_k out dL/dout to the gradients of q, k and v. All sums in at least float32."""

    forward: Callable[..., Softmax]
    backward: Callable[..., tuple[Array, Array, Array]]


def online(passes: Passes, options: Options, q, k, v, *, sinks, segments, offset, operands):
    """Output and statistics, as `models.kernels.attend` has them, from the passes of a kernel."""
    out, largest, lse, entropy, sink = attention(passes, options, operands, q, k, v, sinks, segments, jnp.asarray(offset, jnp.int32))
    return out, (largest, lse, entropy, sink)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def attention(passes, options, operands, q, k, v, sinks, segments, offset):
    return forward(passes, options, operands, q, k, v, sinks, segments, offset)[0]


def forward(passes, options, operands, q, k, v, sinks, segments, offset):
    dtype = v.dtype
    q, k, v = (x.astype(jnp.bfloat16 if operands == "bfloat16" else x.dtype) for x in (q, k, v))
    found = passes.forward(options, q, k, v, segments, offset)
    if sinks is not None:
        found = with_sinks(found, sinks.astype(found.lse.dtype))
    logits = {"scale": options.scale, "softcap": options.softcap, "window": options.window}
    sink = first_key_mass(q, k, found.lse, **logits, segments=segments, offset=offset)
    out = found.out.astype(dtype)
    return (out, *found[1:], sink), (q, k, v, sinks, segments, offset, out, found.lse)


def backward(passes, options, operands, saved, gradients):
    q, k, v, sinks, segments, offset, out, lse = saved
    gradient = gradients[0]  # the statistics are under stop-gradient
    delta = (gradient.astype(lse.dtype) * out.astype(lse.dtype)).sum(-1)
    found = passes.backward(options, q, k, v, segments, offset, gradient.astype(v.dtype), lse, delta)
    of_sinks = None if sinks is None else -(jnp.exp(sinks.astype(lse.dtype) - lse) * delta).sum((0, 1)).astype(sinks.dtype)
    return (*(x.astype(out.dtype) for x in found), of_sinks, None, None)


attention.defvjp(forward, backward)


def with_sinks(found: Softmax, sinks: Float[Array, "h"]) -> Softmax:
    """The softmax after one more logit for each head, which has no value."""
    lse = jnp.logaddexp(found.lse, sinks)
    keys, sink = jnp.exp(found.lse - lse), jnp.exp(sinks - lse)
    entropy = keys * (found.entropy + lse - found.lse) + sink * (lse - sinks)
    return Softmax(found.out * keys[..., None], found.max, lse, entropy)


def seen_keys(options: Options, first_query, queries: int, keys: int):
    """First and last + 1 of the key blocks that a block of queries from position `first_query` on may see."""
    size = jnp.int32(options.blocks[1])
    oldest = jnp.int32(0) if options.window is None else jnp.maximum(first_query - (options.window - 1), 0)
    newest = first_query + queries - 1
    return lax.div(oldest, size), jnp.minimum(lax.div(newest, size) + 1, keys)


def seeing_queries(options: Options, first_key, offset, queries: int):
    """First and last + 1 of the query blocks that may see a block of keys from position `first_key` on."""
    size = jnp.int32(options.blocks[0])
    oldest = jnp.maximum(first_key - offset, 0)
    if options.window is None:
        return lax.div(oldest, size), jnp.int32(queries)
    newest = jnp.maximum(first_key + options.blocks[1] - 1 + options.window - 1 - offset, -1)
    return lax.div(oldest, size), jnp.minimum(lax.div(newest + size, size), queries)


def capped(options: Options, products):
    """Logits from q.k."""
    z = options.scale * products
    return z if options.softcap is None else options.softcap * jnp.tanh(z / options.softcap)


def is_seen(options: Options, query, key, ids_query, ids_key):
    """Whether a query sees a key, from their positions and documents, which broadcast to the block."""
    distance = query - key
    seen = distance >= 0
    if options.window is not None:
        seen &= distance < options.window
    return seen if ids_query is None else seen & (ids_query == ids_key)


def begin(shape: tuple[int, ...], width: int, dtype):
    """Running m, l, u and output before any key: [… queries 1] three times, and [… queries width]."""
    zeros = jnp.zeros((*shape, 1), dtype)
    return zeros + lowest(dtype), zeros, zeros, jnp.zeros((*shape, width), dtype)


def absorb(running, z, seen, weigh: Callable[[Array], Array], over_keys: Callable[[Array], Array]):
    """The running sums after one more block of logits [… queries keys]; `weigh` sums the values with weights e^(z - m), `over_keys` sums a
    block over its keys, [… queries keys] to [… queries 1]."""
    largest, total, moment, out = running
    new = jnp.maximum(largest, jnp.where(seen, z, lowest(z.dtype)).max(-1, keepdims=True))
    below = jnp.where(seen, z - new, 0.0)
    e = jnp.where(seen, jnp.exp(below), 0.0)
    moved = largest - new
    kept = jnp.exp(moved)
    moment = kept * (moment + moved * total) + over_keys(e * below)
    return new, kept * total + over_keys(e), moment, kept * out + weigh(e)


def end(running):
    """Output, m, lse and entropy of the running sums. Padding behind the last query may have seen no key: its NaN is cut away."""
    largest, total, moment, out = running
    log = jnp.log(total)
    return out / total, largest, largest + log, log - moment / total


def lowest(dtype) -> float:
    """Below every logit, and far enough from the end of the type that differences stay finite."""
    return float(jnp.finfo(dtype).min) / 2


def slopes(options: Options, z, seen, lse, delta, of_p):
    """p and the gradient of q.k in a block, from logits and the gradient of p: dL/dz = p (dL/dp - delta), then cap and scale."""
    p = jnp.where(seen, jnp.exp(z - lse), 0.0)
    of_z = options.scale * p * (of_p - delta)
    return p, of_z if options.softcap is None else of_z * (1 - jnp.square(z / options.softcap))
