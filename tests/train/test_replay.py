"""A step of a run again: the same to the bit, with another's batch, and the run gone on without batches."""

import json
import shutil

import jax
import numpy as np
import pytest

from configs.knobs import replace
from configs.load import UserError
from configs.schema import Data
from tests.train.processes import lines_of
from tests.train.runs import experiment, trained
from tests.train.small import SAME, mesh_of
from train.data.batches import contents, training_batches
from train.data.corpus import Corpus, read
from train.log import spelled
from train.loop import run
from train.replay import open_run
from train.revisit import revisit, sheets, without

SKIP = {"before the first checkpoint": (2, 3), "after one": (6, 2)}


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    """A run of 14 steps with a checkpoint every 4, a panel every 3."""
    return trained(experiment(tmp_path_factory.mktemp("runs"), "run"))


STEPS = {"the first": 0, "at a checkpoint": 4, "with a panel": 6, "between": 11, "the last": 13}


@pytest.mark.parametrize("step", STEPS.values(), ids=STEPS)
def test_a_step_is_repeated_to_the_bit(step, directory):
    """All that the line of a step holds comes out again, from the nearest checkpoint before it, which is told."""
    told = []
    found = revisit(directory, step, None, told.append)
    line = lines_of(directory)[step]
    assert found.same, found.verdict
    assert {key: spelled(found.panel[key]) for key in line if "grad_norm" in line and key != "step"}.items() <= line.items()
    assert f"repeats {step % 4 if step < 12 else step - 12} steps from step {step - step % 4}" in told
    assert {"grad_norm", "update_rms", "attention_logit_p99", "attention_logit_max.heads", "train/update_rms"} <= found.panel.keys()


def test_a_line_that_was_changed_is_told(directory, tmp_path):
    """A number of the line that differs in its last digit is named."""
    shutil.copytree(directory, tmp_path / "run")
    lines = lines_of(tmp_path / "run")
    lines[5]["train/grad_norm"] = float(np.nextafter(np.float32(lines[5]["train/grad_norm"]), np.float32(np.inf)))
    (tmp_path / "run" / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    found = revisit(tmp_path / "run", 5, None, print)
    assert found.same is False and found.verdict.endswith("in train/grad_norm")


def test_a_damaged_checkpoint_is_passed_over(directory, tmp_path):
    """Where the newest checkpoint is damaged, more steps are repeated, to the same bits."""
    shutil.copytree(directory, tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "8" / "state")
    told = []
    assert revisit(tmp_path / "run", 9, None, told.append).same
    assert "repeats 5 steps from step 4" in told and any("8 is damaged" in line for line in told)


def test_the_batch_of_another_step(directory):
    """The loss of --batches-from is that of the state at the one step on the batch of the other; nothing claims that it is the same."""
    found = revisit(directory, 9, 3, print)
    replay, _ = open_run(directory, print)
    loss = float(replay.programs.evaluate(replay.at(9).parameters, [replay.batch(3)]))
    assert found.panel["train/loss"] == pytest.approx(loss, rel=SAME)
    assert found.same is None and found.contents["step"] == 3
    assert str(lines_of(directory)[9]["train/loss"]) in found.verdict and str(lines_of(directory)[3]["train/loss"]) in found.verdict


def test_the_panel_is_shown_in_full(directory):
    """Every value of a panel is in one of the tables: single ones, and a column for each layer."""
    found = revisit(directory, 6, None, print)
    single, by_layer, each = sheets(found.panel, found.depth)
    names = {row[0] for sheet in (single, by_layer) for row in sheet.rows} | {row[0].split("[")[0] for row in each.rows}
    assert {name.removesuffix(", range") for name in names} == found.panel.keys()
    assert by_layer.columns == each.columns == ("", "00", "01") and all(len(row) == 3 for row in by_layer.rows + each.rows)
    assert dict(row[:2] for row in by_layer.rows)["grad_norm"] == f"{found.panel['grad_norm'][0]:.5g}"


def test_the_text_of_a_batch(directory):
    """The places and texts that are told are those of the tokens that the step was fed."""
    replay, corpus = open_run(directory, print)
    data = replay.plan.config.data
    found = contents(corpus, data, replay.plan.config.train.seed, 7)
    tokens = np.asarray(replay.batch(7)).astype(np.uint8)
    assert found["text"] == [row.tobytes().decode() for row in tokens]
    assert all(corpus.train[place * data.sequence :].tobytes().startswith(row.tobytes())
               for place, row in zip(found["windows"], tokens, strict=True))


def test_skipped_batches_shift_those_after():
    """From each step of data.skip on the batches are so many further along; those before stay."""
    text = np.random.default_rng(0).integers(0, 256, 400).astype(np.uint8)
    corpus, rows = Corpus("text", text, text[:50], 1, ""), lambda batch, step: np.asarray(batch(step)).tolist()
    whole = training_batches(corpus, Data(source="text", batch=3, sequence=8), 0, mesh_of())
    shifted = training_batches(corpus, Data(source="text", batch=3, sequence=8, skip=((6, 1), (3, 2))), 0, mesh_of())
    for step, original in enumerate([0, 1, 2, 5, 6, 7, 9, 10]):
        assert rows(shifted, step) == rows(whole, original)


@pytest.mark.parametrize("case", SKIP)
def test_a_run_goes_on_without_batches(case, directory, tmp_path):
    """--skip goes on from the checkpoint before, and ends as a run that had left these batches out from its start: the same lines."""
    root = tmp_path / "runs"
    shutil.copytree(directory, root / "run")
    step, batches = SKIP[case]
    config = without(root / "run", step, batches, print)
    gone_on = trained(config)
    assert lines_of(gone_on)[:step] == lines_of(directory)[:step]
    assert lines_of(gone_on)[step]["train/loss"] != lines_of(directory)[step]["train/loss"]
    whole = trained(replace(config, {"run.name": "whole", "run.resume": False}))
    assert (gone_on / "metrics.jsonl").read_bytes() == (whole / "metrics.jsonl").read_bytes()
    assert revisit(gone_on, 13, None, print).same


REFUSED = {
    "a step that is not there": (lambda run: revisit(run, 14, None, print), "--step 14"),
    "a batch that is not there": (lambda run: revisit(run, 3, -1, print), "--batches-from -1"),
    "to skip from a step that is not there": (lambda run: without(run, 20, 1, print), "--step 20"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_repeated(case, directory):
    """A step beyond the run's config is refused by name, and nothing is made."""
    action, told = REFUSED[case]
    before = sorted(directory.parent.iterdir())
    with pytest.raises(UserError, match=told):
        action(directory)
    assert sorted(directory.parent.iterdir()) == before


def test_another_text_is_refused(tmp_path):
    """A run whose text has changed since cannot be repeated, and says so."""
    config = experiment(tmp_path, "run")
    directory = trained(config)
    path = tmp_path / "text.txt"
    path.write_text(path.read_text() + "more")
    with pytest.raises(UserError, match="is not the text"):
        revisit(directory, 1, None, print)
    assert read(str(path)).sha256  # the text itself is sound


def test_looking_again_leaves_the_run_alone(directory):
    """A run that was revisited is, resumed, as it was."""
    before = (directory / "metrics.jsonl").read_bytes()
    revisit(directory, 2, None, print)
    replay, _ = open_run(directory, print)
    assert run(replace(replay.plan.config, {"run.resume": True})) == 0
    assert (directory / "metrics.jsonl").read_bytes() == before
    assert jax.device_get(replay.at(12).step) == 12
