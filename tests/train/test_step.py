"""The training step: what must not change its result, and what a value that is not finite does."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models.stack import REMATS
from tests.train.small import SAME, assert_published_close, plan_of, small, tokens_of
from train.instruments import PANEL
from train.programs import make_programs
from train.state import State
from train.step import gradients, make_step

SMOOTH = {"optim.eps": 1.0, "optim.learning_rate": 1.0, "optim.clip": None}
"""lr g / (|g| + 1): an update no larger than its gradient, so that rounding of the gradient is all the difference there can be."""


def host(tree):
    return jax.tree.map(np.asarray, jax.device_get(tree))


@functools.cache
def measured(**knobs):
    """(loss, gradient by path, published panel, routing) of a batch at the initial parameters; knobs of the section train."""
    plan = plan_of(small({f"train.{knob}": value for knob, value in knobs.items()}))
    program = jax.jit(lambda parameters, tokens: gradients(plan, PANEL, parameters, tokens, plan.config.train.accumulate))
    return host(program(plan.fresh().parameters, tokens_of(plan.config, plan.mesh)))


def assert_same_measured(ours, theirs, rtol: float) -> None:
    np.testing.assert_allclose(ours[0], theirs[0], rtol=rtol)
    assert_published_close(ours[1], theirs[1], rtol)
    assert_published_close(ours[2], theirs[2], rtol)


@pytest.mark.parametrize("accumulate", [2, 4])
def test_accumulation_changes_nothing(accumulate):
    """Cut into parts, a batch has the same loss, the same gradient and the same panel: means, maxima, entropies and dL/dx alike."""
    panel = {"activation_rms.resid.mid", "activation_max.mlp.out", "attention_entropy", "activation_grad_rms.resid.post"}
    assert panel <= measured()[2].keys()
    assert_same_measured(measured(accumulate=accumulate), measured(), SAME)


@pytest.mark.parametrize("remat", sorted(REMATS.keys() - {"none"}))
def test_recomputing_changes_nothing(remat):
    """What the backward pass recomputes has no influence on loss, gradient or panel."""
    assert_same_measured(measured(remat=remat), measured(), SAME)


def test_bfloat16_operands_are_close_and_parameters_stay_float32():
    """Rounding the factors of every product to bfloat16 moves the loss and the gradient by some 2^-8 per product, and only that."""
    (loss, gradient, *_), (loss32, gradient32, *_) = measured(dtype="bfloat16"), measured()
    products = 2 * 8 + 1  # on the way of a token: q, k, v, logits, values, out, up, down in each layer, and the head
    bound = products * 2 * 2.0**-8  # two factors each
    assert abs(loss.total - loss32.total) < bound * 0.1  # logits of a fresh model have an RMS below 0.1
    length = lambda tree: np.sqrt(sum(np.sum(np.square(x)) for x in tree.values()))
    difference = length({path: gradient[path] - gradient32[path] for path in gradient}) / length(gradient32)
    assert 100 * SAME < difference < bound
    assert all(x.dtype == np.float32 for x in gradient.values())


@functools.cache
def stepper(loud: bool, *changes):
    plan = plan_of(small(SMOOTH | dict(changes)))
    return plan, make_step(plan, loud)


def test_looking_changes_nothing():
    """A loud step and a quiet one have the same loss and the same update; what the quiet one publishes, the loud one does too."""
    (plan, quiet), (_, loud) = stepper(False), stepper(True)
    for step in range(2):
        tokens = tokens_of(plan.config, plan.mesh, step)
        (ours, few), (theirs, many) = (host(program(plan.fresh(), tokens)) for program in (quiet, loud))
        assert_published_close(few, {key: many[key] for key in few}, SAME)
        assert_published_close(ours.parameters, theirs.parameters, SAME)
        assert len(many) > len(few) + 30


def test_a_step_consumes_its_state_and_moves_it_by_one():
    """The state is donated: the old one is gone, the new one has its step counted and lies as the old one did, fit for the same program."""
    plan = plan_of(small({"instruments.every": None, "instruments.probe_every": None}))
    tokens = tokens_of(plan.config, plan.mesh)
    programs = make_programs(plan)
    assert programs.loud is None and programs.probe is None
    old, losses = plan.fresh(), []
    for step in range(3):
        new, published = programs.quiet(old, tokens)  # compiled ahead: a state laid out otherwise would be refused
        assert all(leaf.is_deleted() for leaf in jax.tree.leaves(old)) and int(new.step) == step + 1
        old, losses = new, [*losses, float(published["train/loss"])]
    assert losses[2] < losses[0]


def test_a_step_is_compiled_once():
    """Steps after the first reuse its program."""
    plan, quiet = stepper(False)
    state = plan.fresh()
    for step in range(3):
        state, _ = quiet(state, tokens_of(plan.config, plan.mesh, step))
    assert quiet._cache_size() == 1


def test_evaluation_is_the_mean_over_its_batches():
    """Held-out loss is the mean cross entropy of the batches, without z-loss."""
    plan = plan_of(small({"instruments.every": None, "instruments.probe_every": None, "train.z_loss": 10.0}))
    batches = [tokens_of(plan.config, plan.mesh, step) for step in range(3)]
    programs, state = make_programs(plan), plan.fresh()
    ours = float(programs.evaluate(state.parameters, batches))
    of_batch = [programs.quiet(plan.fresh(), tokens)[1]["train/loss"] for tokens in batches]
    assert ours == pytest.approx(np.mean([float(x) for x in of_batch]), rel=SAME)


def planted(state: State, value: float) -> State:
    """The state with a value in one element of one parameter."""
    path = next(path for path in state.parameters if path.endswith("mlp.up.weight"))
    weight = state.parameters[path]
    index = (0,) * weight.ndim
    weight = jax.device_put(np.where(np.arange(weight.size).reshape(weight.shape) == np.ravel_multi_index(index, weight.shape),
                                     np.float32(value), np.asarray(weight)), weight.sharding)
    return dataclasses.replace(state, parameters=state.parameters | {path: weight})


SHARP = (("optim.eps", 1e-8), ("optim.weight_decay", 0.0), ("optim.learning_rate", 1e-2), ("optim.warmup", 4))
SKIP = (("train.on_nonfinite", "skip"), *SHARP)


@pytest.mark.parametrize("loud", [False, True], ids=["quiet", "loud"])
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_step_that_is_not_finite_is_skipped_and_counted(value, loud):
    """With "skip", a loss that is not finite leaves every bit of the parameters and of the optimiser's state, and is counted."""
    plan, program = stepper(loud, *SKIP)
    start = host(planted(plan.fresh(), value))
    tokens = tokens_of(plan.config, plan.mesh)
    state, published = host(program(planted(plan.fresh(), value), tokens))
    assert not np.isfinite(published["train/loss"])
    leaves = lambda of: jax.tree.leaves((of.parameters, of.optimizer))
    assert all(ours.tobytes() == theirs.tobytes() for ours, theirs in zip(leaves(state), leaves(start), strict=True))
    assert (state.step, state.skipped, published["train/skipped"]) == (1, 1, 1)


