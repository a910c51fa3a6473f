"""Experts that are MLPs: one of them, and each on its own rows of a sorted array."""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from configs.model import Mlp
from models.mlp import activate
from models.precision import Operands, at_least_float32
from models.projection import contract

BLOCK = 128
"""Rows that a CPU multiplies at once: fewer waste less at the end of each expert's rows, more make better products."""


class Experts(NamedTuple):
    """The weights of all experts, behind a leading axis, or of one; None for what an expert does not have. `down` has no bias here."""

    up: Array
    up_bias: Array | None
    gate: Array | None
    gate_bias: Array | None
    down: Array


Product = Callable[[Array, Array, Array | None], Array]
"""(rows, weight, bias) to rows."""


def widen(product: Product, experts: Experts, x: Float[Array, "n d"]) -> tuple[Array, Array | None]:
    """What `narrow` activates: up x, and gate x where gated."""
    return product(x, experts.up, experts.up_bias), None if experts.gate is None else product(x, experts.gate, experts.gate_bias)


def narrow(product: Product, mlp: Mlp, experts: Experts, wide: tuple[Array, Array | None]) -> Float[Array, "n d"]:
    """down(activation(…)) of what `widen` gave."""
    return product(activate(mlp, *wide), experts.down, None)


def of_one(operands: Operands) -> Product:
    """The product of rows with the weight of one expert."""

    def product(x, weight, bias):
        y = contract("nd,df->nf", x, weight, operands).astype(x.dtype)
        return y if bias is None else y + bias

    return product


def one(mlp: Mlp, operands: Operands, experts: Experts, x: Float[Array, "n d"]) -> Float[Array, "n d"]:
    """One expert on rows."""
    product = of_one(operands)
    return narrow(product, mlp, experts, widen(product, experts, x))


def on_sorted_rows(mlp: Mlp, operands: Operands, experts: Experts, x: Float[Array, "n d"], sizes: Int[Array, "e"]) -> Float[Array, "n d"]:
    """Expert 0 on the first sizes[0] rows, expert 1 on the next sizes[1], …; at least BLOCK more rows follow, whose results mean nothing.

    `ragged` on accelerators, `blocked` on a CPU, where XLA computes jax.lax.ragged_dot by multiplying every row with every expert.
    """
    return jax.lax.platform_dependent(experts, x, sizes, cpu=functools.partial(blocked, mlp, operands),
                                      default=functools.partial(ragged, mlp, operands))


def ragged(mlp: Mlp, operands: Operands, experts: Experts, x: Float[Array, "n d"], sizes: Int[Array, "e"]) -> Float[Array, "n d"]:
    """`on_sorted_rows` by jax.lax.ragged_dot."""

    def product(x, weight, bias):
        factors = (x, weight) if operands == "float32" else (x.astype(jnp.bfloat16), weight.astype(jnp.bfloat16))
        y = jax.lax.ragged_dot(*factors, sizes, preferred_element_type=at_least_float32(x)).astype(x.dtype)
        return y if bias is None else y + jnp.repeat(bias, sizes, axis=0, total_repeat_length=x.shape[0])

    return narrow(product, mlp, experts, widen(product, experts, x))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def blocked(mlp: Mlp, operands: Operands, experts: Experts, x: Float[Array, "n d"], sizes: Int[Array, "e"]) -> Float[Array, "n d"]:
    """`on_sorted_rows` block by block: each expert walks over its rows, BLOCK at a time.

    The last block of an expert reaches into the rows of the next, who comes later and overwrites them. So the work is that of the rows,
    rounded up for each expert, however uneven the load; the backward pass walks the same way and repeats no product.
    """
    return blocked_forward(mlp, operands, experts, x, sizes)[0]


def walk(sizes: Int[Array, "e"], experts: Experts, start: Callable, step: Callable, carry):
    """For each expert state = start(weights), then carry, state = step(weights, carry, state, first row, rows left) block by block; returns
    the last carry and every expert's last state."""

    def expert(carry, of):
        weights, first, size = of
        block = lambda i, both: step(weights, *both, first + i * BLOCK, size - i * BLOCK)
        return jax.lax.fori_loop(0, -(-size // BLOCK), block, (carry, start(weights)))

    return jax.lax.scan(expert, carry, (experts, jnp.cumsum(sizes, dtype=sizes.dtype) - sizes, sizes))


def read(x: Array, row: Array) -> Array:
    return jax.lax.dynamic_slice_in_dim(x, row, BLOCK)


def write(x: Array, block: Array, row: Array) -> Array:
    return jax.lax.dynamic_update_slice_in_dim(x, block, row, 0)


def blocked_forward(mlp, operands, experts, x, sizes):
    product = of_one(operands)

    def step(weights, carry, _, row, left):
        wide = widen(product, weights, read(x, row))
        return jax.tree.map(lambda all_, block: write(all_, block, row), carry, (narrow(product, mlp, weights, wide), wide)), None

    rows = lambda weight: None if weight is None else jnp.zeros((x.shape[0], weight.shape[-1]), x.dtype)
    carry = rows(experts.down), (rows(experts.up), rows(experts.gate))
    (y, wide), _ = walk(sizes, experts, lambda weights: None, step, carry)
    return y, (experts, x, sizes, wide)


def blocked_backward(mlp, operands, saved, gradient):
    experts, x, sizes, wide = saved
    product = of_one(operands)

    def step(weights, of_x, of_weights, row, left):
        mine = jnp.where((jnp.arange(BLOCK, dtype=left.dtype) < left)[:, None], read(gradient, row), 0)
        _, back = jax.vjp(functools.partial(narrow, product, mlp), weights, jax.tree.map(lambda all_: read(all_, row), wide))
        of_narrow, of_wide = back(mine)
        _, back = jax.vjp(functools.partial(widen, product), weights, read(x, row))
        of_widen, of_block = back(of_wide)
        return write(of_x, of_block, row), jax.tree.map(lambda *parts: sum(parts), of_weights, of_narrow, of_widen)

    of_x, of_experts = walk(sizes, experts, lambda weights: jax.tree.map(jnp.zeros_like, weights), step, jnp.zeros_like(x))
    return of_experts, of_x, None


blocked.defvjp(blocked_forward, blocked_backward)
