"""The router's statistics against brute force on its own logits and weights, and how many of them are written."""

import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from models.parameters import bind
from models.taps import Taps
from tests.train.processes import lines_of
from tests.train.small import SAME, plan_of, small, tokens_of
from train.instruments import EACH, HISTOGRAM, PANEL, UNUSED, gini, headline, known_keys, parameter_statistics
from train.log import Log, plain
from train.step import gradients, make_step

E = 4
CHANGES = {"model.moe.experts": E, "model.moe.width": 16, "model.moe.dispatch": "capacity", "model.moe.capacity": 1.0, "model.depth": 3,
           "model.overrides": ("1: moe.experts=None",), "model.mlp.bias": True}
MIXTURES = (0, 2)
SITES = ("router.logits", "router.weights")


@functools.cache
def seen():
    """(published by a loud step on random tokens, logits and weights of each mixture, the whole gradient, the parameter table)."""
    plan = plan_of(small(CHANGES))
    state, tokens = plan.fresh(), tokens_of(plan.config, plan.mesh)
    tokens = jnp.where(tokens == 0, 1, tokens)

    def measure(parameters):
        _, gradient, published, _ = gradients(plan, PANEL, parameters, tokens)
        raw = bind(plan.model, parameters)(tokens[:, :-1], taps=Taps(record={site: lambda x: x for site in SITES})).records
        return gradient, published | parameter_statistics(plan.rows, 3, {"grad": gradient}), raw

    gradient, published, raw = jax.device_get(jax.jit(measure)(state.parameters))
    of_layer = lambda layer: {site: np.asarray(raw[site][layer], np.float64) for site in SITES}
    return published, {layer: of_layer(layer) for layer in MIXTURES}, gradient, plan


def softmax(z):
    p = np.exp(z - z.max(-1, keepdims=True))
    return p / p.sum(-1, keepdims=True)


def counts(of) -> np.ndarray:
    return (of["router.weights"] > 0).sum((0, 1))


def kept(of) -> int:
    """Assignments that find one of ceil(2 x 8 / 4) slots of their expert and sequence."""
    return np.minimum((of["router.weights"] > 0).sum(1), 4).sum()


STATISTICS = {
    "router_max_vio": lambda of: counts(of).max() / counts(of).mean() - 1,
    "router_gini": lambda of: np.abs(np.subtract.outer(counts(of), counts(of))).sum() / (2 * E * counts(of).sum()),
    "router_unused": lambda of: (counts(of) == 0).sum(),
    "router_entropy": lambda of: -(softmax(of["router.logits"]) * np.log(softmax(of["router.logits"]))).sum(-1).mean(),
    "router_logit_max": lambda of: of["router.logits"].max(),
    "router_logit_lse": lambda of: np.log(np.exp(of["router.logits"]).sum(-1)).mean(),
    "router_dropped": lambda of: 1 - kept(of) / counts(of).sum(),
    "router_balance": lambda of: E * (counts(of) / counts(of).sum() * softmax(of["router.logits"]).mean((0, 1))).sum(),
    "router_load.experts": lambda of: counts(of) / counts(of).sum(),
}


@pytest.mark.parametrize("key", STATISTICS)
def test_statistics_are_those_of_the_router(key):
    """Each statistic is that of the layer's own logits and choices; a layer that is no mixture has none."""
    published, raw, _, _ = seen()
    assert published[key][1] is None
    for layer in MIXTURES:
        np.testing.assert_allclose(published[key][layer], STATISTICS[key](raw[layer]), rtol=4 * SAME, atol=SAME)


def test_experts_unused_are_those_of_the_steps_since_the_panel():
    """An expert is unused since the panel before where no step after that panel sent it a token, whatever the batch of the panel does."""
    plan = plan_of(small({
        "model.moe.experts": 64, "model.moe.width": 4, "model.moe.top_k": 1, "model.moe.normalise": False, "model.depth": 3,
        "model.overrides": ("1: moe.experts=None",), "optim.learning_rate": 1e-2, "instruments.every": 3,
    }))
    state, loads, told = plan.fresh(), [], []
    programs = {loud: make_step(plan, loud=loud) for loud in (False, True)}
    load_of = jax.jit(lambda parameters, tokens: [of and of.load for of in gradients(plan, (), parameters, tokens)[3]])
    for step in range(7):
        tokens = tokens_of(plan.config, plan.mesh, step)
        loads.append(jax.device_get(load_of(state.parameters, tokens)))
        state, published = programs[step % 3 == 0](state, tokens)
        told += [jax.device_get(published[UNUSED])] if step % 3 == 0 else []
    for place, steps in enumerate(((0,), (1, 2, 3), (4, 5, 6))):
        assert told[place][1] is None
        for layer in MIXTURES:
            unused = lambda steps, layer=layer: (sum(loads[step][layer] for step in steps) == 0).sum()
            assert told[place][layer] == unused(steps)
            assert place == 0 or unused(steps) < unused(steps[-1:])  # not what the panel's batch alone says
    assert all((np.asarray(of) == 0).all() for of in state.load if of is not None)


