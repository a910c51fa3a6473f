"""The matrix product: einsum's numbers, bfloat16 factors with float32 sums, and contractions that it refuses."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models import parameters
from models.projection import Projection, contract, project
from tests.models.reference import EPS32, assert_close, draw

SIZES = {"b": 2, "t": 5, "s": 7, "d": 16, "h": 4, "g": 2, "r": 3, "k": 6, "f": 24, "v": 32}
CONTRACTIONS = ("btd,dhk->bthk", "bthk,hkd->btd", "btd,df->btf", "btf,fd->btd", "btd,dv->btv")
BOTH_ACTIVATIONS = ("btgrk,bsgk->bgrts", "bgrts,bsgk->btgrk")  # scores, and values by probability


def operands(contraction: str):
    left, right = contraction.split("->")[0].split(",")
    return tuple(draw(axes, *(SIZES[axis] for axis in axes)) for axes in (left, right))


def inner(contraction: str) -> int:
    """Terms of one sum."""
    factors, output = contraction.split("->")
    return int(np.prod([SIZES[axis] for axis in set(factors) - {*output, ","}]))


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("contraction", CONTRACTIONS)
def test_einsum(contraction):
    """The flattened product is the einsum that its name says."""
    x, w = operands(contraction)
    assert_close(project(contraction, jnp.asarray(x), jnp.asarray(w)), np.einsum(contraction, x, w), inner(contraction))


@pytest.mark.parametrize("contraction", CONTRACTIONS + BOTH_ACTIVATIONS)
def test_bfloat16_factors(contraction):
    """Forward and in both gradients the two factors are rounded to bfloat16 and the sums are float32."""
    x, w = (jnp.asarray(a, jnp.float32) for a in operands(contraction))
    cut = lambda a: np.asarray(jnp.asarray(a, jnp.bfloat16), np.float64)
    product = project if contraction in CONTRACTIONS else contract
    y, pull = jax.vjp(lambda x, w: product(contraction, x, w, "bfloat16"), x, w)
    g = jnp.asarray(draw("g", *y.shape), jnp.float32)
    dx, dw = pull(g)
    inputs, output = contraction.split("->")
    left, right = inputs.split(",")
    for found, equation, factors, terms in (
        (y, contraction, (x, w), inner(contraction)),
        (dx, f"{output},{right}->{left}", (g, w), w.size),
        (dw, f"{left},{output}->{right}", (x, g), x.size),
    ):
        expected = np.einsum(equation, *map(cut, factors))
        assert found.dtype == jnp.float32
        assert_close(found, expected, terms, EPS32)
        unrounded = np.einsum(equation, *(np.asarray(factor, np.float64) for factor in factors))
        assert np.abs(found - unrounded).max() > 8 * np.abs(found - expected).max()  # the rounding shows


@pytest.mark.parametrize("contraction", ("btd,hd->bth", "bdt,dh->bth", "btd,dh->bht", "btd,dh->bthd"))
def test_contraction_it_cannot_flatten(contraction):
    """A contraction whose shared axes are not last and first, or whose output is out of order, is refused by name."""
    with pytest.raises(ValueError, match=contraction):
        project(contraction, jnp.ones((2, 4, 4)), jnp.ones((4, 4)))


@pytest.mark.usefixtures("x64")
def test_module_adds_its_bias():
    """A Projection with a bias is w x + b, with b shaped as the output axes of w."""
    module = Projection("btd,dhk->bthk", (16, 4, 6), "role", ("embed", "heads", None), bias=True)
    weight, bias, x = draw("w", 16, 4, 6), draw("b", 4, 6), draw("x", 2, 5, 16)
    bound = parameters.bind(module, {"weight": jnp.asarray(weight), "bias": jnp.asarray(bias)})
    assert_close(bound(jnp.asarray(x)), np.einsum("btd,dhk->bthk", x, weight) + bias, 17)
