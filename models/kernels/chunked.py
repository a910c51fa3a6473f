"""Attention in plain JAX, block by block: memory linear in time, and on a CPU, whose cache holds a block, faster than `dense`."""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from models.kernels.online import Options, Passes, Softmax, absorb, begin, capped, end, is_seen, online, seen_keys, slopes
from models.kernels.scores import row_sums
from models.precision import at_least_float32

BLOCK = {"cpu": 128}
"""Queries and keys in a block by platform; 512 where none is named."""


def chunked(q, k, v, *, scale, softcap, window, sinks, segments, offset, operands, blocks: tuple[int, int] | None = None):
    """See `models.kernels.attend`; `blocks` are queries and keys in a block, at most."""
    target = (BLOCK.get(jax.default_backend(), 512),) * 2 if blocks is None else blocks
    even = lambda length, most: -(-length // -(-length // most))  # as few blocks as may be, of one size, with little padding
    sizes = even(q.shape[1], target[0]), even(k.shape[1], target[1])
    return online(Passes(forward, backward), Options(scale, softcap, window, sizes), q, k, v,
                  sinks=sinks, segments=segments, offset=offset, operands=operands)


def cut(x: Array, size: int) -> Array:
    """[b t … k] as blocks [n b … size k], the last one padded with zeros."""
    n = -(-x.shape[1] // size)
    x = jnp.pad(x, [(0, n * size - x.shape[1]) if axis == 1 else (0, 0) for axis in range(x.ndim)])
    return jnp.moveaxis(x.reshape(x.shape[0], n, size, *x.shape[2:]), (1, 2), (0, -2))


def join(x: Array, length: int) -> Array:
    """The inverse of `cut`, heads as one axis: [n b g (r) size k] as [b t h k]."""
    x = jnp.moveaxis(x, (0, -2), (1, 2))
    return x.reshape(x.shape[0], -1, *x.shape[3:])[:, :length].reshape(x.shape[0], length, -1, x.shape[-1])


def by_group(x: Array, g: int) -> Array:
    """[b t h k] or [b t h] as [b t g r k] or [b t g r 1]."""
    return x.reshape(*x.shape[:2], g, -1, x.shape[3] if x.ndim == 4 else 1)


def ids(segments: Array | None, offset, t: int, sizes: tuple[int, int]):
    """Documents of the queries [n b 1 1 size 1] and of the keys [m b 1 1 1 size]."""
    if segments is None:
        return None, None
    column = lambda x, size: cut(x[:, :, None, None, None], size)
    of_queries = lax.dynamic_slice_in_dim(segments, offset, t, axis=1)
    return column(of_queries, sizes[0]), column(segments, sizes[1]).swapaxes(-1, -2)


def product(contraction: str, x: Array, y: Array) -> Array:
    return jnp.einsum(contraction, x, y, preferred_element_type=at_least_float32(x))


def logits(options: Options, first, j, q, k, ids_query, ids_keys):
    """Capped logits [b g r t s] of the queries from position `first` on against key block j, and which of them are seen."""
    query = first + jnp.arange(q.shape[-2], dtype=jnp.int32)[:, None]
    key = j * k.shape[-2] + jnp.arange(k.shape[-2], dtype=jnp.int32)
    seen = is_seen(options, query, key, ids_query, None if ids_keys is None else ids_keys[j])
    return capped(options, product("bgrtk,bgsk->bgrts", q, k[j])), seen


def forward(options: Options, q, k, v, segments, offset) -> Softmax:
    t, (queries, keys) = q.shape[1], options.blocks
    ids_query, ids_keys = ids(segments, offset, t, options.blocks)
    q, k, v = cut(by_group(q, k.shape[2]), queries), cut(k, keys), cut(v, keys)

    def of_queries(block):
        i, q, ids_query = block
        first = offset + i * queries

        def meet(j, running):
            z, seen = logits(options, first, j, q, k, ids_query, ids_keys)
            return absorb(running, z, seen, lambda e: product("bgrts,bgsk->bgrtk", e.astype(v.dtype), v[j]), row_sums)

        running = begin(q.shape[:-1], q.shape[-1], at_least_float32(q))
        return end(lax.fori_loop(*seen_keys(options, first, queries, len(k)), meet, running))

    out, *statistics = (join(x, t) for x in lax.map(of_queries, (numbers(q), q, ids_query)))
    return Softmax(out, *(x[..., 0] for x in statistics))


def backward(options: Options, q, k, v, segments, offset, gradient, lse, delta):
    t, s, g, (queries, keys) = q.shape[1], k.shape[1], k.shape[2], options.blocks
    ids_query, ids_keys = ids(segments, offset, t, options.blocks)
    q, gradient, lse, delta = (cut(by_group(x, g), queries) for x in (q, gradient, lse, delta))
    k, v = cut(k, keys), cut(v, keys)

    def of_queries(of_keys, block):
        i, q, gradient, lse, delta, ids_query = block
        first = offset + i * queries

        def meet(j, running):
            of_q, of_k, of_v = running
            z, seen = logits(options, first, j, q, k, ids_query, ids_keys)
            p, of_z = slopes(options, z, seen, lse, delta, product("bgrtk,bgsk->bgrts", gradient, v[j]))
            p, of_z = p.astype(v.dtype), of_z.astype(k.dtype)
            plus = lambda total, x: lax.dynamic_update_index_in_dim(total, total[j] + x, j, 0)
            of_k = plus(of_k, product("bgrtk,bgrts->bgks", q, of_z))  # in this order the narrow factor is turned over, not the block
            of_v = plus(of_v, product("bgrtk,bgrts->bgks", gradient, p))
            return of_q + product("bgrts,bgsk->bgrtk", of_z, k[j]), of_k, of_v

        of_q, *of_keys = lax.fori_loop(*seen_keys(options, first, queries, len(k)), meet, (jnp.zeros(q.shape, lse.dtype), *of_keys))
        return of_keys, of_q

    zeros = jnp.zeros((*k.shape[:3], k.shape[4], k.shape[3]), lse.dtype)
    of_keys, of_q = lax.scan(of_queries, [zeros, zeros], (numbers(q), q, gradient, lse, delta, ids_query))
    return join(of_q, t), *(join(x.swapaxes(-1, -2), s) for x in of_keys)


def numbers(blocks: Array) -> Array:
    return jnp.arange(len(blocks), dtype=jnp.int32)
