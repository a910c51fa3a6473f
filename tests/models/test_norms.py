"""Norms: the contract in full, what each kind is invariant to, and zero input."""

import itertools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from configs.norm import NormContract
from models import parameters
from models.norms import EPS_POSITIONS, NORMS, Norm, contracts
from models.transformer import Transformer
from tests.models import reference
from tests.models.reference import EPS, assert_close, draw, tiny

pytestmark = pytest.mark.usefixtures("x64")

D = 32
ROUNDINGS = 4 * D  # two sums of D terms and what follows them
LARGE_EPS = 0.1  # so that its place shows
SCALES = ("w", "1+w", None)


def build(contract, shape=(D,), over=1, dtype="float64"):
    """A norm with random gain, bias and alpha: (norm, {name: float64 array})."""
    module = Norm(contract, shape, over=over)
    values = {row.path: 0.5 + 0.3 * draw(row.path, *row.shape) for row in parameters.table(module)}
    return parameters.bind(module, {name: jnp.asarray(value, dtype) for name, value in values.items()}), values


def expected(x, contract, values, axes=(-1,)):
    gain = values.get("scale", 1.0) + (1.0 if contract.scale == "1+w" and "scale" in values else 0.0)
    return reference.norm(x, contract.kind, eps=contract.eps, eps_position=contract.eps_position, gain=gain, axes=axes,
                          centred={"kind": None, "yes": True, "no": False}[contract.centring],
                          bias=values.get("bias", 0.0), alpha=values.get("alpha"))


@pytest.mark.parametrize("centring", ("kind", "yes", "no"))
@pytest.mark.parametrize("position", EPS_POSITIONS)
@pytest.mark.parametrize("kind", NORMS)
def test_contract(kind, position, centring):
    """A norm is its equation, for every place of eps, form of the gain, bias and centring."""
    x = 0.3 + 0.2 * draw("x", 4, D)
    x[0] *= 0.1  # below eps: the floor holds
    for scale, bias in itertools.product(SCALES, (False, True)):
        contract = NormContract(kind, LARGE_EPS, position, centring, scale, bias)
        norm, values = build(contract)
        owned = {"scale": scale is not None, "bias": bias, "alpha": kind == "dyt"}
        assert set(values) == {name for name, held in owned.items() if held and kind != "none"}
        assert_close(norm(jnp.asarray(x)), expected(x, contract, values), ROUNDINGS)


@pytest.mark.parametrize("kind", NORMS)
def test_statistic_over_two_axes(kind):
    """With over = 2, one statistic serves all heads of a token, and each head has a gain of its own."""
    x, contract = draw("heads", 3, 4, 8), NormContract(kind, LARGE_EPS, bias=True)
    norm, values = build(contract, (4, 8), over=2)
    assert_close(norm(jnp.asarray(x)), expected(x, contract, values, axes=(-2, -1)), ROUNDINGS)


SHIFT_INVARIANT, SCALE_INVARIANT = {"layer"}, {"layer", "rms", "l2"}


@pytest.mark.parametrize("kind", NORMS)
def test_invariances(kind):
    """LayerNorm forgets shift and scale of its input, RMSNorm and unit length the scale alone, tanh and identity nothing."""
    norm, _ = build(NormContract(kind, eps=0.0))
    x, scale, shift = jnp.asarray(draw("x", 4, D)), 3.0, 5.0
    y = norm(x)
    condition = shift / float(jnp.std(x, -1).min())  # digits that subtracting the mean cancels
    for moved, forgotten in ((scale * x, kind in SCALE_INVARIANT), (x + shift, kind in SHIFT_INVARIANT)):
        if forgotten:
            assert_close(norm(moved), y, ROUNDINGS * condition)
        else:
            assert np.abs(norm(moved) - y).max() > 0.1


@pytest.mark.parametrize("kind", sorted(SCALE_INVARIANT))
def test_eps_breaks_scale_invariance_by_no_more_than_its_share(kind):
    """With eps inside the root, growing the input by any factor changes the output by a share of at most eps / 2m."""
    eps, x = 1e-3, jnp.asarray(draw("x", 4, D))
    norm, _ = build(NormContract(kind, eps=eps, scale=None))
    centred = x - x.mean(-1, keepdims=True) if kind == "layer" else x
    m = (jnp.sum if kind == "l2" else jnp.mean)(centred**2, -1, keepdims=True)
    off = jnp.abs(norm(10 * x) - norm(x)) / jnp.abs(norm(10 * x))
    assert (off <= eps / (2 * m) * (1 + 1e-6)).all()
    assert (off > 0.4 * eps / m).all()


