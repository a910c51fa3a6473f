"""Five steps whose numbers are written down: a refactor that means to change nothing changes none of them.

After a change that is meant, write them anew with `python -m tests.train.test_golden` and say why in the commit.
"""

import json
from pathlib import Path

import jax
import numpy as np
import pytest

from tests.train.small import mesh_of, plan_of, small, text_of
from train.data.batches import training_batches
from train.data.corpus import Corpus
from train.log import plain
from train.step import make_step

GOLDEN = Path(__file__).parent.parent / "golden" / "five_steps.json"
KEYS = ("train/loss", "train/z_loss", "train/grad_norm", "train/learning_rate", "grad_norm", "param_rms", "update_rms", "logits/log_z",
        "activation_rms.resid.post", "activation_grad_rms.resid.mid", "attention_entropy", "attention_logit_max", "attention_sink")
CHANGES = {"model.attention.qk_norm.kind": "head", "model.norm.placement": "sandwich", "model.depth": 3, "train.seed": 3, "optim.eps": 1e-4}
RTOL = 2e-4
"""Another release of XLA sums in another order; five Adam steps with eps 1e-4 carry its rounding this far at most."""


def measure() -> dict[str, list]:
    """Each key's values over five loud steps."""
    config, mesh = small(CHANGES), mesh_of()
    text = np.frombuffer(text_of(4000, seed=5).encode(), np.uint8)
    batch = training_batches(Corpus("text", text, text, 1, ""), config.data, config.train.seed, mesh)
    plan = plan_of(config)
    step, state, found = make_step(plan, loud=True), plan.fresh(), {key: [] for key in KEYS}
    for number in range(5):
        state, published = step(state, batch(number))
        for key in KEYS:
            found[key].append(plain(key, jax.device_get(published[key])))
    return found


@pytest.fixture(scope="module")
def measured():
    return measure()


@pytest.mark.parametrize("key", KEYS)
def test_five_steps_are_as_they_were(key, measured):
    """Text generated from a seed gives five steps whose loss and statistics are those that were written down."""
    hint = f"{key} is not what {GOLDEN.name} says. If that was meant, write it anew: python -m tests.train.test_golden; and say why"
    np.testing.assert_allclose(measured[key], json.loads(GOLDEN.read_text())[key], rtol=RTOL, err_msg=hint)


if __name__ == "__main__":
    GOLDEN.write_text(json.dumps(measure(), indent=1) + "\n")
