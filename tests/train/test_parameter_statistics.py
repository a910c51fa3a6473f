"""Gradient norm, parameter RMS, update RMS and their ratio, per layer, against a loop over layers in numpy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models.parameters import Row
from tests.train.small import SAME, plan_of, small
from train.instruments import parameter_statistics

DEPTH = 4
CASES = {
    "plain": {},
    "uneven": {"model.pattern": ("mlp.width=16", "attention.heads=2"), "model.attention.bias": ("q",), "model.attention.sinks": True},
    "norms in some layers": {"model.overrides": ("1: norm.placement=none", "3: norm.placement=none")},
    "qk norms in some layers": {"model.overrides": ("0: attention.qk_norm.kind=head norm.placement=none",), "model.norm.bias": True},
    "norms in no layer": {"model.norm.placement": "none", "model.norm.final": True},
    "scanned": {"model.stack": "scan", "model.mlp.bias": True, "model.tied": False, "model.norm.kind": "layer", "model.norm.bias": True},
}


def part(row: Row) -> str:
    """Attention, MLP or norm, from the parameter's path alone."""
    return "mlp" if ".mlp." in row.path else "norm" if "norm" in row.path.split(".unit.")[1] else "attention"


@pytest.fixture(scope="module", params=CASES)
def compared(request):
    """(rows, trees of random values, published)."""
    plan = plan_of(small(CASES[request.param] | {"model.depth": DEPTH}))
    draw = np.random.default_rng(0)
    trees = {name: {row.path: draw.normal(size=row.shape).astype(np.float32) for row in plan.rows} for name in ("grad", "param", "update")}
    return plan.rows, trees, parameter_statistics(plan.rows, DEPTH, jax.tree.map(jnp.asarray, trees))


def of_layer(rows, tree, layer: int, of: str) -> np.ndarray:
    """All numbers of a layer's parameters, of one part ("" for all)."""
    mine = [row for row in rows if row.layers and layer in row.layers and of in ("", part(row))]
    found = [tree[row.path][row.layers.index(layer)].ravel() for row in mine]
    return np.concatenate(found).astype(np.float64) if found else np.zeros(0)


def expected(rows, trees, layer: int, of: str) -> dict[str, float] | None:
    values = {name: of_layer(rows, tree, layer, of) for name, tree in trees.items()}
    if not values["grad"].size:
        return None
    rms = {name: np.sqrt(np.mean(x**2)) for name, x in values.items()}
    return {"grad_norm": np.linalg.norm(values["grad"]), "param_rms": rms["param"], "update_rms": rms["update"],
            "update_ratio": rms["update"] / rms["param"]}


@pytest.mark.parametrize("of", ["", "attention", "mlp", "norm"])
def test_statistics_are_those_of_each_layer(compared, of):
    """Norms and RMS of gradients, parameters and updates are those of the layer's own numbers, wherever they are stored; a layer without
    such parameters has None, and where no layer has any, nothing is published."""
    rows, trees, published = compared
    by_layer = [expected(rows, trees, layer, of) for layer in range(DEPTH)]
    for name in ("grad_norm", "param_rms", "update_rms", "update_ratio"):
        key = f"{name}.{of}" if of else name
        if not any(by_layer):
            assert key not in published
            continue
        assert len(published[key]) == DEPTH
        for found, layer in zip(published[key], by_layer, strict=True):
            if layer is None:
                assert found is None
            else:
                np.testing.assert_allclose(found, layer[name], rtol=SAME)


FRAME = {"embed": "embed", "head": "head.", "final_norm": "norm."}


@pytest.mark.parametrize("name", FRAME)
def test_the_frame_is_told_by_its_parts(compared, name):
    """Embedding, head and final norm have statistics over all of their own numbers, gain and bias of the norm together."""
    rows, trees, published = compared
    paths = [row.path for row in rows if row.layers is None and row.path.startswith(FRAME[name])]
    if not paths:
        assert f"{name}/grad_norm" not in published
        return
    values = {of: np.concatenate([tree[path].ravel() for path in paths]).astype(np.float64) for of, tree in trees.items()}
    np.testing.assert_allclose(published[f"{name}/grad_norm"], np.linalg.norm(values["grad"]), rtol=SAME)
    np.testing.assert_allclose(published[f"{name}/param_rms"], np.sqrt(np.mean(values["param"] ** 2)), rtol=SAME)
    np.testing.assert_allclose(published[f"{name}/update_rms"], np.sqrt(np.mean(values["update"] ** 2)), rtol=SAME)


def test_gradients_alone_give_gradient_norms_alone(compared):
    """A probe has no updates: of it only gradient norms are told, the same ones."""
    rows, trees, published = compared
    alone = parameter_statistics(rows, DEPTH, jax.tree.map(jnp.asarray, {"grad": trees["grad"]}))
    assert alone.keys() == {key for key in published if key.split("/")[-1].startswith("grad_norm")}
    for key, value in alone.items():
        for ours, theirs in zip(jax.tree.leaves(value), jax.tree.leaves(published[key]), strict=True):
            np.testing.assert_allclose(ours, theirs, rtol=SAME)
