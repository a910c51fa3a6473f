"""The parameter table: counts, groups, values and back, and the work of a token."""

import typing

import jax
import numpy as np
import pytest

from configs.schema import ParameterGroup
from models import parameters
from models.init import initialise
from models.transformer import Transformer
from tests.models.reference import tiny, tokens

FULL = tiny({
    "attention.kv_heads": 2, "attention.head_width": 6, "attention.bias": ("q", "k", "v", "out"), "attention.sinks": True,
    "attention.qk_norm.kind": "head_each", "attention.qk_norm.values": True, "attention.qk_norm.norm.bias": True,
    "mlp.gated": True, "mlp.bias": True, "norm.kind": "layer", "norm.bias": True, "norm.placement": "sandwich", "tied": False,
})
LAYERS, D, V, F, H, G, K = 3, 16, 32, 24, 4, 2, 6
COUNTS = {  # of one layer
    "attention.q": D * H * K, "attention.k": D * G * K, "attention.v": D * G * K, "attention.out": H * K * D,
    "attention.q.bias": H * K, "attention.k.bias": G * K, "attention.v.bias": G * K, "attention.out.bias": D, "attention.sinks": H,
    "mlp.up": D * F, "mlp.gate": D * F, "mlp.down": F * D, "mlp.up.bias": F, "mlp.gate.bias": F, "mlp.down.bias": D,
    "norm.scale": 4 * D, "norm.bias": 4 * D,
    "qk_norm.q.scale": H * K, "qk_norm.k.scale": G * K, "qk_norm.v.scale": G * K,
    "qk_norm.q.bias": H * K, "qk_norm.k.bias": G * K, "qk_norm.v.bias": G * K,
}
FRAME = {"embed": V * D, "head": D * V, "norm.final.scale": D, "norm.final.bias": D}


def table(model):
    return parameters.table(Transformer(model))


def test_counts():
    """A model has as many parameters of each role as its widths multiply out to."""
    expected = {role: LAYERS * count for role, count in COUNTS.items()} | FRAME
    assert parameters.counts(table(FULL)) == expected | {"total": sum(expected.values())}


@pytest.mark.parametrize(("kind", "gains"), (("none", 0), ("head", 2 * K), ("head_each", (H + G) * K), ("whole", (H + G) * K), ("l2", H)))
def test_qk_norm_owns(kind, gains):
    """QK-norm has one gain for all heads, one for each, or one temperature a head."""
    model = tiny({"attention.kv_heads": G, "attention.head_width": K, "attention.qk_norm.kind": kind})
    assert sum(row.size for row in table(model) if row.group == "qk_norm") == LAYERS * gains


def test_table():
    """Paths are unique, groups are those that configs can name, layers are told once each, and shapes begin with their number."""
    model = tiny({"depth": 7, "pattern": ("", "", "attention.window=4"), "overrides": ("6: mlp.width=8",)})
    for rows, depth in ((table(FULL), LAYERS), (table(model), 7)):
        assert len({row.path for row in rows}) == len(rows)
        assert {row.group for row in rows} <= set(typing.get_args(ParameterGroup))
        for row in rows:
            assert len(row.axes) == len(row.shape)
            assert row.layers is None or len(row.layers) == row.shape[0]
        layers = sorted(layer for row in rows if row.role == "mlp.up" for layer in row.layers)
        assert layers == list(range(depth))


@pytest.mark.parametrize(("role", "group"), (
    ("embed", "embed"), ("head", "head"), ("attention.q", "attention"), ("mlp.gate", "mlp"), ("norm.scale", "norm"), ("norm.bias", "norm"),
    ("norm.final.bias", "norm"), ("qk_norm.q.scale", "qk_norm"), ("qk_norm.k.bias", "qk_norm"), ("qk_norm.temperature", "qk_norm"),
    ("attention.q.bias", "bias"), ("mlp.down.bias", "bias"), ("attention.sinks", "sinks"),
))
def test_groups(role, group):
    """A weight's group goes by its role: biases of projections are one, those of norms belong to their norm."""
    assert parameters.group(role) == group


def test_values_and_bind_are_inverse():
    """Binding values and reading them back gives the same arrays, and leaves the model that they were bound to empty."""
    module = Transformer(FULL)
    values = initialise(parameters.table(module), FULL, 0)
    back = parameters.values(parameters.bind(module, values))
    assert back.keys() == values.keys()
    for path, value in values.items():
        np.testing.assert_array_equal(back[path], value)
    assert isinstance(module.embed.get_value(), jax.ShapeDtypeStruct)


def test_bind_needs_every_value():
    """A missing parameter is told by its path."""
    module = Transformer(FULL)
    values = initialise(parameters.table(module), FULL, 0)
    del values["norm.scale"]
    with pytest.raises(KeyError, match=r"norm\.scale"):
        parameters.bind(module, values)


def test_seeds_reach_every_weight():
    """Two seeds agree in the constants alone."""
    rows = table(FULL)
    first, second = (initialise(rows, FULL, seed) for seed in (0, 1))
    for row in rows:
        assert (np.asarray(first[row.path]) == second[row.path]).all() == (row.constant is not None)


@pytest.mark.parametrize("window", (None, 1, 3, 8, 100))
@pytest.mark.parametrize("tied", (True, False))
def test_flops(tied, window):
    """A token costs three times twice its weights (head included, look-up not) and four operations a head dimension and key seen."""
    sequence = 8
    model = tiny({"depth": 2, "attention.window": window, "tied": tied})
    weights = 2 * (4 * D * D + 2 * D * F) + V * D
    seen = np.mean([len([s for s in range(t + 1) if window is None or t - s < window]) for t in range(sequence)])
    assert parameters.flops_per_token(model, table(model), sequence) == pytest.approx(3 * (2 * weights + 2 * 4 * D * seen), rel=1e-12)


def test_flops_of_grouped_heads():
    """Grouped keys save products of the projection, none of the scores; norms, biases and sinks are free; layers may differ."""
    model = tiny({"attention.kv_heads": 1, "attention.head_width": 6, "attention.sinks": True, "mlp.bias": True, "mlp.gated": True,
                  "overrides": ("1: mlp.width=8 attention.window=2",)})
    weights = 3 * (2 * D * H * 6 + 2 * D * 6) + 3 * D * (2 * F + 8) + V * D
    scores = 4 * H * 6 * (2 * 4.5 + 15 / 8)
    assert parameters.flops_per_token(model, table(model), 8) == pytest.approx(3 * (2 * weights + scores), rel=1e-12)


def test_float32_runs_under_strict_promotion():
    """Initial float32 parameters give float32 logits, for floating-point operands of both kinds."""
    for operands in ("float32", "bfloat16"):
        module = Transformer(FULL, operands=operands)
        bound = parameters.bind(module, initialise(parameters.table(module), FULL, 0))
        assert bound(tokens()).logits.dtype == np.float32