def test_a_sound_step_is_not_skipped():
    """With "skip", a finite step moves the parameters as it does with "stop", and counts nothing."""
    (plan, skipping), (stop, stopping) = stepper(False, *SKIP), stepper(False, *SHARP)
    tokens = tokens_of(plan.config, plan.mesh)
    (ours, published), (theirs, _) = host(skipping(plan.fresh(), tokens)), host(stopping(stop.fresh(), tokens))
    assert published["train/skipped"] == 0 and ours.skipped == 0
    assert_published_close(ours.parameters, theirs.parameters, SAME)


def test_the_published_learning_rate_is_the_one_applied():
    """Adam's first move is the learning rate times the sign of the gradient: as published, and also after a step that was skipped."""
    plan, program = stepper(False, *SKIP)
    tokens, before = tokens_of(plan.config, plan.mesh), host(plan.fresh().parameters)
    for skip_first in (False, True):
        state = plan.fresh()
        if skip_first:
            skipped, _ = program(planted(state, np.nan), tokens)
            state = dataclasses.replace(skipped, parameters=plan.fresh().parameters)
        state, published = host(program(state, tokens))
        moved = max(np.abs(state.parameters[path] - before[path]).max() for path in before)
        np.testing.assert_allclose(moved, published["train/learning_rate"], rtol=1e-3)  # |g| / (|g| + eps), |g| above 1e-5


def test_gradient_norm_is_that_before_clipping():
    """train/grad_norm is the length of the whole gradient, however short the clip makes it."""
    (plan, open_), (clipped, tight) = stepper(False), stepper(False, ("optim.clip", 1e-3))
    tokens = tokens_of(plan.config, plan.mesh)
    gradient = measured()[1]
    length = np.sqrt(sum(np.sum(np.square(x, dtype=np.float64)) for x in gradient.values()))
    for owner, program in ((plan, open_), (clipped, tight)):
        np.testing.assert_allclose(program(owner.fresh(), tokens)[1]["train/grad_norm"], length, rtol=SAME)


def test_loss_parts_are_published_in_their_units():
    """train/loss is the cross entropy in nats per token and train/z_loss the weighted square: together they are what is minimised."""
    plan, program = stepper(False)
    published = host(program(plan.fresh(), tokens_of(plan.config, plan.mesh))[1])
    loss = measured()[0]
    np.testing.assert_allclose(published["train/loss"], loss.cross_entropy, rtol=SAME)
    np.testing.assert_allclose(published["train/loss"] + published["train/z_loss"], loss.total, rtol=SAME)
    assert jnp.float32(loss.cross_entropy) == pytest.approx(np.log(plan.config.model.vocab), rel=0.05)  # nothing is known yet
