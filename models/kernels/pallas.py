"""Attention as Pallas programs: Triton on a GPU, Mosaic on a TPU, the interpreter on a CPU.

A program owns one block of one head and loops over the blocks that it meets, so that nothing but results leaves the chip. What it loops
over lies whole within its reach: global memory on a GPU, on a TPU vector memory. The gradient takes two programs, one that owns queries
and one that owns keys, so that none writes where another does. What belongs to the owned block enters as a column, what belongs to
the others as a row; so the program that owns keys works on transposed logits.
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu, triton
from jax.sharding import PartitionSpec
from jaxtyping import Array

from models.kernels.online import Options, Passes, Softmax, absorb, begin, capped, end, is_seen, online, seeing_queries, seen_keys, slopes
from models.precision import at_least_float32
from models.sharding import partition

BLOCK = {"cpu": (16, 64), "gpu": (16, 64), "tpu": (128, 512)}
"""Queries and keys in a block by platform, least and most; powers of two, as Triton needs."""

WIDTH = {"cpu": 16, "gpu": 16, "tpu": 128}
"""Least width of a head, which is padded to a power of two."""

PARAMETERS = {"gpu": triton.CompilerParams(num_warps=4, num_stages=2)}
"""What the platform's compiler is told; the type chooses Triton among the two compilers for GPUs."""


def pallas(q, k, v, *, scale, softcap, window, sinks, segments, offset, operands, blocks: tuple[int, int] | None = None, platform=None):
    """See `models.kernels.attend`; `blocks` are queries and keys in a block, `platform` is cpu, gpu or tpu (None: the one here)."""
    platform = jax.default_backend() if platform is None else platform
    least, most = BLOCK[platform]
    fitting = lambda length: min(max(pl.next_power_of_2(length), least), most)
    sizes = (fitting(q.shape[1]), fitting(k.shape[1])) if blocks is None else blocks
    passes = Passes(functools.partial(forward, platform), functools.partial(backward, platform))
    return online(passes, Options(scale, softcap, window, sizes), q, k, v, sinks=sinks, segments=segments, offset=offset, operands=operands)


