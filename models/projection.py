"""The matrix products of the model, and the module around one."""

import functools
import math

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float

from models.parameters import parameter
from models.precision import Operands, at_least_float32

PRODUCT = "product"
"""The name of a rounded product, for `jax.checkpoint` policies."""


def project(contraction: str, x: Float[Array, "..."], w: Float[Array, "..."], operands: Operands = "float32") -> Float[Array, "..."]:
    """The product of activations and a weight that `contraction` names, such as "btd,dhk->bthk".

    Shared axes are the last of x and the first of w; the rest keep their order. x and w are flattened to two dimensions first:
    XLA's CPU backend otherwise fuses the chain behind the output's gradient into a strided copy. The result has the type of x.
    """
    inputs, output = contraction.split("->")
    left, right = inputs.split(",")
    shared = sum(axis in right for axis in left)
    if left[len(left) - shared :] != right[:shared] or output != left[: len(left) - shared] + right[shared:]:
        raise ValueError(f"contraction {contraction!r}: shared axes must be the last of the left and the first of the right factor")
    lead, tail = x.shape[: x.ndim - shared], w.shape[shared:]
    inner = math.prod(w.shape[:shared])
    flat = contract("ni,io->no", x.reshape(-1, inner), w.reshape(inner, -1).astype(x.dtype), operands)
    return flat.astype(x.dtype).reshape(*lead, *tail)


def contract(contraction: str, x: Float[Array, "..."], y: Float[Array, "..."], operands: Operands = "float32") -> Float[Array, "..."]:
    """The einsum of two factors, summed and returned in at least float32; each axis of a factor is shared or in the result.

    With operands = "bfloat16" both factors are rounded to bfloat16, here and in the two products of the backward pass; the result is named
    PRODUCT for rematerialisation, which does not look into a rule of differentiation.
    """
    if operands == "bfloat16":
        return checkpoint_name(rounded(contraction, x, y), PRODUCT)
    return jnp.einsum(contraction, x, y, preferred_element_type=at_least_float32(x))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def rounded(contraction: str, x: Float[Array, "..."], y: Float[Array, "..."]) -> Float[Array, "..."]:
    return jnp.einsum(contraction, x.astype(jnp.bfloat16), y.astype(jnp.bfloat16), preferred_element_type=jnp.float32)


def rounded_forward(contraction, x, y):
    return rounded(contraction, x, y), (x, y)


def rounded_backward(contraction, saved, gradient):
    inputs, output = contraction.split("->")
    left, right = inputs.split(",")
    x, y = saved
    of_x, of_y = rounded(f"{output},{right}->{left}", gradient, y), rounded(f"{left},{output}->{right}", x, gradient)
    return of_x.astype(x.dtype), of_y.astype(y.dtype)


rounded.defvjp(rounded_forward, rounded_backward)


class Projection(nnx.Module):
    """y = x w (+ bias), by the contraction's name."""

    def __init__(self, contraction: str, shape, role: str, axes, *, bias: bool = False, operands: Operands = "float32"):
        self.contraction, self.operands = contraction, operands
        left, right = contraction.split("->")[0].split(",")
        shared = sum(axis in right for axis in left)
        fan = (math.prod(shape[:shared]), math.prod(shape[shared:]))
        self.weight = parameter(shape, role, axes, fan=fan)
        self.bias = parameter(shape[shared:], f"{role}.bias", axes[shared:], constant=0.0) if bias else None

    def __call__(self, x: Float[Array, "..."]) -> Float[Array, "..."]:
        y = project(self.contraction, x, self.weight[...], self.operands)
        return y if self.bias is None else y + self.bias[...].astype(y.dtype)
