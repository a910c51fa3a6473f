"""The attention module against the textbook: projections, biases, grouped heads, every kind of QK-norm, RoPE."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models import parameters
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


CLIP, SCALE = 0.6, 6.0
CLIPPED = {
    "plain": {}, "no rope": {"rope.theta": None}, "biases": {"attention.bias": ("q", "k", "v")}, "one key head": {"attention.kv_heads": 1},
    "norm before": {"attention.qk_norm.kind": "head", "attention.qk_norm.values": True},
    "norm after": {"attention.qk_norm.kind": "head", "attention.qk_norm.position": "after", "attention.qk_norm.values": True},
}
SEEN = ("attn.q", "attn.k", "attn.v", "attn.heads")


def clipped(changes: dict, clip: float | None = CLIP):
    model = tiny({"depth": 1, "norm.placement": "none", "embedding_scale": SCALE, "attention.clip": clip} | changes)
    return model, *build(model)


def seen(module) -> dict[str, np.ndarray]:
    """Queries, keys, values and the output of each head."""
    records = module(tokens(), taps=Taps(record={site: lambda x: x for site in SEEN})).records
    return {site: np.asarray(records[site][0]) for site in SEEN}


@pytest.mark.parametrize("name", CLIPPED)
def test_clip(name):
    """Entries of queries, keys and values are limited to [-clip, clip]: after the projection and a norm that stands there, before RoPE."""
    model, module, rows, values = clipped(CLIPPED[name])
    [p], config = by_layer(rows, values, 1), model.layers[0].attention
    x = SCALE * np.asarray(values["embed"])[np.asarray(tokens())]

    def normed(x, role):
        return reference.norm(x, "rms", gain=p[f"attention.{role}_norm.scale"])

    def expected(role):
        y = np.einsum("btd,dhk->bthk", x, p[f"attention.{role}.weight"]) + p.get(f"attention.{role}.bias", 0.0)
        here = config.qk_norm.kind != "none" and (role == "v" or config.qk_norm.position == "before")
        y = normed(y, role) if here else y
        assert y.min() < -CLIP and y.max() > CLIP  # so both sides are met
        y = np.clip(y, -CLIP, CLIP)
        if role == "v":
            return y
        y = y if model.rope.theta is None else reference.rope(y, np.arange(y.shape[1]), model.rope.theta)
        return normed(y, role) if config.qk_norm.kind != "none" and not here else y

    q, k, v = map(expected, "qkv")
    heads, _ = reference.attention(q, k, v, scale=q.shape[-1] ** -0.5)
    for site, value in zip(SEEN, (q, k, v, heads), strict=True):
        assert_close(seen(module)[site], value, roundings(model))


def test_clip_out_of_reach_is_none():
    """Entries within the limit pass to the last bit."""
    wide, none = (seen(clipped({}, clip)[1]) for clip in (1e3, None))
    for site in SEEN:
        np.testing.assert_array_equal(wide[site], none[site])


@pytest.mark.parametrize("theta", (1e4, None))
def test_clip_bounds_the_logits(theta):
    """However large the input, |q . k| <= k clip^2, before RoPE and (which keeps lengths) after it, and |v| <= clip."""
    model, module, *_ = clipped({"embedding_scale": 1e6, "rope.theta": theta})
    found, k = seen(module), model.width // model.attention.heads
    largest = np.abs(np.einsum("bthk,bshk->bhts", found["attn.q"], found["attn.k"])).max()
    assert largest <= k * CLIP**2 * (1 + roundings(model) * EPS)
    assert largest > 0.5 * k * CLIP**2  # so the bound is no accident of small numbers
    np.testing.assert_array_equal(np.abs(found["attn.v"]), CLIP)


def test_a_clipped_entry_passes_no_gradient():
    """All gradients are finite; where every entry is clipped the projections get none."""
    for scale, all_clipped in ((1.0, False), (1e9, True)):
        _, module, rows, values = clipped({"embedding_scale": scale})
        loss = lambda values, module=module: (parameters.bind(module, values)(tokens()).logits[..., 0]).sum()
        gradient = jax.grad(loss)(values)
        assert all(jnp.isfinite(value).all() for value in gradient.values())
        for row in rows:
            if row.role in ("attention.q", "attention.k", "attention.v"):
                assert (gradient[row.path] == 0).all() == all_clipped, row.path