def forward(platform: str, options: Options, q, k, v, segments, offset) -> Softmax:
    t, width, dtype, (queries, keys) = q.shape[1], q.shape[3], at_least_float32(q), options.blocks
    q, k, v = lay(platform, q, queries), lay(platform, k, keys), lay(platform, v, keys)
    ids_query, ids_key = documents(options, segments, offset, t)

    def program(offset, q, ids_query, k, v, ids_key, *results):
        first, mine = offset[0] + pl.program_id(2) * queries, q[...]

        def meet(j, running):
            here = pl.ds(pl.multiple_of(j * keys, keys), keys)
            z = capped(options, product("tk,sk->ts", mine, k[here, :]))
            seen = is_seen(options, *positions(first, j * keys, (queries, keys)), *met(ids_query, ids_key, here))
            over_keys = lambda x: x.sum(-1, keepdims=True)
            return absorb(running, z, seen, lambda e: product("ts,sk->tk", e.astype(v.dtype), v[here, :]), over_keys)

        running = lax.fori_loop(*seen_keys(options, first, queries, k.shape[0] // keys), meet, begin((queries,), q.shape[1], dtype))
        for result, value in zip(results, end(running), strict=True):
            result[...] = value

    results = [(q.shape[3], dtype), (1, dtype), (1, dtype), (1, dtype)]
    out, *statistics = launch(platform, program, offset, queries, (q, column(ids_query)), (k, v, row(ids_key)), results)
    return Softmax(out.swapaxes(1, 2)[:, :t, :, :width], *(x[..., 0].swapaxes(1, 2)[:, :t] for x in statistics))


def backward(platform: str, options: Options, q, k, v, segments, offset, gradient, lse, delta):
    (b, t, h, width), (s, g), dtype, (queries, keys) = q.shape, k.shape[1:3], lse.dtype, options.blocks
    q, k, v, gradient = lay(platform, q, queries), lay(platform, k, keys), lay(platform, v, keys), lay(platform, gradient, queries)
    lse, delta = (pad(x.swapaxes(1, 2), 2, queries) for x in (lse, delta))
    ids_query, ids_key = documents(options, segments, offset, t)

    def of_queries(offset, q, gradient, lse, delta, ids_query, k, v, ids_key, of_q):
        first, mine, of_out, lse, delta = offset[0] + pl.program_id(2) * queries, q[...], gradient[...], lse[...], delta[...]

        def meet(j, total):
            here = pl.ds(pl.multiple_of(j * keys, keys), keys)
            z = capped(options, product("tk,sk->ts", mine, k[here, :]))
            seen = is_seen(options, *positions(first, j * keys, (queries, keys)), *met(ids_query, ids_key, here))
            _, of_z = slopes(options, z, seen, lse, delta, product("tk,sk->ts", of_out, v[here, :]))
            return total + product("ts,sk->tk", of_z.astype(k.dtype), k[here, :])

        of_q[...] = lax.fori_loop(*seen_keys(options, first, queries, k.shape[0] // keys), meet, jnp.zeros((queries, q.shape[1]), dtype))

    def of_keys(offset, k, v, ids_key, q, gradient, lse, delta, ids_query, of_k, of_v):
        first, mine, values = pl.program_id(2) * keys, k[...], v[...]

        def meet(i, totals):
            here = pl.ds(pl.multiple_of(i * queries, queries), queries)
            z = capped(options, product("sk,tk->st", mine, q[here, :]))
            key, query = positions(first, offset[0] + i * queries, (keys, queries))
            seen = is_seen(options, query, key, *met(ids_key, ids_query, here))
            p, of_z = slopes(options, z, seen, lse[:, here], delta[:, here], product("sk,tk->st", values, gradient[here, :]))
            of_k, of_v = totals
            of_k += product("st,tk->sk", of_z.astype(q.dtype), q[here, :])
            return of_k, of_v + product("st,tk->sk", p.astype(v.dtype), gradient[here, :])

        zeros = jnp.zeros((keys, k.shape[1]), dtype)
        of_k[...], of_v[...] = lax.fori_loop(*seeing_queries(options, first, offset[0], q.shape[0] // queries), meet, (zeros, zeros))

    owned = q, gradient, column(lse), column(delta), column(ids_query)
    [of_q] = launch(platform, of_queries, offset, queries, owned, (k, v, row(ids_key)), [(q.shape[3], dtype)])
    looped = q, gradient, row(lse), row(delta), row(ids_query)
    of_k, of_v = launch(platform, of_keys, offset, keys, (k, v, column(ids_key)), looped, [(q.shape[3], dtype)] * 2)
    of_group = lambda x: x.reshape(b, g, h // g, *x.shape[2:]).sum(2).swapaxes(1, 2)[:, :s, :, :width]
    return of_q.swapaxes(1, 2)[:, :t, :, :width], of_group(of_k), of_group(of_v)


def product(contraction: str, x: Array, y: Array) -> Array:
    return jnp.einsum(contraction, x, y, preferred_element_type=at_least_float32(x))


def positions(first, second, shape: tuple[int, int]):
    """Positions along the rows of a block from `first` on, and along its columns from `second` on."""
    return tuple(start + lax.broadcasted_iota(jnp.int32, shape, axis) for axis, start in enumerate((first, second)))


def met(owned, looped, here):
    """Documents of the owned block and of the one it meets, or None twice."""
    return (None, None) if owned is None else (owned[...], looped[:, here])


def pad(x: Array, axis: int, multiple: int) -> Array:
    return jnp.pad(x, [(0, -x.shape[axis] % multiple) if axis == this else (0, 0) for this in range(x.ndim)])


def lay(platform: str, x: Array, size: int) -> Array:
    """[b t h k] as [b h t k], padded to whole blocks and to a width that the platform's matrix product takes."""
    return pad(pad(x.swapaxes(1, 2), 2, size), 3, max(pl.next_power_of_2(x.shape[3]), WIDTH[platform]))


def documents(options: Options, segments: Array | None, offset, t: int):
    """Documents of queries [b 1 t] and keys [b 1 s], padded to whole blocks; or None twice."""
    if segments is None:
        return None, None
    of_queries = lax.dynamic_slice_in_dim(segments, offset, t, axis=1)
    return pad(of_queries[:, None], 2, options.blocks[0]), pad(segments[:, None], 2, options.blocks[1])


def column(x: Array | None) -> Array | None:
    return None if x is None else x[..., None]


def row(x: Array | None) -> Array | None:
    return None if x is None else x[:, :, None]


def launch(platform: str, program: Callable, offset: Array, size: int, owned, looped, results) -> tuple[Array, ...]:
    """Runs the program for each sequence, query head and block of `size` positions of what it owns; it sees `looped` whole.

    Arrays are [b heads …], their heads all query heads, those of the keys, or one for all; `results` are widths and types of
    [b h length width]. On a mesh each device takes its sequences, and its heads where they divide: the compiler would not part a program.
    """

    def run(offset, owned, looped):
        b, length, h = owned[0].shape[0], owned[0].shape[2], most_heads(owned, looped).shape[1]

        def spec(x, whole: bool):
            share, block = h // x.shape[1], x.shape[2] if whole else size
            return pl.BlockSpec((None, None, block, x.shape[3]), lambda b, h, i: (b, lax.div(h, jnp.int32(share)), 0 if whole else i, 0))

        shapes = [jax.ShapeDtypeStruct((b, h, length, width), dtype) for width, dtype in results]
        scalar = pl.BlockSpec(memory_space=tpu.SMEM) if platform == "tpu" else pl.BlockSpec((1,), lambda b, h, i: (0,))
        specs = [None if x is None else spec(x, whole) for part, whole in ((owned, False), (looped, True)) for x in part]
        call = pl.pallas_call(
            program, shapes, grid=(b, h, length // size), in_specs=[scalar, *specs], out_specs=[spec(x, False) for x in shapes],
            interpret=platform == "cpu", compiler_params=PARAMETERS.get(platform),
        )
        return tuple(call(offset[None], *owned, *looped))

    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or mesh.size == 1:
        return run(offset, owned, looped)
    divides = lambda x: x.shape[1] == 1 or partition(("h",), x.shape[1:2], mesh) != PartitionSpec(None)
    heads = "h" if all(map(divides, jax.tree.leaves((owned, looped)))) else None
    place = lambda x: partition(("b", heads, None, None), x.shape, mesh)
    of_results = (place(most_heads(owned, looped)),) * len(results)
    of_inputs = PartitionSpec(), *jax.tree.map(place, (owned, looped))
    return jax.shard_map(run, in_specs=of_inputs, out_specs=of_results, check_vma=False)(offset, owned, looped)


def most_heads(owned, looped) -> Array:
    return max(jax.tree.leaves((owned, looped)), key=lambda x: x.shape[1])
