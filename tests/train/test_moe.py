"""Training a mixture: what is minimised, the rule of the selection bias, noise, and what must not change the numbers."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models.moe.balance import Routing
from tests.train.small import SAME, assert_published_close, plan_of, small, tokens_of
from tests.train.test_step import SMOOTH, host
from train.data.corpus import SEPARATOR
from train.instruments import PANEL
from train.loss import routing_loss
from train.step import bias_updates, gradients, make_evaluation, make_step, noise_key

MOE = "model.moe."
MIXTURE = {MOE + "experts": 4, MOE + "width": 16, "model.depth": 2, "model.overrides": ("0: moe.experts=None",)}
BALANCED = MIXTURE | {MOE + "balance": 0.1, MOE + "balance_over": "sequence", MOE + "z_loss": 0.01, MOE + "dispatch": "capacity"}
BIASED = MIXTURE | {MOE + "selection_bias": True, MOE + "bias_rate": 0.125}
SELECTION = "stack.segments.1.unit.0.mlp.selection"
OF_ROUTERS = tuple(instrument for instrument in PANEL if instrument.site.startswith("router"))


@functools.cache
def program(*changes):
    """(plan, quiet step) of an experiment."""
    plan = plan_of(small(SMOOTH | dict(changes)))
    return plan, make_step(plan, loud=False)


def step(changes, steps: int = 1):
    """The state after some steps and what the last one published, on the host."""
    plan, of = program(*changes.items())
    state = plan.fresh()
    for number in range(steps):
        state, published = of(state, tokens_of(plan.config, plan.mesh, number))
    return host(state), host(published)


@functools.cache
def measure(*changes):
    """The program of loss, gradient, statistics of the routers and routing, from parameters, tokens and a key."""
    plan = plan_of(small(dict(changes)))
    accumulate = plan.config.train.accumulate
    return plan, jax.jit(lambda parameters, tokens, key=None: gradients(plan, OF_ROUTERS, parameters, tokens, accumulate, key))


def measured(changes, tokens=None):
    plan, of = measure(*changes.items())
    return host(of(plan.fresh().parameters, tokens_of(plan.config, plan.mesh) if tokens is None else jnp.asarray(tokens)))


def test_the_three_losses_are_what_is_minimised():
    """train/loss stays the cross entropy: it, the z-loss and the router's weighted losses add up to the total."""
    loss, _, published, routing = measured(BALANCED)
    _, of_step = step(BALANCED)
    by_hand = 0.1 * routing[1].balance + 0.01 * routing[1].squared_lse
    np.testing.assert_allclose(of_step["train/router_loss"], by_hand, rtol=SAME)
    np.testing.assert_allclose(of_step["train/loss"] + of_step["train/z_loss"] + of_step["train/router_loss"], loss.total, rtol=SAME)
    plan, _ = program(*BALANCED.items())
    held_out = make_evaluation(plan)(plan.fresh().parameters, tokens_of(plan.config, plan.mesh))
    np.testing.assert_allclose(of_step["train/loss"], held_out, rtol=SAME)
    assert routing[0] is None and published["router_balance"][0] is None
    assert published["router_balance"][1] == routing[1].balance


def test_opposite_imbalances_do_not_cancel():
    """Two layers, each on its own half of the experts, cost twice what one does: losses are whole before they are added."""
    layers = small({MOE + "experts": 2, MOE + "balance": 0.5}).model.layers
    of = lambda balance: Routing(jnp.asarray(balance), jnp.zeros(()), jnp.zeros(2))
    assert float(routing_loss(layers, [of(2.0), of(2.0)])) == 0.5 * 4.0
    assert float(routing_loss(layers, [None, of(2.0)])) == 0.5 * 2.0


@pytest.mark.parametrize("changes", ({"train.accumulate": 4}, {"train.remat": "full"}), ids=str)
def test_nothing_is_counted_twice(changes):
    """Cut into parts, or computed again in the backward pass, a batch has the same losses, gradient and statistics, loads and drops
    included: sequences are routed one by one, and here each counts all of its tokens."""
    tokens = np.random.default_rng(0).integers(1, 256, (8, 9)).astype(np.int32)
    (loss, gradient, published, routing), (one, right, panel, whole) = measured(BALANCED | changes, tokens), measured(BALANCED, tokens)
    np.testing.assert_allclose(loss, one, rtol=SAME)
    assert_published_close(gradient, right, SAME)
    assert_published_close(published, panel, SAME)
    np.testing.assert_array_equal(routing[1].load, whole[1].load)
    assert published["router_dropped"][1] > 0


@pytest.mark.parametrize("accumulate", (1, 4))
def test_the_bias_follows_the_load_of_the_whole_batch(accumulate):
    """After a step the selection bias has moved by the rate, up below the mean load and down above it, by the load of all parts of the
    batch together. The optimiser has no say, even where biases are to decay."""
    state, _ = step(BIASED | {"train.accumulate": accumulate, "optim.decay": ("bias",), "optim.weight_decay": 0.5}, steps=1)
    load = measured(BALANCED)[3][1].load  # the same initial parameters, and a bias of zero
    np.testing.assert_array_equal(state.parameters[SELECTION][0], 0.125 * np.sign(load.mean() - load))
    assert len(np.unique(load)) > 2


