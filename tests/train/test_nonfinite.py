"""Values that are not finite: how the run ends, what it names, and what it leaves alone."""

import dataclasses
import json
import re

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest

import train.loop
import train.nonfinite
from models.mlp import ACTIVATIONS
from tests.train.processes import lines_of
from tests.train.runs import experiment, trained
from tests.train.small import plan_of, small, tokens_of
from train.data.batches import training_batches
from train.nonfinite import make_diagnosis, places

DEEP = {"model.depth": 6, "model.stack": "scan"}
LOPSIDED = {"optim.eps": 0.0, "model.tied": False}
"""Adam without an epsilon divides zero by zero for the rows of the embedding whose token a batch lacks."""
OTHER = DEEP | {"model.overrides": ("5: mlp.kind=relu2",)}


@jax.custom_vjp
def blind(x):
    return x


blind.defvjp(lambda x: (x, None), lambda _, gradient: (gradient * jnp.nan,))


def planted(state, path: str, index: tuple, value: float):
    parameters = {name: x.at[index].set(value) if name.endswith(path) else x for name, x in state.parameters.items()}
    assert any(name.endswith(path) for name in parameters)
    return dataclasses.replace(state, parameters=parameters)


def found_in(changes, *, plant=lambda state: state, tokens=lambda x: x) -> list[str]:
    """The places that the diagnosis names at the first step."""
    plan = plan_of(small(changes))
    state = jax.device_put(plant(plan.fresh()), plan.shardings)
    return [str(place) for place in places(plan, make_diagnosis(plan)(state, tokens(tokens_of(plan.config, plan.mesh))))]


@pytest.mark.parametrize("changes", [{}, {"train.accumulate": 2}, {"model.moe.experts": 4, "model.moe.balance": 0.01}], ids=str)
def test_a_sound_step_has_no_such_place(changes):
    assert found_in(changes) == []


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_parameter(value):
    """A NaN in layer 5's MLP is named as that parameter, and then as the hidden units that it spoils; layers before are sound."""
    found = found_in(DEEP, plant=lambda state: planted(state, "mlp.up.weight", (5, 0, 0), value))
    assert found[:2] == ["parameters: layer 05 mlp.up.weight", "forward: layer 05 mlp.hidden"]


def test_an_embedding_row():
    """The row of one token of the batch is named as the embedding, and shows there first."""
    token = int(tokens_of(small(), plan_of(small()).mesh)[0, 0])
    found = found_in({}, plant=lambda state: planted(state, "embed", (token,), np.inf))
    assert found[:2] == ["parameters: embed", "forward: embed"]


def test_a_batch():
    """A token outside the vocabulary has no embedding: the batch and its row are named."""
    found = found_in({}, tokens=lambda x: x.at[3, 2].set(256))
    assert found[:2] == ["batch: row 3 has a token outside the vocabulary", "forward: embed"]


def test_an_activation(monkeypatch):
    """An activation function that only layer 5 has, and that gives NaN, is named by the site after it, with every parameter sound."""
    monkeypatch.setitem(ACTIVATIONS, "relu2", lambda x: x.at[0, 3, 1].set(jnp.nan))
    assert found_in(OTHER)[:2] == ["forward: layer 05 mlp.hidden", "loss: cross entropy, z-loss and routing losses"]


def test_a_gradient(monkeypatch):
    """A backward pass that gives NaN in layer 5's MLP alone: the forward pass is sound, and the gradient of what the MLP reads is first."""
    monkeypatch.setitem(ACTIVATIONS, "relu2", blind)
    assert found_in(OTHER)[0] == "backward: layer 05 resid.mid"


def test_an_update():
    """Zero over zero in the embedding's update is named as the update alone: all before it is finite."""
    assert found_in(LOPSIDED) == ["update: embed"]


BAD, ROW = 7, 2


@pytest.fixture
def bad_batch(monkeypatch):
    """Batches of which that of step 7 has a token outside the vocabulary in row 2."""

    def batches(*arguments):
        sound = training_batches(*arguments)
        return lambda step: sound(step).at[ROW, 0].set(300) if step == BAD else sound(step)

    monkeypatch.setattr(train.loop, "training_batches", batches)


