"""Attention logits and what is measured of them outside a kernel."""

import math

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
    distance = rows[:, None] - jnp.arange(s, dtype=rows.dtype)
    return (distance >= 0) if window is None else (distance >= 0) & (distance < window)


def same_document(segments: Int[Array, "b s"], rows: Int[Array, "t"], keys: int) -> Bool[Array, "b t {keys}"]:
    """Whether the token at each position is in the document of the token at each position below `keys`."""
    return segments[:, rows, None] == segments[:, None, :keys]


def first_key_mass(q, k, lse: Float[Array, "b t h"], *, scale, softcap, window, segments, offset) -> Float[Array, "b t h"]:
    """Probability of key 0, from the log-sum-exp: zero where the query does not see it."""
    rows = offset + jnp.arange(q.shape[1], dtype=jnp.int32)
    seen = visible(rows, 1, window) if segments is None else visible(rows, 1, window) & same_document(segments, rows, 1)
    z = scores(q, k[:, :1], scale=scale, softcap=softcap)[..., 0].transpose(0, 3, 1, 2).reshape(lse.shape)
    return jnp.where(seen, jnp.exp(z - lse), 0.0)


def logit_rows(q, k, rows: int, *, scale, softcap, window) -> Float[Array, "b h t s"]:
    """Logits of `rows` evenly spaced queries (the last among them), -inf where masked; only these are materialised."""
    t, s = q.shape[1], k.shape[1]
    chosen = jnp.linspace(0, t - 1, min(rows + 1, t), dtype=int)[-rows:]
    z = scores(q[:, chosen], k, scale=scale, softcap=softcap)
    z = jnp.where(visible(chosen + s - t, s, window), z, -jnp.inf)
    return z.reshape(z.shape[0], -1, *z.shape[3:])


def row_sums(x: Float[Array, "... s"]) -> Float[Array, "... 1"]:
    """Sums over the last axis, as a product with ones: XLA's CPU backend would fuse the exponentials behind x into a plain sum, and there
    compute them once more, one at a time."""
    return jnp.matmul(x, jnp.ones((x.shape[-1], 1), x.dtype), precision="highest")


def running_sums(x: Float[Array, "b t *rest"], block: int = 32) -> Float[Array, "b t *rest"]:
    """Cumulative sums over time: within blocks as a product with a triangle of ones, then over the blocks; half the time of jnp.cumsum on
    a CPU."""
    b, t, width = *x.shape[:2], math.prod(x.shape[2:])
    blocks = jnp.pad(x.reshape(b, t, width), ((0, 0), (0, -t % block), (0, 0))).reshape(b, -(-t // block), block, width)
    within = jnp.einsum("ij,bnjx->bnix", jnp.tri(block, dtype=x.dtype), blocks, precision="highest")
    before = jnp.cumsum(within[:, :, -1:], axis=1) - within[:, :, -1:]
    return (within + before).reshape(b, -1, width)[:, :t].reshape(x.shape)


def mean_cosine(q: Float[Array, "b t h k"], k: Float[Array, "b s g k"], window: int | None) -> Float[Array, "b t h"]:
    """Mean over the visible keys of cos(q, k), from running sums of the unit keys: memory linear in time."""
    q, k = (x.astype(at_least_float32(x)) for x in (q, k))
    unit = lambda x: x / jnp.maximum(jnp.linalg.norm(x, axis=-1, keepdims=True), 1e-30)
    t, s, g = q.shape[1], k.shape[1], k.shape[2]
    total = running_sums(unit(k))
    seen = jnp.arange(1, s + 1, dtype=total.dtype)
    if window is not None and window < s:
        total = total - jnp.pad(total, ((0, 0), (window, 0), (0, 0), (0, 0)))[:, :s]
        seen = jnp.minimum(seen, window)
    mean = total[:, s - t :] / seen[s - t :, None, None]
    q = unit(q).reshape(*q.shape[:2], g, -1, q.shape[-1])
    return jnp.einsum("btgrk,btgk->btgr", q, mean).reshape(*q.shape[:2], -1)
