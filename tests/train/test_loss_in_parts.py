"""The loss over parts of the sequence: the plain loss, its gradients and what is recorded of the logits, and never all logits at once."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from configs.knobs import replace
from configs.model import Model
from models import parameters
from models.taps import Taps
from models.transformer import NOTHING, Transformer
from tests.models.reference import EPS, EPS32, assert_close, build, tiny, tokens
from train.loss import loss_in_parts, next_token_loss
from train.metrics import Max, Mean

B, T, V = 2, 8, 32


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("most", (B * V, 3 * B * V, 4 * B * V, 1), ids=("one position", "three, which do not divide", "half", "none"))
@pytest.mark.parametrize("changes", ({}, {"tied": False, "softcap": 3.0}), ids=("tied", "untied and capped"))
def test_parts_equal_the_whole(changes, most):
    """Loss, its parts, and the gradient of every parameter equal those of the plain loss but for the order of T terms."""
    module, _, values = build(tiny(changes))
    inputs, targets = tokens(B, T), tokens(B, T)[::-1]

    def whole(values):
        loss = next_token_loss(parameters.bind(module, values)(inputs).logits, targets, 0.1)
        return loss.total, loss

    def parts(values):
        model = parameters.bind(module, values)
        loss, _ = loss_in_parts(model, model.stream(inputs).final, targets, 0.1, NOTHING, most)
        return loss.total, loss

    (expected, found) = (jax.value_and_grad(of, has_aux=True)(values) for of in (whole, parts))
    assert_close(found[0][1], expected[0][1], 4 * T * V)
    for path, gradient in expected[1].items():
        scale = max(float(jnp.abs(leaf).max()) for leaf in expected[1].values())
        np.testing.assert_allclose(found[1][path], gradient, rtol=0, atol=64 * B * T * V * EPS * scale)


@pytest.mark.usefixtures("x64")
def test_records_of_the_logits_are_merged():
    """A mean and a maximum recorded at the logits are those of all logits."""
    module, _, values = build(tiny())
    model = parameters.bind(module, values)
    taps = Taps(record={"logits": lambda z: {"mean": Mean.of(z), "max": Max.of(z)}})
    _, records = loss_in_parts(model, model.stream(tokens(B, T)).final, tokens(B, T), 0.0, taps, 2 * B * V)
    logits = np.asarray(model(tokens(B, T)).logits)
    assert_close(records["logits"]["mean"].value(), logits.mean(), 8 * np.abs(logits).max() / np.abs(logits.mean()), EPS32)
    assert_close(records["logits"]["max"].value(), logits.max(), 2, EPS32)


def test_memory_does_not_hold_all_logits():
    """By the compiler's own analysis, loss and gradient over a vocabulary of 32,768 take less memory than the logits alone would, in parts;
    whole they take more."""
    model = replace(Model(), {"width": 16, "depth": 1, "vocab": 32_768, "mlp.width": 16, "attention.heads": 2, "attention.kernel": "dense"})
    module = Transformer(model)
    values = {row.path: jax.ShapeDtypeStruct(row.shape, jnp.float32) for row in parameters.table(module)}
    ids = jax.ShapeDtypeStruct((1, 256), jnp.int32)

    def memory(most: int) -> int:
        def loss(values, ids):
            bound = parameters.bind(module, values)
            return loss_in_parts(bound, bound.stream(ids).final, ids, 0.0, NOTHING, most)[0].total

        return jax.jit(jax.grad(loss)).lower(values, ids).compile().memory_analysis().temp_size_in_bytes

    whole = 256 * 32_768 * 4
    assert memory(16 * 32_768) < whole < memory(256 * 32_768)
