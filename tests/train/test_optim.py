"""Schedules, AdamW, decay masks and clipping against their formulas."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from configs.model import Model
from configs.schema import Optim
from models.parameters import Row, table
from models.transformer import Transformer
from tests.train.small import SAME, small
from train.optim import make_optimizer, numbers, share_of_peak

STEPS, FLOOR, COOLDOWN = 22, 0.1, 0.2

AFTER_WARMUP = {
    "constant": lambda t, n: 1.0,
    "linear": lambda t, n: 1 - (1 - FLOOR) * t / n,
    "cosine": lambda t, n: FLOOR + (1 - FLOOR) * (1 + np.cos(np.pi * t / n)) / 2,
    "wsd": lambda t, n: 1 - (1 - FLOOR) * max(0, t - (1 - COOLDOWN) * n) / (COOLDOWN * n),
}


@pytest.mark.parametrize("warmup", [0, 1, 2])
@pytest.mark.parametrize("kind", AFTER_WARMUP)
def test_schedule_is_its_closed_form(kind, warmup):
    """The learning rate climbs 1/w, 2/w, …, 1 and then follows the textbook curve of its kind, down to the floor."""
    optim = Optim(schedule=kind, warmup=warmup, floor=FLOOR, cooldown=COOLDOWN)
    schedule, n = share_of_peak(optim, STEPS, numbers(optim)), STEPS - warmup
    expected = [(t + 1) / warmup if t < warmup else AFTER_WARMUP[kind](t - warmup, n) for t in range(STEPS + 1)]
    assert kind == "constant" or expected[-1] == pytest.approx(FLOOR)
    np.testing.assert_allclose([float(schedule(t)) for t in range(STEPS + 1)], expected, rtol=SAME)


def test_warmup_is_in_equal_parts():
    """Five steps of warmup are 0.2, 0.4, 0.6, 0.8 and 1 of the peak: no step is lost at zero, none is taken twice."""
    optim = Optim(schedule="constant", warmup=5)
    schedule = share_of_peak(optim, 50, numbers(optim))
    np.testing.assert_allclose([float(schedule(t)) for t in range(6)], [0.2, 0.4, 0.6, 0.8, 1.0, 1.0], rtol=SAME)


def row(path: str, role: str, shape) -> Row:
    return Row(path, role, shape, (None,) * len(shape), None, None, None)


ROWS = [row("weight", "attention.q", (5, 3)), row("scale", "norm.scale", (2, 5))]


def adamw(optim: Optim, shares, parameters, gradients):
    """AdamW as the paper prints it (Loshchilov and Hutter 2019, algorithm 2), in float64; the weight alone decays."""
    w = {name: x.astype(np.float64) for name, x in parameters.items()}
    m, v = ({name: np.zeros_like(x) for name, x in w.items()} for _ in range(2))
    (b1, b2), lr = optim.betas, optim.learning_rate
    for t, (share, g) in enumerate(zip(shares, gradients, strict=True), start=1):
        length = np.sqrt(sum(np.sum(np.square(x, dtype=np.float64)) for x in g.values()))
        for name in w:
            clipped = g[name] * (1.0 if optim.clip is None else min(1.0, optim.clip / length))
            m[name] = b1 * m[name] + (1 - b1) * clipped
            v[name] = b2 * v[name] + (1 - b2) * clipped**2
            direction = (m[name] / (1 - b1**t)) / (np.sqrt(v[name] / (1 - b2**t)) + optim.eps)
            decay = optim.weight_decay * w[name] * (name == "weight") * (1 if optim.independent_decay else lr)
            w[name] = w[name] - share * (lr * direction + decay)
    return w


@pytest.mark.parametrize("clip", [None, 0.5])
@pytest.mark.parametrize("independent", [False, True])
def test_adamw_follows_the_paper(independent, clip):
    """Six updates equal algorithm 2 of the paper, decay times the learning rate (coupled) or not (independent), clipped or not."""
    optim = Optim(learning_rate=0.02, weight_decay=0.05, independent_decay=independent, clip=clip, warmup=2, schedule="linear", eps=1e-6)
    draw = np.random.default_rng(0)
    parameters = {r.path: draw.normal(size=r.shape).astype(np.float32) for r in ROWS}
    gradients = [{r.path: draw.normal(size=r.shape).astype(np.float32) for r in ROWS} for _ in range(6)]
    optimizer, ours = make_optimizer(optim, 10, ROWS, numbers(optim)), jax.tree.map(jnp.asarray, parameters)
    state = optimizer.init(ours)
    for g in gradients:
        updates, state = optimizer.update(jax.tree.map(jnp.asarray, g), state, ours)
        ours = jax.tree.map(jnp.add, ours, updates)
    shares = [1 / 2, 1, *(1 - t / 8 for t in range(4))]
    for name, expected in adamw(optim, shares, parameters, gradients).items():
        np.testing.assert_allclose(ours[name], expected, rtol=0, atol=SAME * np.abs(expected).max())


@pytest.mark.parametrize("length", [0.3, 30.0])
def test_clipping_shortens_long_gradients_alone(length):
    """A gradient longer than the clip keeps its direction and gets the clip's length; a shorter one is left as it is."""
    optim = Optim(clip=1.0, betas=(0.0, 0.0), eps=1e6, learning_rate=1e6, weight_decay=0.0, warmup=0, schedule="constant")
    draw = np.random.default_rng(1)
    gradient = {r.path: draw.normal(size=r.shape).astype(np.float32) for r in ROWS}
    factor = length / np.sqrt(sum(np.sum(g**2) for g in gradient.values()))
    gradient = {name: jnp.asarray(g * factor, jnp.float32) for name, g in gradient.items()}
    optimizer = make_optimizer(optim, 10, ROWS, numbers(optim))
    updates, _ = optimizer.update(gradient, optimizer.init(gradient), gradient)
    for name, g in gradient.items():  # lr g / (|g| + eps) is g within |g| / eps, for these eps and lr
        np.testing.assert_allclose(updates[name], -g * min(1.0, 1.0 / length), rtol=SAME + length / 1e6)