@pytest.mark.parametrize("kind", sorted(SCALE_INVARIANT))
def test_gradient_is_orthogonal_to_what_is_forgotten(kind):
    """Without eps no gradient runs along the (centred) input, and through LayerNorm none along the ones."""
    norm, _ = build(NormContract(kind, eps=0.0))
    x, weight = jnp.asarray(draw("x", 4, D)), jnp.asarray(draw("weight", 4, D))
    gradient = jax.grad(lambda x: (weight * norm(x)).sum())(x)
    bound = ROUNDINGS * EPS * jnp.linalg.norm(gradient, axis=-1)
    assert (jnp.abs((x * gradient).sum(-1)) <= bound * jnp.linalg.norm(x, axis=-1)).all()
    if kind == "layer":
        assert (jnp.abs(gradient.sum(-1)) <= bound * D**0.5).all()


@pytest.mark.parametrize("position", EPS_POSITIONS)
@pytest.mark.parametrize("kind", NORMS)
def test_zero_input(kind, position):
    """Where eps is positive, a vector of zeros gives the bias, and a finite gradient."""
    norm, values = build(NormContract(kind, 1e-6, position, bias=True))
    x = jnp.zeros((2, D))
    np.testing.assert_array_equal(norm(x), np.broadcast_to(values.get("bias", 0.0), (2, D)))
    assert jnp.isfinite(jax.grad(lambda x: norm(x).sum())(x)).all()


BF16 = ml_dtypes.bfloat16


def step_by_step(x, contract, values):
    """The norm of bfloat16 numbers, each operation rounded to the precision that the contract names (sums are float32)."""
    inner = BF16 if contract.statistics == "input" else np.float32
    outer = BF16 if contract.scale_cast == "after" else inner
    y = x.astype(inner)
    mean = lambda x: x.astype(np.float32).mean(-1, keepdims=True).astype(inner)
    if contract.kind == "layer":
        y = y - mean(y)
    y = (y / np.sqrt(mean(y * y) + inner(contract.eps))).astype(outer)
    gain = values["scale"].astype(BF16).astype(outer)
    y = y * (gain if contract.scale == "w" else outer(1) + gain)
    return (y + values["bias"].astype(BF16).astype(outer)).astype(BF16)


@pytest.mark.parametrize("kind", ("layer", "rms"))
@pytest.mark.parametrize("scale", ("w", "1+w"))
def test_bfloat16_casts(kind, scale):
    """In bfloat16 the statistics' precision and the place of the cast decide the last bits, each as defined."""
    x = draw("x", 16, D).astype(BF16)
    seen = []
    for statistics, cast in itertools.product(("float32", "input"), ("before", "after")):
        contract = NormContract(kind, 1e-3, scale=scale, bias=True, statistics=statistics, scale_cast=cast)
        norm, values = build(contract, dtype="bfloat16")
        y = np.asarray(norm(jnp.asarray(x)))
        assert y.dtype == BF16
        np.testing.assert_array_equal(y, step_by_step(x, contract, values))
        seen.append(y.tobytes())
    assert len(set(seen)) == 3  # with statistics in bfloat16 the cast changes nothing


def test_words_tell_contracts_apart():
    """The line that describes a contract differs wherever the numbers would: in each field but a centring that is the kind's own."""
    plain = NormContract("rms")
    others = [NormContract(kind) for kind in NORMS if kind != "rms"] + [
        NormContract("rms", **change) for change in (
            {"eps": 1e-5}, {"eps_position": "outside"}, {"eps_position": "floor"}, {"centring": "yes"}, {"scale": "1+w"}, {"scale": None},
            {"bias": True}, {"statistics": "input"}, {"scale_cast": "after"})]
    assert len({contract.words() for contract in (plain, *others)}) == 1 + len(others)
    assert NormContract("rms", centring="no").words() == plain.words()
    assert plain.words(over=2) != plain.words()


def test_contracts_of_a_model():
    """Each norm of a model is told by its place, with the layers that have it."""
    model = tiny({"depth": 5, "norm.placement": "mix", "attention.qk_norm.kind": "whole", "attention.qk_norm.norm.kind": "layer"})
    found = {(place, layers) for place, _, layers in contracts(Transformer(model))}
    branches = {(f"{branch}_residual.norm_{slot}", layers)
                for branch in ("attention", "mlp") for slot, layers in (("out", "0, 1"), ("in", "2, 3, 4"))}
    assert found == branches | {(f"attention.{name}_norm", "0, 1, 2, 3, 4") for name in "qk"} | {("norm", "frame")}
    assert {words.split(",")[0] for place, words, _ in contracts(Transformer(model)) if place.startswith("attention.")} == {"layer"}
