"""Two narrow layers on generated text: what the tests of the training floor start from."""

import jax
import numpy as np
from jax.sharding import NamedSharding

from configs.knobs import replace
from configs.schema import Experiment, Mesh
from train.data.batches import BATCH
from train.mesh import make_mesh
from train.state import Plan, make_plan

SMALL = {
    "model.width": 16,
    "model.depth": 2,
    "model.vocab": 256,
    "model.attention.heads": 4,
    "model.attention.kv_heads": 2,
    "model.mlp.width": 32,
    "model.init.kind": "fan_in",
    "optim.warmup": 2,
    "train.steps": 20,
    "data.source": "text",
    "data.batch": 8,
    "data.sequence": 8,
    "instruments.rows": 4,
    "instruments.probe_batch": 8,
}

FLOAT32 = 2.0**-24
"""Relative rounding error of one float32 operation."""

SAME = 200 * FLOAT32
"""Two orders of summation of the same float32 numbers: no sum here has a condition number above some hundred."""


def small(changes: dict[str, object] | None = None) -> Experiment:
    """The small experiment with some knobs changed."""
    return replace(Experiment(), SMALL | (changes or {}))


def plan_of(config: Experiment) -> Plan:
    return make_plan(config, make_mesh(config.mesh))


def mesh_of(data: int = 1, fsdp: int = 1, tensor: int = 1) -> jax.sharding.Mesh:
    return make_mesh(Mesh(data=data, fsdp=fsdp, tensor=tensor))


def tokens_of(config: Experiment, mesh: jax.sharding.Mesh, step: int = 0) -> jax.Array:
    """A batch of random tokens [batch, sequence + 1], laid out on the mesh."""
    shape = (config.data.batch, config.data.sequence + 1)
    tokens = np.random.default_rng(step).integers(0, config.model.vocab, shape).astype(np.int32)
    return jax.device_put(tokens, NamedSharding(mesh, BATCH))


def text_of(characters: int, seed: int = 0) -> str:
    """Words of a seeded Markov chain over the letters: text with structure to learn."""
    draw = np.random.default_rng(seed)
    letters = np.array(list("abcdefghij ,.\n"))
    chain = np.cumsum(draw.dirichlet(np.full(len(letters), 0.3), len(letters)), axis=1)
    uniform, state, found = draw.random(characters), 0, []
    for u in uniform:
        state = min(int(np.searchsorted(chain[state], u)), len(letters) - 1)
        found.append(letters[state])
    return "".join(found)


def by_layer(value) -> list:
    """A published value per layer as a list of host arrays, None where a layer has none."""
    return [None if x is None else np.asarray(x) for x in value]


def assert_published_close(ours: dict, theirs: dict, rtol: float, atol: float = 0.0) -> None:
    """Both have the same keys, and the same numbers within rtol of each key's largest absolute value."""
    assert ours.keys() == theirs.keys()
    for key in ours:
        for a, b in zip(*(jax.tree.leaves(jax.device_get(x)) for x in (ours[key], theirs[key])), strict=True):
            np.testing.assert_allclose(a, b, rtol=0, atol=atol + rtol * np.max(np.abs(b)), err_msg=key)