RICH = {
    "model.norm.kind": "layer",
    "model.norm.bias": True,
    "model.attention.bias": ("q", "out"),
    "model.attention.sinks": True,
    "model.attention.qk_norm.kind": "head_each",
    "model.attention.qk_norm.norm.bias": True,
    "model.mlp.bias": True,
    "model.mlp.gated": True,
    "model.tied": False,
}


@pytest.mark.parametrize("changes", [{}, {"model.overrides": ("1: norm.kind=dyt",), "model.depth": 3}], ids=["stacked", "segments"])
def test_only_matrices_decay(changes):
    """With no gradient a matrix product's weight and the embedding shrink by lr wd, and norms, biases, QK-norm gains and sinks stay,
    however many layers are stacked in one array."""
    model: Model = small(RICH | changes).model
    rows = table(Transformer(model))
    optim = Optim(learning_rate=0.5, weight_decay=0.1, warmup=0, schedule="constant")
    optimizer, ones = make_optimizer(optim, 10, rows, numbers(optim)), {r.path: jnp.ones(r.shape) for r in rows}
    updates, _ = optimizer.update(jax.tree.map(jnp.zeros_like, ones), optimizer.init(ones), ones)
    moved = {path for path, update in updates.items() if np.any(np.asarray(update))}
    assert moved == {path for path in ones if path == "embed" or path.endswith(".weight")}
    assert len(moved) < len(ones) - 8
    for path in moved:
        np.testing.assert_allclose(updates[path], -0.05, rtol=SAME)


def test_decay_follows_the_named_groups():
    """optim.decay says which groups shrink: only norm gains where it names only them."""
    rows = table(Transformer(small(RICH).model))
    optim = Optim(decay=("norm",), warmup=0)
    optimizer, ones = make_optimizer(optim, 10, rows, numbers(optim)), {r.path: jnp.ones(r.shape) for r in rows}
    updates, _ = optimizer.update(jax.tree.map(jnp.zeros_like, ones), optimizer.init(ones), ones)
    moved = {path for path, update in updates.items() if np.any(np.asarray(update))}
    assert moved == {path for path in ones if re.search(r"residual\.norm_|^norm\.", path)} and len(moved) > 4
