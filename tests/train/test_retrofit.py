"""A QK-norm that is added to a trained model changes it least, and not at all where there is nothing to change."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from configs.load import UserError
from models.parameters import bind
from models.taps import Taps
from tests.train.small import SAME, plan_of, small, tokens_of
from tests.train.sources import LLAMA, a_checkpoint, a_run, values_of
from train.warm_start import start

QK, NORM = "model.attention.qk_norm", "model.attention.qk_norm.norm"
YARN = {"model.rope.scaling.kind": "yarn", "model.rope.scaling.factor": 8.0, "model.rope.scaling.original": 16,
        "model.rope.scaling.beta_fast": 4.0}
NORMS = {
    "head": {f"{QK}.kind": "head"},
    "head, 1+w": {f"{QK}.kind": "head", f"{NORM}.scale": "1+w"},
    "head, a bias": {f"{QK}.kind": "head", f"{NORM}.bias": True},
    "head, by length": {f"{QK}.kind": "head", f"{NORM}.kind": "l2"},
    "head, after RoPE": {f"{QK}.kind": "head", f"{QK}.position": "after"},
    "head_each": {f"{QK}.kind": "head_each"},
    "whole": {f"{QK}.kind": "whole"},
    "whole, by length": {f"{QK}.kind": "whole", f"{NORM}.kind": "l2"},
    "l2": {f"{QK}.kind": "l2"},
    "l2, after RoPE": {f"{QK}.kind": "l2", f"{QK}.position": "after"},
}
GROUPED = {**LLAMA, "model.norm.eps": 0.0, f"{NORM}.eps": 0.0}
ONE_HEAD = {**GROUPED, "model.attention.heads": 1, "model.attention.kv_heads": 1}


def retrofitted(source, changes: dict):
    """(plan, parameters) of a model that lacks a QK-norm, after it was given one."""
    plan = plan_of(small(changes | {"init.from": str(source)}))
    return plan, start(plan, plan.shapes(), tokens_of(plan.config, plan.mesh), lambda told: None).parameters


def of_one_length(config) -> dict:
    """Random values, but each query and each key has the length that its layer's norm gives its input, times 3 and times 2: the projections
    of one head as wide as the stream are orthogonal."""
    values = values_of(config)
    for path, value in values.items():
        factor = 3.0 if "attention.q.weight" in path else 2.0
        if "attention.q.weight" in path or "attention.k.weight" in path:
            turns = [np.linalg.qr(np.asarray(layer, np.float64).reshape(16, 16))[0].reshape(layer.shape) for layer in value]
            values[path] = jnp.asarray(factor * np.stack(turns), jnp.float32)
        elif path.endswith("attention_residual.norm_in.scale"):
            values[path] = jnp.ones_like(value)
    return values


@pytest.mark.parametrize("rope", ["plain", "stretched"])
@pytest.mark.parametrize("case", NORMS)
def test_queries_and_keys_of_one_length_are_not_changed(case, rope, tmp_path):
    """Where all queries of a layer have one length, and all keys, the norm with its gain is the identity: logits differ by rounding alone,
    with RoPE's attention factor (1.21 here) before the norm or behind it."""
    changes = ONE_HEAD | (YARN if rope == "stretched" else {})
    config = small(changes)
    values = of_one_length(config)
    plan, found = retrofitted(a_checkpoint(tmp_path / "source", config, values), changes | NORMS[case])
    tokens = tokens_of(config, plan.mesh)
    logits = lambda of, values: np.asarray(bind(plan_of(of).model, values)(tokens[:, :-1]).logits)
    before = logits(config, values)
    np.testing.assert_allclose(logits(plan.config, found), before, rtol=0, atol=SAME * np.abs(before).max())


