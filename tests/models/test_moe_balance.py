"""The losses of a router and the rule of its selection bias: closed forms, masks, and what must not change them."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from configs.moe import Moe
from models import parameters
from models.moe.balance import balance_loss, bias_update, loads, squared_lse
from models.transformer import Transformer
from tests.models.reference import EPS, assert_close, build, draw, random_values, roundings, tiny, tokens

pytestmark = pytest.mark.usefixtures("x64")

B, T, E = 2, 12, 6
OVER = ("batch", "sequence")


def config(k: int = 2, over: str = "batch") -> Moe:
    return Moe(experts=E, top_k=k, balance_over=over)


def cyclic(k: int) -> np.ndarray:
    """Each token takes k experts in turn, so that each expert has as many tokens in each sequence."""
    first = np.arange(T)[None, :, None] * k
    return np.broadcast_to((np.arange(E) - first) % E < k, (B, T, E))


def same(k: int) -> np.ndarray:
    """Every token takes the first k experts."""
    return np.broadcast_to(np.arange(E) < k, (B, T, E))


def random_choice(seed: str, k: int = 2) -> np.ndarray:
    return np.argsort(np.argsort(draw(seed, B, T, E))) < k


def softmax(z):
    p = np.exp(z)
    return p / p.sum(-1, keepdims=True)


@pytest.mark.parametrize("over", OVER)
@pytest.mark.parametrize("k", (1, 2, 3, 6))
def test_an_even_load_costs_one(k, over):
    """For every top_k, and for any probabilities, an even load costs exactly 1; so do even probabilities under any load."""
    p = softmax(draw("p", B, T, E))
    assert_close(balance_loss(config(k, over), jnp.asarray(cyclic(k)), jnp.asarray(p), None), 1.0, 2 * B * T)
    even = jnp.full((B, T, E), 1 / E)
    assert_close(balance_loss(config(k, over), jnp.asarray(random_choice("c", k)), even, None), 1.0, 2 * B * T)


@pytest.mark.parametrize("over", OVER)
@pytest.mark.parametrize("k", (1, 2, 3))
def test_the_same_experts_for_all_cost_experts_by_k(k, over):
    """All tokens on the same k experts, with all of their probability, cost E / k."""
    p = same(k) / k
    assert_close(balance_loss(config(k, over), jnp.asarray(same(k)), jnp.asarray(p), None), E / k, 2 * B * T)


def by_hand(chosen, p, counted, over: str) -> float:
    """The loss from loops over the counted tokens."""
    parts = [range(B)] if over == "batch" else [[i] for i in range(B)]
    costs = []
    for part in parts:
        mine = [(i, t) for i in part for t in range(T) if counted[i, t]]
        if mine:
            assignments = sum(chosen[at].sum() for at in mine)
            costs.append(sum(E * sum(chosen[at][e] for at in mine) / assignments * np.mean([p[at][e] for at in mine]) for e in range(E)))
    return np.mean(costs)


MASKS = {"all": np.ones((B, T), bool), "some": draw("mask", B, T) > 0, "one sequence": np.arange(B)[:, None] + np.zeros((B, T)) > 0}


@pytest.mark.parametrize("over", OVER)
@pytest.mark.parametrize("mask", MASKS)
def test_the_loss_is_its_definition_over_the_counted_tokens(mask, over):
    """E sum f P with f by assignments, over the counted tokens of the batch, or of each sequence that has any."""
    chosen, p, counted = random_choice("c"), softmax(2 * draw("p", B, T, E)), MASKS[mask]
    found = balance_loss(config(over=over), jnp.asarray(chosen), jnp.asarray(p), jnp.asarray(counted))
    assert_close(found, by_hand(chosen, p, counted, over), 2 * B * T)


@pytest.mark.parametrize("mask", MASKS)
def test_tokens_that_do_not_count_change_nothing(mask):
    """Whatever the tokens that are masked do, losses and loads are the same, and they have no gradient."""
    counted = jnp.asarray(MASKS[mask])
    z, other = draw("z", B, T, E), np.where(MASKS[mask][..., None], draw("z", B, T, E), 3 * draw("other", B, T, E))
    chosen = random_choice("c")
    changed = np.where(MASKS[mask][..., None], chosen, random_choice("d"))

    def judged(z, chosen):
        balance = balance_loss(config(), jnp.asarray(chosen), jax.nn.softmax(z), counted)
        return balance + squared_lse(z, counted), loads(jnp.asarray(chosen), counted)

    run = jax.value_and_grad(judged, has_aux=True)
    (found, load), gradient = run(jnp.asarray(other), changed)
    (expected, same_load), _ = run(jnp.asarray(z), chosen)
    np.testing.assert_array_equal(found, expected)
    np.testing.assert_array_equal(load, same_load)
    np.testing.assert_array_equal(np.asarray(gradient)[~MASKS[mask]], 0)
    assert float(load.sum()) == 2 * MASKS[mask].sum()


def test_sequences_of_opposite_imbalance():
    """Two sequences, each on one expert of its own of two, are even as a batch, and as uneven as can be one by one."""
    chosen = jnp.asarray(np.arange(2)[:, None, None] == np.broadcast_to(np.arange(2), (2, T, 2)))
    p = chosen.astype("float64")
    cost = lambda over: balance_loss(Moe(experts=2, top_k=1, balance_over=over), chosen, p, None)
    assert_close(cost("batch"), 1.0, 2 * T)
    assert_close(cost("sequence"), 2.0, 2 * T)


def test_gradients_are_those_of_the_probability():
    """d balance / d P[token, e] = E f[e] / tokens: the fraction is a constant. d z-loss / d z = 2 lse softmax(z) / tokens."""
    chosen, z = random_choice("c"), draw("z", B, T, E)
    f = chosen.sum((0, 1)) / chosen.sum()
    gradient = jax.grad(lambda p: balance_loss(config(), jnp.asarray(chosen), p, None))(jnp.asarray(softmax(z)))
    assert_close(gradient, np.broadcast_to(E * f / (B * T), z.shape), 2 * B * T)
    lse = np.log(np.exp(z).sum(-1, keepdims=True))
    assert_close(squared_lse(jnp.asarray(z), None), (lse**2).mean(), 2 * B * T)
    assert_close(jax.grad(lambda z: squared_lse(z, None))(jnp.asarray(z)), 2 * lse * softmax(z) / (B * T), 2 * B * T)


def test_a_step_down_the_gradient_evens_the_probabilities():
    """Where logits choose, following the balance loss's gradient lowers the probability of the fullest expert and raises the emptiest's."""
    z = draw("z", B, T, E) + np.array([2.0, 0, 0, 0, 0, -2.0])
    chosen = np.argsort(np.argsort(-z)) < 2
    gradient = jax.grad(lambda z: balance_loss(config(), jnp.asarray(chosen), jax.nn.softmax(z), None))(jnp.asarray(z))
    moved = (softmax(z - 0.1 * np.asarray(gradient)) - softmax(z)).mean((0, 1))
    load = chosen.sum((0, 1))
    assert moved[load.argmax()] < 0 < moved[load.argmin()]


def test_the_bias_moves_against_the_load():
    """The bias rises by the rate below the mean load, falls by it above, and stays at it."""
    np.testing.assert_array_equal(bias_update(jnp.asarray([0.0, 4.0, 9.0, 3.0]), 0.25), [0.25, 0.0, -0.25, 0.25])
    np.testing.assert_array_equal(bias_update(jnp.asarray([5.0, 5.0]), 0.25), [0.0, 0.0])


def test_the_bias_evens_a_skewed_router():
    """Under a fixed skewed router that draws most tokens to two experts, the rule brings the largest load within a tenth of the mean."""
    scores = 1 / (1 + np.exp(-(draw("scores", 1, 600, E) + np.array([2.0, 1.0, 0, 0, 0, 0]))))
    bias = np.zeros(E)
    load_under = lambda bias: np.bincount(np.argsort(-(scores + bias))[..., :2].ravel(), minlength=E)
    vio = lambda load: load.max() / load.mean() - 1
    before = vio(load_under(bias))
    for _ in range(600):
        bias = bias + np.asarray(bias_update(jnp.asarray(load_under(bias), "float32"), 1e-3))
    assert before > 0.8 and vio(load_under(bias)) < 0.1


MODEL = {"depth": 3, "moe.experts": 4, "overrides": ("0: moe.experts=None",)}


@functools.cache
def routed(stack: str, remat: str):
    """Routing of each layer, and the gradient of its losses."""
    module, _, values = build(tiny(MODEL | {"stack": stack}))

    @jax.jit
    @functools.partial(jax.grad, has_aux=True)
    def run(values):
        routing = parameters.bind(module, values)(tokens(), remat=remat).routing
        return sum(of.balance + 0.1 * of.squared_lse for of in routing if of is not None), routing

    return run(values)


@pytest.mark.parametrize(("stack", "remat"), (("scan", "none"), ("scan", "dots"), ("unroll", "full")))
def test_routing_is_counted_once(stack, remat):
    """Scanned or unrolled, and whatever the backward pass recomputes, each mixture's losses, loads and gradients are the same; the dense
    layer has none."""
    (expected, right), (found, routing) = routed("unroll", "none"), routed(stack, remat)
    assert [of is None for of in routing] == [True, False, False] == [of is None for of in right]
    bound = 10 * roundings(tiny(MODEL))
    jax.tree.map(lambda a, b: assert_close(a, b, bound), (found, routing), (expected, right))
    assert all(float(of.load.sum()) == 2 * 16 for of in routing if of is not None)


def test_losses_reach_the_router_of_their_layer():
    """The last layer's balance loss has a gradient for its router, and none for what its experts are made of."""
    module, _, values = build(tiny({"depth": 2, "moe.experts": 4, "stack": "unroll"}))
    gradient = jax.grad(lambda values: parameters.bind(module, values)(tokens()).routing[1].balance)(values)
    router, up = (np.asarray(gradient[f"stack.segments.0.unit.0.mlp.{name}"]) for name in ("router.weight", "up"))
    assert np.abs(router).max((1, 2)).min() > EPS
    assert np.abs(up[0]).max() > EPS and np.abs(up[1]).max() == 0


def test_float32_runs_under_strict_promotion():
    """Float32 parameters and a mask give float32 losses, with operands of both kinds and noise."""
    for operands in ("float32", "bfloat16"):
        module = Transformer(tiny({"moe.experts": 4, "moe.jitter": 0.1, "depth": 1}), operands=operands)
        out = parameters.bind(module, random_values(parameters.table(module), "float32"))(
            tokens(), counted=tokens() != 0, key=jax.random.key(0))
        assert {out.logits.dtype, *(leaf.dtype for leaf in out.routing[0])} == {np.dtype("float32")}
