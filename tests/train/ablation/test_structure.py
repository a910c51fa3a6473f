"""Which members share their compiled programs, and that sharing them, or a vmap over them, changes no number."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from configs.knobs import flatten
from configs.schema import Experiment
from tests.train.small import SAME, assert_published_close, plan_of, small, tokens_of
from train.optim import NUMBERS
from train.programs import make_programs, programs_of, structure
from train.step import make_step

OTHER = {
    "learning_rate": 0.5, "betas": (0.5, 0.75), "eps": 1e-3, "weight_decay": 0.0, "warmup": 7, "floor": 0.25, "cooldown": 0.5, "clip": 8.0,
}
"""Another value of every number of the optimiser."""

ELSEWHERE = {
    "train.seed": 5, "run.root": "there", "run.name": "other", "run.resume": True, "run.progress": False, "run.compilation_cache": None,
    "eval.every": 7, "eval.batches": 3, "checkpoint.every": None, "checkpoint.keep": 9, "train.on_save_error": "continue",
}

SHAPING = {
    "model.norm.placement": "post", "model.depth": 3, "model.width": 32, "model.attention.qk_norm.kind": "head",
    "optim.clip": None, "optim.schedule": "linear", "optim.independent_decay": True, "optim.decay": ("embed",),
    "train.steps": 21, "train.z_loss": 0.5, "train.accumulate": 2, "train.dtype": "bfloat16", "train.on_nonfinite": "skip",
    "data.batch": 4, "data.sequence": 16, "instruments.every": None, "instruments.rows": 8, "instruments.probe_batch": 4,
}


@pytest.mark.parametrize("knob", NUMBERS)
def test_a_number_of_the_optimiser_is_no_part_of_the_structure(knob):
    """Configs that differ in one number of the optimiser have one structure, with its own number or the other's at the start."""
    ours, theirs = small(), small({f"optim.{knob}": OTHER[knob]})
    assert getattr(ours.optim, knob) != getattr(theirs.optim, knob)
    assert structure(ours) == structure(theirs) and hash(structure(ours)) == hash(structure(theirs))


@pytest.mark.parametrize("knob", sorted(ELSEWHERE))
def test_what_happens_around_the_programs_is_no_part_of_the_structure(knob):
    """Seed, run section, and intervals of evaluation and saving leave the structure as it is."""
    assert flatten(small())[knob] != ELSEWHERE[knob]
    assert structure(small()) == structure(small({knob: ELSEWHERE[knob]}))


def test_every_knob_around_the_programs_is_looked_at():
    """The list above has every knob of the sections run, eval and checkpoint (so that a new one is thought about)."""
    assert {knob for knob in flatten(Experiment()) if knob.startswith(("run.", "eval.", "checkpoint."))} <= ELSEWHERE.keys()


@pytest.mark.parametrize("knob", sorted(SHAPING))
def test_what_shapes_the_program_is_part_of_the_structure(knob):
    """Configs that differ in anything else the programs are made from have two structures."""
    assert structure(small()) != structure(small({knob: SHAPING[knob]}))


def test_clipping_or_none_are_two_structures_and_one_norm_or_another_are_one():
    """Whether to clip shapes the program; at which norm does not."""
    one, other, none = (structure(small({"optim.clip": clip})) for clip in (0.5, 4.0, None))
    assert one == other != none


def test_structure_is_idempotent():
    """The structure of a structure is itself: it is a config whose programs are its own."""
    config = small({f"optim.{knob}": value for knob, value in OTHER.items()} | ELSEWHERE)
    assert structure(structure(config)) == structure(config)


def first_steps(config, program, count: int = 4) -> list[dict]:
    """What a loud step publishes, step by step from the config's own fresh state, as host arrays."""
    plan, found = plan_of(config), []
    state = plan.fresh()
    for step in range(count):
        state, published = program(state, tokens_of(config, plan.mesh, step))
        found.append(jax.tree.map(np.asarray, jax.device_get(published)))
    return found


MEMBERS = (
    {"optim.learning_rate": 1e-2, "optim.warmup": 1, "optim.weight_decay": 0.0, "train.seed": 1},
    {"optim.learning_rate": 1e-1, "optim.warmup": 3, "optim.weight_decay": 1.0, "train.seed": 2, "optim.betas": (0.5, 0.75)},
)


def test_members_share_programs_and_lose_nothing():
    """Two members get the very same programs, and each publishes to the bit what a step compiled for it alone publishes."""
    alone = {"instruments.every": 1, "instruments.probe_every": None, "eval.every": None}
    configs = [small(alone | changes) for changes in MEMBERS]
    programs_of.cache_clear()
    shared = [make_programs(plan_of(config)) for config in configs]
    assert shared[0] is shared[1] and programs_of.cache_info().misses == 1
    together = [first_steps(config, shared[0].loud) for config in configs]
    for config, ours in zip(configs, together, strict=True):
        programs_of.cache_clear()
        own = first_steps(config, make_programs(plan_of(config)).loud)
        single = first_steps(config, make_step(plan_of(config), loud=True))  # by jit, from the config as it is, not its structure
        for other in (own, single):
            for a, b in zip(ours, other, strict=True):
                assert a.keys() == b.keys()
                assert [x.tobytes() for x in jax.tree.leaves(a)] == [x.tobytes() for x in jax.tree.leaves(b)]
    rates = [[float(step["train/learning_rate"]) for step in of] for of in together]
    assert rates[0][0] == pytest.approx(1e-2) and rates[1][0] == pytest.approx(1e-1 / 3)  # each warmed up as it asked to


def test_a_vmapped_step_is_separate_steps():
    """One step under vmap over three learning rates gives the losses and parameters of three separate runs, up to rounding."""
    smooth = {"optim.eps": 1.0, "optim.clip": None, "optim.weight_decay": 0.01}  # updates no larger than gradients: rounding stays small
    configs = [small(smooth | {"optim.learning_rate": rate}) for rate in (0.25, 0.5, 1.0)]
    plans = [plan_of(config) for config in configs]
    step = make_step(plans[0], loud=False)
    mapped = jax.jit(jax.vmap(step.__wrapped__, in_axes=(0, None)))
    fresh = [jax.device_get(plan.fresh()) for plan in plans]
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *fresh)
    single = [plan.fresh() for plan in plans]
    for number in range(3):
        tokens = tokens_of(configs[0], plans[0].mesh, number)
        stacked, published = mapped(stacked, tokens)
        for index in range(len(plans)):
            single[index], alone = step(single[index], tokens)
            assert_published_close(jax.tree.map(lambda x, i=index: x[i], published), alone, (number + 1) * SAME)
    for index, state in enumerate(single):
        ours = jax.tree.map(lambda x, i=index: x[i], stacked.parameters)
        assert_published_close(ours, state.parameters, 3 * SAME)
        assert dataclasses.asdict(stacked)["step"][index] == 3
    moved = [np.max(np.abs(jax.device_get(a) - jax.device_get(b))) for a, b in
             zip(*(single[index].parameters.values() for index in (0, 2)), strict=True)]
    assert max(moved) > 1000 * SAME  # the three did part
