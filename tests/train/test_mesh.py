"""Eight devices compute what one computes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.compilation_cache import compilation_cache
from jax.sharding import NamedSharding, PartitionSpec

from configs.load import UserError
from configs.schema import Mesh
from models.norms import PLACEMENTS
from tests.train.small import SAME, assert_published_close, plan_of, small, tokens_of
from train.mesh import make_mesh
from train.step import make_probe, make_step

STEPS = 3
GROWTH = 10
"""Rounding of one step is carried through the next ones; with smooth updates of learning rate 0.1 it does not grow tenfold in three."""

CUBE = {"mesh.data": 2, "mesh.fsdp": 2, "mesh.tensor": 2}
SMOOTH = {"optim.eps": 1.0, "optim.learning_rate": 0.1}

VARIANTS = {
    "none": {},
    "head": {"train.accumulate": 2},
    "head_each": {"model.attention.sinks": True, "model.tied": False},
    "whole": {"model.norm.placement": "sandwich", "model.norm.kind": "layer"},
    "l2": {"model.mlp.gated": True, "model.norm.placement": "post", "model.attention.kv_heads": 1, "train.remat": "full"},
}


PROBED = "whole"
"""One variant is probed too: the probe shares all but quantiles and histogram with the loud step."""


def train(changes, probed: bool = False):
    """The state after three loud steps, what each published (and a probe at the end), on the host; and the parameters' layout."""
    plan = plan_of(small(SMOOTH | changes))
    step, state, published = make_step(plan, loud=True), plan.fresh(), []
    for number in range(STEPS):
        state, values = step(state, tokens_of(plan.config, plan.mesh, number))
        published.append(jax.device_get(values))
    if probed:
        published.append(jax.device_get(make_probe(plan)(state.parameters, tokens_of(plan.config, plan.mesh, 100))))
    return jax.device_get(state), published, {path: leaf.sharding for path, leaf in state.parameters.items()}


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_cube_of_devices_equals_one(variant):
    """Data 2 x fsdp 2 x tensor 2 gives the parameters, moments and panels of a single device, for each kind of QK-norm."""
    changes = VARIANTS[variant] | {"model.attention.qk_norm.kind": variant}
    probed = variant == PROBED
    (ours, our_panels, layout), (theirs, their_panels, _) = train(changes | CUBE, probed), train(changes, probed)
    assert_published_close(ours.parameters, theirs.parameters, GROWTH * SAME)
    for a, b in zip(jax.tree.leaves(ours.optimizer), jax.tree.leaves(theirs.optimizer), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=GROWTH * SAME * np.max(np.abs(b)))
    for a, b in zip(our_panels, their_panels, strict=True):
        counts = [key for key in a if key.endswith("histogram")]
        assert_published_close(*({key: x for key, x in of.items() if key not in counts} for of in (a, b)), GROWTH * SAME)
        for key in counts:  # a logit on the edge of a bin may fall on either side
            np.testing.assert_allclose(np.asarray(a[key])[:, 2:].cumsum(1), np.asarray(b[key])[:, 2:].cumsum(1), atol=2)
    weights = {path: sharding for path, sharding in layout.items() if path.endswith("mlp.up.weight")}
    assert all(len(sharding.device_set) == 8 and not sharding.is_fully_replicated for sharding in weights.values()) and weights


def test_each_axis_alone_equals_one_device():
    """Eight copies, eight shares of the parameters' width, and two shares of the heads each give the numbers of one device."""
    one = train({})
    for axis, size in (("data", 8), ("fsdp", 8), ("tensor", 2)):
        many = train({f"mesh.{axis}": size})
        assert_published_close(many[0].parameters, one[0].parameters, GROWTH * SAME)
        assert_published_close(many[1][-1], one[1][-1], GROWTH * SAME)


FULL = "nvoluntary full rematerialization"
EVERY_PLACEMENT = {"model.depth": len(PLACEMENTS), "model.attention.qk_norm.kind": "head", "model.attention.qk_norm.values": True,
                   "model.overrides": tuple(f"{layer}: norm.placement={name}" for layer, name in enumerate(PLACEMENTS))}
MIXTURE = {"model.moe.experts": 4, "model.moe.width": 16}
MESHES = {
    "fsdp": {"mesh.fsdp": 8}, "cube": CUBE, "experts": MIXTURE | {"mesh.fsdp": 2, "mesh.tensor": 2, "mesh.expert": 2},
}


@pytest.fixture
def told_by_compiler(capfd):
    """What XLA prints while a program is compiled; from the persistent cache it would come without a word."""
    before = jax.config.jax_enable_compilation_cache
    jax.config.update("jax_enable_compilation_cache", False)
    compilation_cache.reset_cache()

    def told(program, *shapes) -> str:
        lowered = program.lower(*shapes)
        capfd.readouterr()
        lowered.compile()
        return capfd.readouterr().err

    yield told
    jax.config.update("jax_enable_compilation_cache", before)
    compilation_cache.reset_cache()


@pytest.mark.parametrize("mesh", MESHES)
def test_no_array_is_made_whole_to_be_cut_otherwise(mesh, told_by_compiler):
    """XLA finds a way between any two layouts in the training step, with a layer of each placement of norms; of a program that turns the
    rows of eight devices into columns of four it says that there is none."""
    plan = plan_of(small(EVERY_PLACEMENT | MESHES[mesh]))
    assert FULL not in told_by_compiler(make_step(plan, loud=False), plan.shapes(), plan.tokens(plan.config.data.batch))
    grid = jax.make_mesh((2, 4), ("x", "y"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    rows, columns = (NamedSharding(grid, PartitionSpec(*axes)) for axes in ((("x", "y"), None, None), (None, "x", "y")))
    turned = jax.jit(lambda x: jnp.sin(jax.lax.with_sharding_constraint(jnp.cos(x), columns)))
    assert FULL in told_by_compiler(turned, jax.ShapeDtypeStruct((8, 8, 8), jnp.float32, sharding=rows))


def test_a_mesh_larger_than_the_machine_is_refused():
    """A mesh of more devices than there are names the product, and how many there are."""
    with pytest.raises(UserError, match=r"mesh\.data x mesh\.fsdp x mesh\.tensor x mesh\.expert = 64.* 8 "):
        make_mesh(Mesh(data=16, fsdp=2, tensor=2))
