"""The MLP: every activation, gated and plain, limited and offset."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from configs.model import Mlp
from models import parameters
from models.mlp import ACTIVATIONS, activate
from models.mlp import Mlp as Module
from models.taps import Taps
from tests.models import reference
from tests.models.reference import assert_close, draw, random_values

pytestmark = pytest.mark.usefixtures("x64")

D, F = 16, 24
FORMS = reference.ACTIVATIONS | {"gelu_quick": lambda x: x / (1 + np.exp(-1.702 * x))}


def textbook(config: Mlp, p: dict, x: np.ndarray) -> np.ndarray:
    linear = lambda x, name: x @ np.asarray(p[f"{name}.weight"]) + np.asarray(p.get(f"{name}.bias", 0.0))
    up, activation = linear(x, "up"), FORMS[config.kind]
    if not config.gated:
        return linear(activation(up), "down")
    gate, limit = linear(x, "gate"), np.inf if config.limit is None else config.limit
    assert limit == np.inf or min(gate.max(), up.max(), -up.min(), -gate.min()) > limit  # so each side of the limit is met
    return linear(activation(np.where(gate > limit, limit, gate)) * (np.clip(up, -limit, limit) + config.up_offset), "down")


def check(config: Mlp) -> None:
    module = Module(config, D, "float32")
    values = random_values(parameters.table(module))
    x = draw("x", 2, 5, D)
    assert_close(parameters.bind(module, values)(jnp.asarray(x), Taps().frame()), textbook(config, values, x), 2 * (D + F))


@pytest.mark.parametrize("bias", (False, True))
@pytest.mark.parametrize("gated", (False, True))
@pytest.mark.parametrize("kind", ACTIVATIONS)
def test_textbook(kind, gated, bias):
    """down(activation(up x)), or down(activation(gate x) * (up x)), with the exact activation of that name."""
    check(Mlp(kind, F, gated, bias))


@pytest.mark.parametrize(("limit", "offset"), ((0.5, 0.0), (None, 1.0), (0.5, 1.0)))
@pytest.mark.parametrize("kind", ACTIVATIONS)
def test_limit_and_offset(kind, limit, offset):
    """down(activation(min(gate x, limit)) * (clip(up x, -limit, limit) + offset)): the gate is limited from above alone."""
    check(Mlp(kind, F, gated=True, limit=limit, up_offset=offset))


def test_limited_units():
    """gpt-oss, far outside its limit of 7: a unit is at most 8 gelu_quick(7), at least -6 gelu_quick(7), and nothing behind a shut gate."""
    config = Mlp("gelu_quick", F, gated=True, limit=7.0, up_offset=1.0)
    up, gate = jnp.asarray([1e4, -1e4, 1e4, 0.0, -1.0]), jnp.asarray([1e4, 1e4, -1e4, 1e4, 1e4])
    largest = 7 / (1 + np.exp(-1.702 * 7))
    assert_close(activate(config, up, gate), np.array([8 * largest, -6 * largest, 0, largest, 0]), 8)


def test_a_limit_out_of_reach_is_none():
    """Units within the limit are those without one, to the last bit."""
    up, gate = (jnp.asarray(draw(name, 50)) for name in ("up", "gate"))
    with_limit, without = (activate(Mlp("silu", F, gated=True, limit=limit), up, gate) for limit in (5.0, None))
    np.testing.assert_array_equal(with_limit, without)


@pytest.mark.parametrize("kind", ACTIVATIONS)
def test_offset_alone_is_a_plain_mlp(kind):
    """With an offset of one and nothing from up, the gate is all there is: activation(gate x)."""
    x = jnp.asarray(draw("x", 50))
    gated = activate(Mlp(kind, F, gated=True, up_offset=1.0), jnp.zeros_like(x), x)
    np.testing.assert_array_equal(gated, activate(Mlp(kind, F), x, None))


@pytest.mark.parametrize("kind", ACTIVATIONS)
def test_gradients(kind):
    """Gradients are finite however large gate and up; none passes a limit, and a limit stops no other."""
    sizes = (-1e4, -30.0, -1.0, 0.0, 0.5, 1.0, 30.0, 1e4)
    up, gate = jnp.asarray(list(itertools.product(sizes, sizes))).T
    for limit in (None, 0.75):
        config = Mlp(kind, F, gated=True, limit=limit, up_offset=1.0)
        of_up, of_gate = jax.grad(lambda up, gate, config=config: activate(config, up, gate).sum(), (0, 1))(up, gate)
        assert jnp.isfinite(of_up).all() and jnp.isfinite(of_gate).all()
        if limit is not None:
            assert not of_up[jnp.abs(up) > limit].any() and not of_gate[gate > limit].any()
            assert of_up[(jnp.abs(up) < limit) & (gate > 0)].all() and of_gate[(gate == 0.5)].all()


def test_parameters():
    """A gate is a third weight; biases are f, f and d wide."""
    names = lambda **changes: {row.path: row.shape for row in parameters.table(Module(Mlp(width=F, **changes), D, "float32"))}
    assert names() == {"up.weight": (D, F), "down.weight": (F, D)}
    assert names(gated=True) == names() | {"gate.weight": (D, F)}
    assert names(gated=True, bias=True) == names(gated=True) | {"up.bias": (F,), "gate.bias": (F,), "down.bias": (D,)}
