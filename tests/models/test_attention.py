"""The attention module against the textbook: projections, biases, grouped heads, every kind of QK-norm, RoPE."""

import itertools

import jax.numpy as jnp
import numpy as np
import pytest

from models.attention import QK_NORMS
from models.taps import Taps
from tests.models import reference
from tests.models.reference import EPS, assert_close, build, by_layer, roundings, tiny, tokens

pytestmark = pytest.mark.usefixtures("x64")

MODULES = {
    "plain": {}, "grouped": {"attention.kv_heads": 2}, "wide heads": {"attention.head_width": 6}, "no rope": {"rope.theta": None},
    "biases": {"attention.bias": ("q", "k", "v", "out"), "attention.kv_heads": 1}, "key bias": {"attention.bias": ("k",)},
    "sinks": {"attention.sinks": True, "attention.window": 3, "attention.softcap": 2.0}, "scale": {"attention.scale": 0.8},
}


def check_logits(changes: dict) -> None:
    """The logits of a model of one layer are those of the textbook."""
    model = tiny({"depth": 1, "norm.placement": "none"} | changes)
    module, rows, values = build(model)
    [p] = by_layer(rows, values, 1)
    embedding = np.asarray(values["embed"])
    x = embedding[np.asarray(tokens())]
    x = x + reference.attention_branch(model.layers[0], p)(x)
    x = x + reference.mlp_branch(model.layers[0], p)(x)
    assert_close(module(tokens()).logits, x @ embedding.T, roundings(model))


@pytest.mark.parametrize("name", MODULES)
def test_module(name):
    """Projections, biases, grouped heads, head width, scale, sinks and RoPE are where the textbook has them."""
    check_logits(MODULES[name])


CONTRACTS = {
    "rms": {}, "layer": {"attention.qk_norm.norm.kind": "layer", "attention.qk_norm.norm.bias": True},
    "values": {"attention.qk_norm.values": True},
}


@pytest.mark.parametrize("position", ("before", "after"))
@pytest.mark.parametrize(("kind", "contract"), (*itertools.product(QK_NORMS, CONTRACTS), ("l2", "rms")))
def test_qk_norm(kind, contract, position):
    """Each kind of QK-norm, before or after RoPE, RMSNorm or LayerNorm with bias, values too, is its textbook form."""
    changes = CONTRACTS[contract]
    check_logits({"attention.kv_heads": 2, "attention.qk_norm.kind": kind, "attention.qk_norm.position": position} | changes)


@pytest.mark.parametrize("kind", (*QK_NORMS, "l2"))
def test_before_and_after_rope_differ(kind):
    """Moving a norm with gains across RoPE changes the logits; moving the unit length of l2 does not."""
    logits = [build(tiny({"depth": 1, "attention.qk_norm.kind": kind, "attention.qk_norm.position": position}))[0](tokens()).logits
              for position in ("before", "after")]
    same = np.abs(logits[0] - logits[1]).max() <= roundings(tiny()) * EPS * np.abs(logits[0]).max()
    assert same == (kind == "l2")


@pytest.mark.parametrize(("kind", "position"), itertools.product(("head", "head_each", "l2"), ("before", "after")))
def test_qk_norm_bounds_the_logits(kind, position):
    """However large the input, |logit| <= max|g_q| max|g_k| k scale under per-head RMSNorm, and at most the temperature under l2."""
    model = tiny({"depth": 1, "attention.qk_norm.kind": kind, "attention.qk_norm.position": position, "embedding_scale": 1e3,
                  "norm.placement": "none"})
    module, rows, values = build(model, rows=8)
    logits = module(tokens(), taps=Taps(record={"attn.rows": lambda x: x})).records["attn.rows"]
    largest = jnp.abs(jnp.where(jnp.isfinite(logits), logits, 0)).max((0, 1, 3, 4))  # by head
    [p] = by_layer(rows, values, 1)
    if kind == "l2":
        bound = np.abs(p["attention.temperature"])
    else:
        k = model.width // model.attention.heads
        bound = k**0.5 * np.abs(p["attention.q_norm.scale"]).max() * np.abs(p["attention.k_norm.scale"]).max()
    assert (largest <= bound * (1 + roundings(model) * EPS)).all()
    assert (largest > 0.3 * bound).any()  # so the bound is no accident of small numbers
