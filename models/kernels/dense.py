"""Attention with its logits materialised: the oracle of the other kernels, and on a CPU the fastest for short sequences."""

import jax
import jax.numpy as jnp

from models.kernels.scores import row_sums, same_document, scores, visible
from models.projection import contract


def dense(q, k, v, *, scale, softcap, window, sinks, segments, offset, operands):
    """See `models.kernels.attend`."""
    b, t, h, width = q.shape
    s, g = k.shape[1:3]
    rows = offset + jnp.arange(t, dtype=jnp.int32)
    mask = visible(rows, s, window)
    mask = mask if segments is None else mask & same_document(segments, rows, s)[:, None, None]
    z = jnp.where(mask, scores(q, k, scale=scale, softcap=softcap, operands=operands), -jnp.inf)
    largest = jax.lax.stop_gradient(z.max(-1))
    column = None if sinks is None else jnp.broadcast_to(sinks.astype(z.dtype).reshape(g, -1, 1, 1), (*z.shape[:-1], 1))
    p = jax.nn.softmax(z if sinks is None else jnp.concatenate((z, column), -1), axis=-1)
    log_l = -jnp.log(p.max(-1))  # where z is largest, e^(z - m) is 1 and p = 1 / l
    p = p[..., :s]
    out = contract("bgrts,bsgk->btgrk", p.astype(v.dtype), v, operands)

    m = largest if sinks is None else jnp.maximum(largest, column[..., 0])
    entropy = log_l - row_sums(p * jnp.where(mask, z - m[..., None], 0.0))[..., 0]
    if sinks is not None:
        entropy -= jnp.exp(column[..., 0] - m - log_l) * (column[..., 0] - m)
    by_query = lambda x: x.transpose(0, 3, 1, 2).reshape(b, t, h)
    return out.reshape(b, t, h, width).astype(v.dtype), tuple(map(by_query, (largest, m + log_l, entropy, p[..., 0])))
