"""The whole decoder: causality, positions, head, caps."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models import parameters
from models.taps import Edit, Taps
from models.transformer import Transformer
from tests.models.reference import assert_close, build, roundings, tiny, tokens

pytestmark = pytest.mark.usefixtures("x64")

T = 8
CAUSAL = {
    "pre": {}, "post": {"norm.placement": "post"}, "parallel": {"norm.placement": "parallel"}, "softcap": {"attention.softcap": 1.0},
    "hybrid": {"norm.placement": "hybrid", "attention.qk_norm.kind": "whole", "attention.qk_norm.values": True},
    "sinks": {"attention.sinks": True}, "grouped": {"attention.kv_heads": 1, "mlp.gated": True}, "scan": {"stack": "scan"},
}


def influence(model, t: int) -> np.ndarray:
    """|d logits[0, t] / d embedding[b, s]| as [b, s], by a gradient along a random direction of the logits."""
    module, _, _ = build(model)
    weight = jnp.asarray(np.random.default_rng(1).standard_normal(model.vocab))

    def loss(add):
        return (weight * module(tokens(), taps=Taps(edits={"embed": Edit(jnp.asarray(1.0), add)})).logits[0, t]).sum()

    return np.asarray(jnp.abs(jax.grad(loss)(jnp.zeros((2, T, model.width)))).sum(-1))


@pytest.mark.parametrize("name", CAUSAL)
def test_causality(name):
    """The gradient of a token's logits is exactly zero for later tokens and other sequences, and not zero for each earlier one."""
    found = influence(tiny(CAUSAL[name]), t=4)
    np.testing.assert_array_equal(found[0, 5:], 0)
    np.testing.assert_array_equal(found[1], 0)
    assert (found[0, :5] > 0).all()


@pytest.mark.parametrize(("window", "depth"), ((1, 3), (2, 2), (2, 3), (3, 2)))
def test_reach_of_a_window(window, depth):
    """Through N layers a token reaches N (window - 1) tokens back, and not one further."""
    reach = depth * (window - 1)
    found = influence(tiny({"attention.window": window, "depth": depth}), t=T - 1)[0, ::-1]
    assert (found[: reach + 1] > 0).all()
    np.testing.assert_array_equal(found[reach + 1 :], 0)


