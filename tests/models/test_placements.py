"""Placements: each row of the table is its textbook equation, and owns the norms that it names and no others."""

import collections

import jax
import numpy as np
import pytest

from models import parameters
from models.norms import PLACEMENTS, Norm
from models.taps import SITES as ALL_SITES
from models.taps import Tap, Taps
from models.transformer import Transformer
from tests.models import reference
from tests.models.reference import assert_close, build, by_layer, roundings, tiny, tokens

SITES = {site: row for site, row in ALL_SITES.items() if not row.mixture}

DEPTH = 5  # a quarter of it is not whole: Mix-LN has two post-norm layers

HYBRID = {"attention.qk_norm.kind": "head", "attention.qk_norm.values": True}


def parallel(x, attn, mlp, n, i):
    z = n("attention", "in", x)
    return x + attn(z) + mlp(z)


def pre(x, attn, mlp, n, i):
    x = x + attn(n("attention", "in", x))
    return x + mlp(n("mlp", "in", x))


def post(x, attn, mlp, n, i):
    x = n("attention", "out", x + attn(x))
    return n("mlp", "out", x + mlp(x))


def sandwich(x, attn, mlp, n, i):
    x = x + n("attention", "branch", attn(n("attention", "in", x)))
    return x + n("mlp", "branch", mlp(n("mlp", "in", x)))


def reordered(x, attn, mlp, n, i):
    x = x + n("attention", "branch", attn(x))
    return x + n("mlp", "branch", mlp(x))


def deepnorm(x, attn, mlp, n, i):
    alpha = (2 * DEPTH) ** 0.25
    x = n("attention", "out", alpha * x + attn(x))
    return n("mlp", "out", alpha * x + mlp(x))


def layernorm_scaling(x, attn, mlp, n, i):
    x = x + attn(n("attention", "in", x) / np.sqrt(i))
    return x + mlp(n("mlp", "in", x) / np.sqrt(i))


def hybrid(x, attn, mlp, n, i):
    y = n("attention", "out", attn(x) + x)
    return mlp(y) + y


def mix(x, attn, mlp, n, i):
    return (post if i <= 2 else pre)(x, attn, mlp, n, i)


def none(x, attn, mlp, n, i):
    x = x + attn(x)
    return x + mlp(x)


def by_hand(x, attn, mlp, n, i):
    x = n("attention", "out", 1.5 * x + 0.25 * attn(0.5 * n("attention", "in", x)))
    return 1.5 * x + 0.25 * n("mlp", "branch", mlp(0.5 * x))


def parallel_by_hand(x, attn, mlp, n, i):
    z = 0.5 * n("attention", "in", x)
    return 1.5 * x + 0.25 * (attn(z) + mlp(z))


# The equation of layer i from 1, whether a norm stands before the head, and what else the placement needs.
EQUATIONS = {
    "none": (none, False, {}),
    "pre": (pre, True, {}),
    "post": (post, False, {}),
    "sandwich": (sandwich, True, {}),
    "reordered": (reordered, True, {}),
    "deepnorm": (deepnorm, False, {}),
    "layernorm_scaling": (layernorm_scaling, True, {}),
    "hybrid": (hybrid, True, HYBRID),
    "mix": (mix, True, {}),
    "parallel": (parallel, True, {}),
    "by hand": (by_hand, False, {"norm.placement": "pre", "norm.attention_slots": ("in", "out"), "norm.mlp_slots": ("branch",),
                                 "norm.gain": 0.5, "norm.alpha": 1.5, "norm.beta": 0.25, "norm.final": False}),
    "parallel by hand": (parallel_by_hand, True, {"norm.placement": "parallel", "norm.gain": 0.5, "norm.alpha": 1.5, "norm.beta": 0.25}),
}
SLOTS = {  # attention, MLP
    "none": ("", ""), "pre": ("in", "in"), "post": ("out", "out"), "sandwich": ("in branch", "in branch"),
    "reordered": ("branch", "branch"), "deepnorm": ("out", "out"), "layernorm_scaling": ("in", "in"), "hybrid": ("out", ""),
    "parallel": ("in", ""), "by hand": ("in out", "branch"), "parallel by hand": ("in", ""),
}