def test_every_statistic_of_routers_is_checked():
    """Nothing is published of routers beyond what is compared above."""
    assert {key for key in seen()[0] if key.startswith("router")} == STATISTICS.keys()


def test_the_gradient_norm_of_each_expert():
    """grad_norm.experts is the length of the gradient of each expert's own weights and biases, and worst_expert the largest."""
    published, _, gradient, plan = seen()
    for layer in range(3):
        mine = [(row, gradient[row.path][row.layers.index(layer)]) for row in plan.rows if row.layers and layer in row.layers]
        of_experts = [np.asarray(g, np.float64).reshape(E, -1) for row, g in mine if row.role.startswith(("moe.up", "moe.down"))]
        if layer not in MIXTURES:
            assert published["grad_norm.experts"][layer] is published["grad_norm.worst_expert"][layer] is None and not of_experts
            continue
        norms = np.sqrt((np.concatenate(of_experts, 1) ** 2).sum(1))
        np.testing.assert_allclose(published["grad_norm.experts"][layer], norms, rtol=SAME)
        np.testing.assert_allclose(published["grad_norm.worst_expert"][layer], norms.max(), rtol=SAME)


@pytest.mark.parametrize(("share", "expected"), (((1, 1, 1, 1), 0.0), ((1, 0, 0, 0), 0.75), ((1, 1, 0, 0), 0.5)))
def test_gini(share, expected):
    """Gini is 0 for an even load, 1 - 1/e for one expert with all of it, and does not depend on the order."""
    share = np.asarray(share) / sum(share)
    for order in (share, share[::-1]):
        np.testing.assert_allclose(gini(jnp.asarray(order, jnp.float32)), expected, atol=SAME)


@functools.cache
def written(experts: int) -> dict:
    """What a loud step of a mixture of so many experts publishes, as shapes filled with ones."""
    plan = plan_of(small({"model.moe.experts": experts, "model.moe.width": 4, "model.overrides": ("0: moe.experts=None",)}))
    shapes = jax.eval_shape(make_step(plan, loud=True), plan.shapes(), jax.ShapeDtypeStruct((8, 9), jnp.int32))[1]
    return jax.tree.map(lambda leaf: np.ones(leaf.shape, np.float32), shapes)


def test_the_layout_knows_every_statistic_of_mixtures():
    """Whatever a mixture publishes per layer, values per head or expert aside, has its chart; a model without one has no such chart."""
    drawn = {key for key in written(E) if "/" not in key and not key.endswith((*EACH, HISTOGRAM))}
    assert drawn < set(known_keys(mixture=True)) and len(known_keys(mixture=True)) == len(set(known_keys(mixture=True)))
    added = set(known_keys(mixture=True)) - set(known_keys())
    assert added == {key for key in drawn if key.startswith("router") or key == "grad_norm.worst_expert"}


def test_the_headline_shows_the_worst_layer():
    """The worst layer is the one with the lowest router entropy, and the one with the highest of all else; loads by expert have no say."""
    found = headline({"router_entropy": [None, 1.5, 0.5], "router_max_vio": [None, 0.5, 3.0], "router_unused": [2.0, None, 0.0],
                      "router_load.experts": [None, [0.5, 0.5], [0.1, 0.9]], "grad_norm.experts": [None, [1.0, 2.0], [3.0, 4.0]]})
    assert found == {"worst/router_entropy": 0.5, "worst/router_max_vio": 3.0, "worst/router_unused": 2.0}


def test_tags_do_not_grow_with_the_experts(tmp_path):
    """With 256 experts TensorBoard has the tags that it has with four, none of them per expert; metrics.jsonl has a list of 256."""
    tags = {}
    for experts in (4, 256):
        directory = tmp_path / str(experts)
        directory.mkdir()
        log = Log(directory, small({"model.moe.experts": experts}), None)
        log.write(0, written(experts))
        log.close()
        tags[experts] = EventAccumulator(str(directory)).Reload().Tags()["scalars"]
        [line] = lines_of(directory)
        assert [None if of is None else len(of) for of in line["router_load.experts"]] == [None, experts]
    assert tags[4] == tags[256]
    assert "router_max_vio/layer_01" in tags[256] and "worst/router_max_vio" in tags[256]
    assert not any("experts" in tag or (tag.startswith("router") and tag.endswith("layer_00")) for tag in tags[256])
    assert json.dumps(plain("router_load.experts", written(256)["router_load.experts"]))