@pytest.mark.parametrize("rate", (None, 0.0, 0.5))
def test_the_update_of_the_bias(rate):
    """Each layer's bias moves by its own load and rate; without a rate it stays."""
    plan = plan_of(small(BIASED | {"model.depth": 3, MOE + "bias_rate": rate}))
    of = lambda *load: Routing(jnp.zeros(()), jnp.zeros(()), jnp.asarray(load, jnp.float32))
    [(path, update)] = bias_updates(plan, [None, of(1, 2, 3, 2), of(8, 0, 0, 0)]).items()
    assert path == SELECTION
    np.testing.assert_array_equal(update, (rate or 0) * np.asarray([[1, 0, -1, 0], [-1, 1, 1, 1]]))


def test_a_skipped_step_leaves_the_bias():
    """A step that is not finite moves no selection bias."""
    plan, of = program(*(BIASED | {"train.on_nonfinite": "skip"}).items())
    state = plan.fresh()
    broken = jax.device_put(np.full(state.parameters["embed"].shape, np.nan, np.float32), plan.shardings.parameters["embed"])
    state, _ = of(dataclasses.replace(state, parameters=state.parameters | {"embed": broken}), tokens_of(plan.config, plan.mesh))
    assert int(state.skipped) == 1
    np.testing.assert_array_equal(state.parameters[SELECTION], 0)


def test_the_byte_between_documents_does_not_count():
    """Loads are over the bytes of documents: a separator in each of eight sequences takes eight times top_k assignments from them."""
    tokens = np.random.default_rng(0).integers(1, 256, (8, 9)).astype(np.int32)
    separated = tokens.copy()
    separated[:, 2] = SEPARATOR[0]
    loads = [measured(BALANCED, of)[3][1].load.sum() for of in (tokens, separated)]
    assert loads == [2 * 8 * 8, 2 * 8 * 7]


JITTERED = MIXTURE | {MOE + "jitter": 0.5}


def test_noise_is_a_function_of_seed_and_step():
    """The same seed and step draw the same noise, to the bit, in a state put together anew from host arrays, as in a resumed run; another
    seed or step draws other noise."""
    plan, of = program(*JITTERED.items())
    state, _ = of(plan.fresh(), tokens_of(plan.config, plan.mesh))
    saved, tokens = host(state), tokens_of(plan.config, plan.mesh, 1)
    restored = lambda **changes: jax.device_put(dataclasses.replace(saved, **changes), plan.shardings)
    first, second = (jax.tree.leaves(host(of(given, tokens))) for given in (state, restored()))
    assert all(a.tobytes() == b.tobytes() for a, b in zip(first, second, strict=True))
    loss = lambda **changes: float(of(restored(**changes), tokens)[1]["train/loss"])
    assert len({loss(), loss(step=np.int32(7)), loss(seed=np.int32(1))}) == 3


def test_only_training_has_noise():
    """The held-out loss is that of the model without jitter; that of a training step on the same batch is not."""
    plan, _ = program(*JITTERED.items())
    quietly = lambda changes: make_evaluation(plan_of(small(changes)))(plan.fresh().parameters, tokens_of(plan.config, plan.mesh))
    assert float(quietly(JITTERED)) == float(quietly(MIXTURE))
    assert abs(float(step(JITTERED)[1]["train/loss"]) - float(quietly(MIXTURE))) > 1e-5


def test_parts_of_a_batch_have_noise_of_their_own():
    """Two equal parts of a batch are routed differently where the router's input is noisy, and alike where it is not."""
    plan, of = measure(*(JITTERED | {"train.accumulate": 2}).items())
    tokens = jnp.asarray(np.repeat(np.random.default_rng(0).integers(1, 256, (4, 9)), 2, axis=0), jnp.int32)
    load = lambda key: np.asarray(of(plan.fresh().parameters, tokens, key)[3][1].load)
    assert not (load(None) % 2).any()
    assert (load(noise_key(jnp.int32(0), jnp.int32(0))) % 2).any()


MESHES = {"experts": {"mesh.data": 2, "mesh.expert": 4}, "all": {"mesh.fsdp": 2, "mesh.tensor": 2, "mesh.expert": 2}}


@pytest.mark.parametrize("mesh", MESHES)
def test_experts_over_devices_equal_one_device(mesh):
    """Experts over an axis of their own, with data or with fsdp and tensor beside them, give the parameters, selection bias and losses of
    one device, noise and drops included."""
    changes = BALANCED | BIASED | {MOE + "jitter": 0.1, MOE + "capacity": 1.0, "model.mlp.gated": True}
    (ours, published), (theirs, right) = step(changes | MESHES[mesh], steps=2), step(changes, steps=2)
    assert_published_close(published, right, 10 * SAME)
    assert_published_close(ours.parameters, theirs.parameters, 10 * SAME)
    assert np.abs(theirs.parameters[SELECTION]).max() > 0
