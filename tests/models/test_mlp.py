"""The MLP: every activation, gated and plain."""

import jax.numpy as jnp
import pytest

from configs.model import Layer, Mlp
from models import parameters
from models.mlp import ACTIVATIONS
from models.mlp import Mlp as Module
from models.taps import Taps
from tests.models import reference
from tests.models.reference import assert_close, draw, random_values

pytestmark = pytest.mark.usefixtures("x64")

D, F = 16, 24


@pytest.mark.parametrize("bias", (False, True))
@pytest.mark.parametrize("gated", (False, True))
@pytest.mark.parametrize("kind", ACTIVATIONS)
def test_textbook(kind, gated, bias):
    """down(activation(up x)), or down(activation(gate x) * (up x)), with the exact activation of that name."""
    config = Mlp(kind, F, gated, bias)
    module = Module(config, D, "float32")
    values = random_values(parameters.table(module))
    x = draw("x", 2, 5, D)
    expected = reference.mlp_branch(Layer(mlp=config), {f"mlp.{path}": value for path, value in values.items()})(x)
    assert_close(parameters.bind(module, values)(jnp.asarray(x), Taps().frame()), expected, 2 * (D + F))


def test_parameters():
    """A gate is a third weight; biases are f, f and d wide."""
    names = lambda **changes: {row.path: row.shape for row in parameters.table(Module(Mlp(width=F, **changes), D, "float32"))}
    assert names() == {"up.weight": (D, F), "down.weight": (F, D)}
    assert names(gated=True) == names() | {"gate.weight": (D, F)}
    assert names(gated=True, bias=True) == names(gated=True) | {"up.bias": (F,), "gate.bias": (F,), "down.bias": (D,)}