@pytest.mark.parametrize("changes", (
    {}, {"rope.layout": "interleaved", "rope.fraction": 0.5}, {"attention.qk_norm.kind": "head"}, {"attention.qk_norm.kind": "l2"},
    {"attention.window": 3, "attention.sinks": True}, {"rope.scaling.kind": "linear", "rope.scaling.factor": 4.0}, {"rope.theta": None},
    {"rope.scaling.kind": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.original": 64}, {"attention.clip": 0.5}, {"context": 16},
))
def test_positions_are_relative(changes):
    """A model knows positions by RoPE alone: starting the count anywhere changes no logit (with a norm before RoPE, too)."""
    module, _, _ = build(tiny(changes))
    start = 100
    here, there = (module(tokens(), positions=jnp.arange(first, first + T)).logits for first in (0, start))
    assert_close(there, here, roundings(tiny(changes)) * (1 + start))  # an angle of up to `start` radians is off by as many eps
    np.testing.assert_array_equal(here, module(tokens()).logits)


def test_positions_matter():
    """Stretching the positions of a RoPE model changes its logits; without RoPE nothing does."""
    for theta, moved in ((1e4, True), (None, False)):
        module, _, _ = build(tiny({"rope.theta": theta}))
        assert (np.abs(module(tokens(), positions=3 * jnp.arange(T)).logits - module(tokens()).logits).max() > 1e-3) == moved


LEARNED = {"rope.theta": None, "learned_positions": True, "context": 16, "embedding_scale": 3.0}
WHERE = {"default": None, "from eight": range(8, 16), "backwards": range(7, -1, -1), "one place": (5,) * T}


@pytest.mark.parametrize("name", WHERE)
def test_learned_positions(name):
    """The stream starts as scale E[token] + P[position], whatever positions are given; what follows is a model without."""
    module, _, values = build(tiny(LEARNED))
    where = None if WHERE[name] is None else jnp.asarray(WHERE[name])
    of_place = values["positions"][jnp.arange(T) if where is None else where]
    found = module(tokens(), positions=where, taps=Taps(record={"embed": lambda x: x}))
    assert_close(found.records["embed"], 3 * np.asarray(values["embed"])[np.asarray(tokens())] + np.asarray(of_place), 2)
    without = parameters.bind(Transformer(tiny(LEARNED | {"learned_positions": False})), values)
    edit = Taps(edits={"embed": Edit(jnp.asarray(1.0), of_place)})
    assert_close(found.logits, without(tokens(), taps=edit).logits, roundings(tiny(LEARNED)))
    assert np.abs(found.logits - without(tokens()).logits).max() > 0.1


def test_gradient_of_learned_positions():
    """Only the positions that were used have a gradient, and it is finite; a place used by all tokens gathers those of all."""
    module, _, values = build(tiny(LEARNED))
    weight = jnp.asarray(np.random.default_rng(1).standard_normal((2, T, 32)))
    loss = lambda positions, where: (weight * parameters.bind(module, values | {"positions": positions})(
        tokens(), positions=jnp.asarray(where)).logits).sum()
    gradient = jax.grad(loss)(values["positions"], range(4, 12))
    assert jnp.isfinite(gradient).all()
    assert (jnp.abs(gradient).max(-1) > 0).tolist() == [False] * 4 + [True] * T + [False] * 4
    one_place = jnp.broadcast_to(values["positions"][5], (16, 16))
    spread, gathered = jax.grad(loss)(one_place, range(T)), jax.grad(loss)(one_place, (5,) * T)
    assert_close(gathered[5], spread.sum(0), 3 * roundings(tiny(LEARNED)) * weight.size**0.5)


def test_a_position_without_a_vector_is_no_number():
    """Behind the last learned position there is nothing: the logits there are nan, not those of another place."""
    logits = build(tiny(LEARNED))[0](tokens(), positions=jnp.arange(9, 17)).logits
    assert jnp.isnan(logits[:, -1]).all()


@pytest.mark.parametrize("compiled", (False, True))
def test_context(compiled):
    """Learned positions refuse a sequence that is longer than they are, compiled or not; without them a model takes any."""
    call = lambda module: (jax.jit(lambda tokens: module(tokens).logits) if compiled else lambda tokens: module(tokens).logits)(tokens())
    with pytest.raises(ValueError, match=f"{T} tokens .* learned positions, {T - 1}") as caught:
        call(build(tiny(LEARNED | {"context": T - 1}))[0])
    assert "\n" not in str(caught.value)
    assert jnp.isfinite(call(build(tiny(LEARNED | {"context": T}))[0])).all()
    np.testing.assert_array_equal(*(call(build(tiny({"context": context}))[0]) for context in (T - 1, None)))


def test_tied_head():
    """A tied head is an untied one that holds the transposed embedding, in logits and (summed) in gradients."""
    tied, _, values = build(tiny())
    untied = Transformer(tiny({"tied": False}))
    weight = jnp.asarray(np.random.default_rng(1).standard_normal((2, T, 32)))

    def loss(module, values):
        return (weight * parameters.bind(module, values)(tokens()).logits).sum()

    ours, gradient = jax.value_and_grad(lambda values: loss(tied, values))(values)
    theirs, split = jax.value_and_grad(lambda values: loss(untied, values))(values | {"head.weight": values["embed"].T})
    bound = 3 * roundings(tiny()) * weight.size**0.5
    assert_close(ours, theirs, bound)
    assert_close(gradient["embed"], split["embed"] + split["head.weight"].T, bound)


def test_embedding_scale():
    """embedding_scale multiplies what enters the layers, and not the tied head."""
    scaled, _, values = build(tiny({"embedding_scale": 4.0, "tied": False}))
    plain = parameters.bind(Transformer(tiny({"tied": False})), values | {"embed": 4.0 * values["embed"]})
    assert_close(scaled(tokens()).logits, plain(tokens()).logits, roundings(tiny()))
    tied, _, values = build(tiny({"embedding_scale": 4.0}))
    split = values | {"embed": 4.0 * values["embed"], "head.weight": values["embed"].T}
    untied = parameters.bind(Transformer(tiny({"tied": False})), split)
    assert_close(tied(tokens()).logits, untied(tokens()).logits, roundings(tiny()))


def test_softcap():
    """The cap c turns logits z into c tanh(z / c): all lie inside (-c, c), small ones hardly move."""
    cap = 0.5
    z, capped = (build(tiny({"softcap": softcap}))[0](tokens()).logits for softcap in (None, cap))
    assert (np.abs(capped) < cap).all()
    assert np.abs(z).max() > 2 * cap
    assert_close(capped, cap * np.tanh(np.asarray(z) / cap), roundings(tiny()) * np.abs(z).max() / cap)


@pytest.mark.parametrize("sequence", (1, 5))
def test_prefixes(sequence):
    """The logits of a prefix are those of the full text."""
    module, _, _ = build(tiny())
    assert_close(module(tokens()[:, :sequence]).logits, module(tokens()).logits[:, :sequence], roundings(tiny()))


@pytest.mark.parametrize("dtype", ("bfloat16", "float32", "float64"))
def test_stream_has_the_type_of_the_parameters(dtype):
    """Parameters of a type give a stream and logits of that type, within its precision of the float64 ones."""
    model = tiny({"attention.sinks": True, "attention.qk_norm.kind": "whole", "norm.placement": "sandwich", "rope.fraction": 0.5})
    module, _, values = build(model, dtype=dtype)
    found = module(tokens(), taps=Taps(record={"resid.post": lambda x: x, "attn.entropy": lambda x: x}))
    assert {found.logits.dtype.name, found.records["resid.post"].dtype.name} == {dtype}
    assert found.records["attn.entropy"].dtype == np.promote_types(dtype, "float32")
    exact = parameters.bind(module, jax.tree.map(lambda value: value.astype("float64"), values))(tokens()).logits
    error = np.linalg.norm(np.asarray(found.logits, np.float64) - np.asarray(exact)) / np.linalg.norm(exact)
    eps = float(jnp.finfo(dtype).eps)
    assert error <= roundings(model) ** 0.5 * eps  # rounding errors of many operations add up as a random walk
    assert error > eps / 16 or dtype == "float64"