def config(name: str, changes: dict | None = None):
    placement = {} if name.endswith("by hand") else {"norm.placement": name}
    return tiny({"depth": DEPTH, "norm.kind": "layer", "norm.bias": True} | placement | EQUATIONS[name][2] | (changes or {}))


def test_every_row_has_an_equation():
    """The equations below are those of the whole table."""
    assert set(PLACEMENTS) == {name for name in EQUATIONS if not name.endswith("by hand")}


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("name", EQUATIONS)
def test_equation(name):
    """With random norm gains and biases, the stream after every layer and the logits are those of the textbook."""
    model = config(name)
    module, rows, values = build(model)
    found = module(tokens(), taps=Taps(record={"resid.post": lambda x: x}))
    equation, final, _ = EQUATIONS[name]

    embedding = np.asarray(values["embed"])
    x, stream = embedding[np.asarray(tokens())], []
    for i, p in enumerate(by_layer(rows, values, DEPTH), 1):
        layer = model.layers[i - 1]

        def n(branch, slot, x, p=p):
            path = f"{branch}_residual.norm_{slot}"
            return reference.norm(x, "layer", gain=p[f"{path}.scale"], bias=p[f"{path}.bias"])

        x = equation(x, reference.attention_branch(layer, p), reference.mlp_branch(layer, p), n, i)
        stream.append(x)
    x = reference.norm(x, "layer", gain=values["norm.scale"], bias=values["norm.bias"]) if final else x
    assert_close(found.records["resid.post"], np.stack(stream), roundings(model))
    assert_close(found.logits, x @ embedding.T, roundings(model))


@pytest.mark.parametrize("name", SLOTS)
def test_absent_slots_own_no_parameters(name):
    """A layer's norm parameters are a gain and a bias for each slot that its placement names, and the frame's where it has a norm."""
    rows = parameters.table(Transformer(config(name)))
    expected = {f"{branch}_residual.norm_{slot}.{value}" for branch, held in zip(("attention", "mlp"), SLOTS[name], strict=True)
                for slot in held.split() for value in ("scale", "bias")}
    assert {row.local_path for row in rows if row.layers and row.group == "norm"} == expected
    assert any(row.path == "norm.scale" for row in rows) == EQUATIONS[name][1]


@pytest.mark.parametrize("final", (True, False))
@pytest.mark.parametrize("name", ("pre", "post"))
def test_final_norm_by_hand(name, final):
    """norm.final, where set, beats the placement."""
    assert isinstance(Transformer(config(name, {"norm.final": final})).norm, Norm) == final


@pytest.mark.parametrize("stack", ("unroll", "scan"))
@pytest.mark.parametrize("name", EQUATIONS)
def test_every_site_fires_once_a_layer(name, stack, monkeypatch):
    """Each site is met once in every layer, which is traced once for all its repeats, and each site of the frame once."""
    fired = collections.Counter()
    plain = Tap.__call__
    monkeypatch.setattr(Tap, "__call__", lambda tap, site, x: (fired.update([site]), plain(tap, site, x))[1])
    module = Transformer(config(name, {"stack": stack}))
    rows = parameters.table(module)
    run = lambda values: parameters.bind(module, values)(tokens()).logits
    jax.eval_shape(run, {row.path: jax.ShapeDtypeStruct(row.shape, "float32") for row in rows})
    bodies = sum(len(segment.unit) for segment in module.stack.segments)
    assert fired == {site: bodies if row.layered else 1 for site, row in SITES.items()}


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("name", EQUATIONS)
def test_records_have_the_axes_of_their_site(name):
    """What a site records is shaped as SITES says, behind an axis of layers where it has one."""
    model = config(name, {"attention.kv_heads": 2})
    module, _, _ = build(model, rows=3)
    found = module(tokens(), taps=Taps(record={site: lambda x: x for site in SITES}))
    sizes = {"l": DEPTH, "b": 2, "t": 8, "s": 8, "d": 16, "h": 4, "g": 2, "k": 4, "f": 24, "v": 32}
    for site, row in SITES.items():
        axes = [*"l" * row.layered, *row.axes.split()]
        shape = tuple(3 if site == "attn.rows" and axis == "t" else sizes[axis] for axis in axes)
        assert found.records[site].shape == shape, site
