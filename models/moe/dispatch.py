"""How chosen experts are computed: rows of one table, the same numbers where nothing is dropped."""

import functools
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array, Bool, Float, Int

from configs.model import Mlp
from configs.moe import Moe
from models.moe.experts import BLOCK, Experts, on_sorted_rows, one
from models.moe.router import share
from models.precision import Operands
from models.sharding import partition


def with_slots(config: Moe, chosen: Bool[Array, "b t e"]) -> Bool[Array, "b t e"]:
    """The assignments that are computed: with dispatch capacity the first `slots` of each expert and sequence, else all.

    Slots are given out in the order of the tokens, so whether an assignment is dropped depends on no later token, on no other sequence and
    on no mesh. A dropped assignment adds nothing to its token: the residual stream passes it on. Source, there for a batch: Fedus et al.
    2021, arXiv 2101.03961, section 2.2.
    """
    if config.dispatch != "capacity":
        return chosen
    return chosen & (jnp.cumsum(chosen, axis=1, dtype=jnp.int32) <= slots(config, chosen.shape[1]))


def slots(config: Moe, t: int) -> int:
    """Slots of an expert for a sequence of t tokens: capacity top_k t / e, rounded up; where experts choose, as many as they choose."""
    return share(config, t) if config.choice == "expert" else min(t, math.ceil(config.capacity * config.top_k * t / config.experts))


def dispatch(
    config: Moe, mlp: Mlp, operands: Operands, experts: Experts, x: Float[Array, "b t d"], gates: Float[Array, "b t e"],
    kept: Bool[Array, "b t e"],
) -> Float[Array, "b t d"]:
    """sum_e gates[e] expert_e(x) over the kept assignments, by a row of DISPATCHES.

    On a mesh each device has its experts (axis expert) and its share of their hidden units (tensor), sees the tokens of all devices along
    these axes, and the outputs are summed over them.
    """
    here = functools.partial(DISPATCHES[config.dispatch], config, mlp, operands)
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or mesh.size == 1:
        return here(experts, x, gates, kept)
    lay = lambda axes, weight: None if weight is None else partition(axes, weight.shape, mesh)
    of_experts = Experts(*map(lay, AXES, experts))
    of_tokens = partition(("group", "t", "d"), x.shape, mesh)
    of_gates = PartitionSpec(of_tokens[0], None, of_experts.up[0])
    split = tuple(axis for axis in (of_experts.up[0], of_experts.up[2]) if axis is not None)
    share_of = lambda *given: jax.lax.psum(here(*given), split)
    return jax.shard_map(share_of, mesh=mesh, in_specs=(of_experts, of_tokens, of_gates, of_gates), out_specs=of_tokens,
                         check_vma=False)(experts, x, gates, kept)


AXES = Experts(up=("experts", None, "mlp"), up_bias=("experts", "mlp"), gate=("experts", None, "mlp"), gate_bias=("experts", "mlp"),
               down=("experts", "mlp", None))
"""Logical axes of the weights while they are used: gathered over fsdp."""


def dense(config, mlp, operands, experts, x, gates, kept):
    """Every expert on every token: the oracle of the others, and the one that follows weights given by hand to experts not chosen."""
    y = jax.vmap(functools.partial(one, mlp, operands), (0, None))(experts, x.reshape(-1, x.shape[-1]))
    return jnp.einsum("end,ne->nd", y, gates.reshape(-1, gates.shape[-1])).reshape(x.shape)


def capacity(config, mlp, operands, experts, x, gates, kept):
    """Each expert on as many rows as it has slots, empty ones included; GShard, Lepikhin et al. 2020, arXiv 2006.16668."""
    b, t, e = kept.shape
    size = slots(config, t)
    rank = jnp.cumsum(kept, axis=1, dtype=jnp.int32) - 1
    first = size * (b * jnp.arange(e, dtype=jnp.int32) + jnp.arange(b, dtype=jnp.int32)[:, None, None])

    def run(rows):
        return jax.vmap(functools.partial(one, mlp, operands))(experts, rows.reshape(e, b * size, -1)).reshape(rows.shape)

    return through_rows(x, gates, jnp.where(kept, first + rank, b * size * e), b * size * e, run)


def dropless(config, mlp, operands, experts, x, gates, kept):
    """Each expert on its own tokens, sorted by expert; MegaBlocks, Gale et al. 2022, arXiv 2211.15841."""
    b, t, e = kept.shape
    largest = b * (e * share(config, t) if config.choice == "expert" else t * min(config.top_k, e)) + BLOCK
    kept = kept.reshape(b * t, e)
    sizes = kept.sum(0, dtype=jnp.int32)
    row = jnp.cumsum(sizes, dtype=jnp.int32) - sizes + jnp.cumsum(kept, axis=0, dtype=jnp.int32) - 1
    return through_rows(x, gates, jnp.where(kept, row, largest), largest, lambda rows: on_sorted_rows(mlp, operands, experts, rows, sizes))


DISPATCHES: dict[str, Callable] = {"dense": dense, "capacity": capacity, "dropless": dropless}


def through_rows(
    x: Float[Array, "b t d"], gates: Float[Array, "b t e"], row: Int[Array, "..."], rows: int, run: Callable
) -> Float[Array, "b t d"]:
    """Lays each assignment's token in its `row` (`rows`: nowhere), runs the experts on the rows, and sums gate times result by token."""
    n, e = x.shape[0] * x.shape[1], gates.shape[-1]
    assignment = jnp.full(rows, n * e, jnp.int32).at[row.reshape(-1)].set(jnp.arange(n * e, dtype=jnp.int32), mode="drop")
    token = assignment // e
    y = run(jnp.take(x.reshape(n, -1), token, axis=0, mode="fill", fill_value=0))
    y = y * jnp.take(gates.reshape(-1), assignment, mode="fill", fill_value=0)[:, None]
    return jnp.zeros_like(x).reshape(n, -1).at[token].add(y, mode="drop").reshape(x.shape)
