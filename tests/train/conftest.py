"""The training floor runs with JAX's usual promotion: optax raises a float to an int32 count, which strict promotion refuses."""

import jax
import jax.numpy as jnp
import pytest

from tests.train.small import plan_of, small
from train.checkpoint import Checkpoints

KEEP = {"checkpoint.keep": 3}


@pytest.fixture(scope="package", autouse=True)
def usual_promotion():
    with jax.numpy_dtype_promotion("standard"):
        yield


def at(state, number: int):
    """A state that differs from the fresh one in every floating-point array, and in its step."""
    moved = lambda x: x + number if x.dtype == jnp.int32 else x + jnp.float32(0.1 * number)
    return jax.tree.map(moved, state)


@pytest.fixture(scope="module")
def plan():
    return plan_of(small(KEEP))


@pytest.fixture(scope="module")
def states(plan):
    return {step: at(plan.fresh(), step) for step in (1, 2, 3)}


@pytest.fixture(scope="module")
def saved(plan, states, tmp_path_factory):
    """A folder with the checkpoints of steps 1 and 2."""
    folder = tmp_path_factory.mktemp("saved") / "checkpoints"
    checkpoints = Checkpoints(folder, plan.config)
    for step in (1, 2):
        checkpoints.save(step, states[step], jnp.float32(step))
    checkpoints.finish()
    checkpoints.close()
    return folder