@pytest.mark.parametrize("case", [case for case in NORMS if "1+w" not in case])
def test_the_loss_rises_less_than_with_gains_of_one(case, tmp_path):
    """On text that the source itself would write its loss is the least there is; another model's is higher by KL(source, other). Queries
    here are three times as long as random ones: with the gains of a new model (1; temperature 10) the loss rises more."""
    config = small(GROUPED)
    values = {path: 3 * value if "attention.q.weight" in path else value for path, value in values_of(config).items()}
    plan, found = retrofitted(a_checkpoint(tmp_path / "source", config, values), GROUPED | NORMS[case])
    constants = {row.path: jnp.full(row.shape, row.constant) for row in plan.rows if row.group == "qk_norm"}
    tokens = tokens_of(config, plan.mesh, step=1)
    predicted = lambda of, values: jax.nn.log_softmax(bind(plan_of(of).model, values)(tokens[:, :-1]).logits)
    source = predicted(config, values)
    rise = lambda other: float((jnp.exp(source) * (source - other)).sum(-1).mean())
    assert 0 < rise(predicted(plan.config, found)) < rise(predicted(plan.config, found | constants))


def test_every_layer_has_gains_of_its_own(tmp_path):
    """Layers whose queries are longer get larger gains: by layer, and with head_each by head, the mean root mean square on the batch."""
    config = small(GROUPED)
    values = {path: value * jnp.asarray([1.0, 5.0]).reshape(2, 1, 1, 1) if "attention.q.weight" in path else value
              for path, value in values_of(config).items()}
    plan, found = retrofitted(a_checkpoint(tmp_path / "source", config, values), GROUPED | NORMS["head_each"])
    gains = next(np.asarray(value) for path, value in found.items() if path.endswith("q_norm.scale"))
    tokens, seen = tokens_of(config, plan.mesh), []
    records = bind(plan_of(config).model, values)(tokens[:, :-1], taps=Taps(record={"attn.q": lambda x: x})).records["attn.q"]
    for layer in range(2):
        seen.append(np.sqrt(np.square(np.asarray(records[layer], np.float64)).mean(-1)).mean((0, 1)))
        np.testing.assert_allclose(gains[layer], np.broadcast_to(seen[layer][:, None], gains[layer].shape), rtol=SAME)
    assert gains.shape == (2, 4, 4) and np.all(seen[1] > 2 * seen[0])


def test_the_temperature_has_the_scale_of_the_source(tmp_path):
    """A source that scales its scores by 0.7 gives its scale to the temperature, which takes the scale's place."""
    scaled = small(ONE_HEAD | {"model.attention.scale": 0.7})
    source = a_run(tmp_path / "source", scaled, of_one_length(scaled))
    _, found = retrofitted(source, ONE_HEAD | NORMS["l2"])
    temperature = next(np.asarray(value) for path, value in found.items() if path.endswith("temperature"))
    np.testing.assert_allclose(temperature, 0.7 * 3 * 4 * 2 * 4, rtol=SAME)  # scale |q| |k|: a normed input is 4 = sqrt(16) long


@pytest.mark.parametrize(("changes", "said"), [
    ({f"{QK}.kind": "head", f"{QK}.values": True}, r"attention\.qk_norm\.values = True cannot be added"),
    ({f"{QK}.kind": "head", f"{NORM}.kind": "dyt"}, r"attention\.qk_norm\.norm\.kind = 'dyt' cannot be added"),
])
def test_a_norm_that_would_change_the_model_is_refused(changes, said, tmp_path):
    """Of the values, or a tanh: no gain keeps what the model computes."""
    source = a_checkpoint(tmp_path / "source", small(GROUPED))
    with pytest.raises(UserError, match=said):
        retrofitted(source, GROUPED | changes)


def test_a_norm_in_place_of_another_is_refused(tmp_path):
    """A QK-norm is added, not exchanged: gains of another shape are named."""
    source = a_checkpoint(tmp_path / "source", small(GROUPED | NORMS["head"]))
    with pytest.raises(UserError, match=r"attention\.\w_norm\.scale of layer 0 has shape \(4,\) there, \(\d, 4\) in this model"):
        retrofitted(source, GROUPED | NORMS["head_each"])
