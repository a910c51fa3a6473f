"""The one matrix product of the model, and the module around it."""

import functools
import math
from typing import Literal

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from models.parameters import parameter

Operands = Literal["float32", "bfloat16"]


def project(contraction: str, x: Float[Array, "..."], w: Float[Array, "..."], operands: Operands = "float32") -> Float[Array, "..."]:
    """The product of activations and a weight that `contraction` names, such as "btd,dhk->bthk".

    Shared axes are the last of x and the first of w; the rest keep their order. x and w are flattened to two dimensions first:
    XLA's CPU backend otherwise fuses the chain behind the output's gradient into a strided copy. With operands = "bfloat16" both
    factors of the product and of its two gradients are rounded to bfloat16, sums are float32; the result has the type of x.
    """
    inputs, output = contraction.split("->")
    left, right = inputs.split(",")
    shared = sum(axis in right for axis in left)
    if left[len(left) - shared :] != right[:shared] or output != left[: len(left) - shared] + right[shared:]:
        raise ValueError(f"contraction {contraction!r}: shared axes must be the last of the left and the first of the right factor")
    lead, tail = x.shape[: x.ndim - shared], w.shape[shared:]
    inner = math.prod(w.shape[:shared])
    flat = (rounded_product if operands == "bfloat16" else jnp.matmul)(x.reshape(-1, inner), w.reshape(inner, -1).astype(x.dtype))
    return flat.reshape(*lead, *tail)


def rounded(x, w, dimensions):
    dot = functools.partial(jax.lax.dot_general, preferred_element_type=jnp.float32)
    return dot(x.astype(jnp.bfloat16), w.astype(jnp.bfloat16), (dimensions, ((), ())))


@jax.custom_vjp
def rounded_product(x: Float[Array, "n i"], w: Float[Array, "i o"]) -> Float[Array, "n o"]:
    """x w with bfloat16 factors and float32 sums, forward and backward."""
    return rounded(x, w, ((1,), (0,))).astype(x.dtype)


def rounded_product_forward(x, w):
    return rounded_product(x, w), (x, w)


def rounded_product_backward(saved, g):
    x, w = saved
    return rounded(g, w, ((1,), (1,))).astype(x.dtype), rounded(x, g, ((0,), (0,))).astype(w.dtype)


rounded_product.defvjp(rounded_product_forward, rounded_product_backward)


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