STARTS = {"from a checkpoint": ({"checkpoint.every": 4}, "2 steps repeated from step 4"),
          "from the start": ({"checkpoint.every": None}, "6 steps repeated from step 0"),
          "from the step itself": ({"checkpoint.every": 7}, "0 steps repeated from step 7")}


@pytest.mark.parametrize("case", STARTS)
def test_a_run_stops_and_names_the_place(case, bad_batch, tmp_path, capsys):
    """Exit status 3, the lines up to the step that was not finite, and on the terminal and in the summary the step, the batch's row and the
    first site, found by repeating as few steps as the checkpoints allow."""
    changes, repeated = STARTS[case]
    directory = trained(experiment(tmp_path, "run", changes), 3)
    cause = json.loads((directory / "summary.json").read_text())["cause"]
    assert cause == f"not finite first at step 7, batch: row 2 has a token outside the vocabulary, then forward: embed ({repeated})"
    assert re.sub(r"\s+", " ", cause) in re.sub(r"\s+", " ", capsys.readouterr().err)
    lines = lines_of(directory)
    assert [line["step"] for line in lines] == list(range(BAD + 1)) and lines[BAD]["train/loss"] == "NaN"
    assert [line["step"] for line in lines if "grad_norm" in line] == [0, 3, 6]


def test_far_from_a_checkpoint_it_tells_how_to_look(bad_batch, monkeypatch, tmp_path):
    """Where more steps than LONGEST would have to be repeated, the run ends at once and names the command that looks."""
    monkeypatch.setattr(train.nonfinite, "LONGEST", 3)
    directory = trained(experiment(tmp_path, "run", {"checkpoint.every": None}), 3)
    assert "scripts.replay --step 7" in json.loads((directory / "summary.json").read_text())["cause"]


def arrays(directory, step: int) -> dict[str, np.ndarray]:
    with ocp.StandardCheckpointer() as reader:
        return {name: np.asarray(x) for name, x in reader.restore((directory / "checkpoints" / str(step) / "state").absolute()).items()}


def test_a_skipped_step_leaves_the_optimiser_alone(bad_batch, tmp_path):
    """With train.on_nonfinite = skip the run ends well: the bad step changes no bit of parameters or optimiser, and is counted once."""
    directory = trained(experiment(tmp_path, "run", {"train.on_nonfinite": "skip", "checkpoint.every": 1}))
    before, after, later = (arrays(directory, step) for step in (BAD, BAD + 1, BAD + 2))
    kept = [name for name in before if name.startswith(("parameters", "optimizer"))]
    assert len(kept) > 20 and all(before[name].tobytes() == after[name].tobytes() for name in kept)
    assert any(after[name].tobytes() != later[name].tobytes() for name in kept)
    assert (before["skipped"], after["skipped"], later["skipped"]) == (0, 1, 1)
    summary = json.loads((directory / "summary.json").read_text())
    assert (summary["status"], summary["skipped_steps"], summary["cause"]) == ("completed", 1, None)


def test_an_update_that_is_not_finite_is_skipped(tmp_path):
    """A finite gradient whose update is not finite changes nothing either."""
    changes = LOPSIDED | {"train.on_nonfinite": "skip", "checkpoint.every": 1}
    directory = trained(experiment(tmp_path, "run", changes))
    first, last = arrays(directory, 1), arrays(directory, 14)
    assert last["skipped"] == 14 and all(np.isfinite(x).all() for x in last.values())
    assert all(first[name].tobytes() == last[name].tobytes() for name in first if name.startswith(("parameters", "optimizer")))


def test_no_checkpoint_holds_parameters_that_are_not_finite(tmp_path):
    """An update that is not finite at a finite loss: the run ends at the checkpoint that would have held it, and names the update."""
    directory = trained(experiment(tmp_path, "run", LOPSIDED | {"checkpoint.every": 1}), 3)
    assert not [path for path in (directory / "checkpoints").iterdir() if path.name.isdigit()]
    assert "step 0, update: embed" in json.loads((directory / "summary.json").read_text())["cause"]
    assert isinstance(lines_of(directory)[0]["train/loss"], float)  # a value that is not finite is written as a text
