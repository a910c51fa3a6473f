"""Attention with its logits materialised: the oracle of the other kernels, and on a CPU the fastest."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from models.precision import Operands, at_least_float32
from models.projection import contract


def scores(
    q: Float[Array, "b t h k"], k: Float[Array, "b s g k"], *, scale: float, softcap: float | None, operands: Operands = "float32"
) -> Float[Array, "b g r t s"]:
    """Logits z = cap(scale q.k), each query head against the key head of its group; at least float32, no mask."""
    b, t, _, width = q.shape
    z = scale * contract("btgrk,bsgk->bgrts", q.reshape(b, t, k.shape[2], -1, width), k, operands)
    return z if softcap is None else softcap * jnp.tanh(z / softcap)


def visible(rows: Int[Array, "t"], s: int, window: int | None) -> Bool[Array, "t s"]:
    """Whether the query at each position sees the key at each position below s."""
    distance = rows[:, None] - jnp.arange(s)
    return (distance >= 0) if window is None else (distance >= 0) & (distance < window)


def dense(q, k, v, *, scale, softcap, window, sinks, operands):
    """See `models.kernels.attend`."""
    b, t, h, width = q.shape
    s, g = k.shape[1:3]
    mask = visible(jnp.arange(s - t, s), s, window)
    z = jnp.where(mask, scores(q, k, scale=scale, softcap=softcap, operands=operands), -jnp.inf)
    largest = jax.lax.stop_gradient(z.max(-1))
    column = None if sinks is None else jnp.broadcast_to(sinks.astype(z.dtype).reshape(g, -1, 1, 1), (*z.shape[:-1], 1))
    p = jax.nn.softmax(z if sinks is None else jnp.concatenate((z, column), -1), axis=-1)[..., :s]
    out = contract("bgrts,bsgk->btgrk", p.astype(v.dtype), v, operands)

    m = largest if sinks is None else jnp.maximum(largest, column[..., 0])
    below = jnp.where(mask, z - m[..., None], 0.0)
    log_l = jnp.log(jnp.where(mask, jnp.exp(below), 0.0).sum(-1) + (0.0 if sinks is None else jnp.exp(column[..., 0] - m)))
    entropy = log_l - (p * below).sum(-1)
    if sinks is not None:
        entropy -= jnp.exp(column[..., 0] - m - log_l) * (column[..., 0] - m)
    by_query = lambda x: x.transpose(0, 3, 1, 2).reshape(b, t, h)
    return out.reshape(b, t, h, width).astype(v.dtype), tuple(map(by_query, (largest, m + log_l, entropy, p[..., 0])))


def logit_rows(q, k, rows: int, *, scale, softcap, window) -> Float[Array, "b h t s"]:
    """Logits of `rows` evenly spaced queries (the last among them), -inf where masked; only these are materialised."""
    t, s = q.shape[1], k.shape[1]
    chosen = jnp.linspace(0, t - 1, min(rows + 1, t), dtype=int)[-rows:]
    z = scores(q[:, chosen], k, scale=scale, softcap=softcap)
    z = jnp.where(visible(chosen + s - t, s, window), z, -jnp.inf)
    return z.reshape(z.shape[0], -1, *z.shape[3:])


def mean_cosine(q: Float[Array, "b t h k"], k: Float[Array, "b s g k"], window: int | None) -> Float[Array, "b t h"]:
    """Mean over the visible keys of cos(q, k), from running sums of the unit keys: memory linear in time."""
    q, k = (x.astype(at_least_float32(x)) for x in (q, k))
    unit = lambda x: x / jnp.maximum(jnp.linalg.norm(x, axis=-1, keepdims=True), 1e-30)
    t, s, g = q.shape[1], k.shape[1], k.shape[2]
    total = jnp.cumsum(unit(k), axis=1)
    seen = jnp.arange(1, s + 1, dtype=total.dtype)
    if window is not None and window < s:
        total = total - jnp.pad(total, ((0, 0), (window, 0), (0, 0), (0, 0)))[:, :s]
        seen = jnp.minimum(seen, window)
    mean = total[:, s - t :] / seen[s - t :, None, None]
    q = unit(q).reshape(*q.shape[:2], g, -1, q.shape[-1])
    return jnp.einsum("btgrk,btgk->btgr", q, mean).reshape(*q.shape[:2], -1)
