"""`python -m scripts.replay`: the panel in full, the batch, and what is refused."""

import functools

import jax
import pytest

import scripts.replay
from tests.train.processes import lines_of
from tests.train.runs import experiment, trained


@pytest.fixture(autouse=True)
def usual_promotion():
    """As in training: see tests/train/conftest.py."""
    with jax.numpy_dtype_promotion("standard"):
        yield


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    with jax.numpy_dtype_promotion("standard"):
        return trained(experiment(tmp_path_factory.mktemp("runs"), "run"))


@pytest.fixture
def replay(call):
    """words to (exit status, what was printed)."""
    return functools.partial(call, scripts.replay)


def test_a_step_is_shown(replay, directory):
    """Status 0, a row for each statistic with a column for each layer, the windows of the batch, and that all is as it was."""
    status, text = replay(directory, "--step", 5)
    assert status == 0 and "repeats 1 steps from step 4" in text and "the same to the last bit" in text
    rows = {line.split("│")[1].strip(): line.split("│")[2:-1] for line in text.splitlines() if line.startswith("│")}
    assert float(rows["train/loss"][0]) == pytest.approx(lines_of(directory)[5]["train/loss"], rel=1e-4)
    assert len(rows["grad_norm"]) == len(rows["attention_logit_p99"]) == 2
    assert "batch of step 5: windows" in text


def test_another_batch_is_shown(replay, directory):
    status, text = replay(directory, "--step", 5, "--batches-from", 2)
    assert status == 0 and "batch of step 2: windows" in text and "at the state of step 5" in text


def test_a_run_goes_on_without_batches(replay, directory):
    """--skip trains to the end in a directory of its own, named after what was left out."""
    status, text = replay(directory, "--step", 5, "--skip", 2)
    assert status == 0 and "goes on from step 4" in text
    assert [line["step"] for line in lines_of(directory.with_name("run,skip=5+2"))] == list(range(15))


REFUSED = {"a step too far": (("--step", 14), "steps 0 to 13"), "nothing to skip": (("--step", 2, "--skip", 0), "--skip 0"),
           "both": (("--step", 2, "--skip", 1, "--batches-from", 1), "without --batches-from")}


@pytest.mark.parametrize("case", REFUSED)
def test_mistakes_end_with_2(case, replay, directory):
    words, told = REFUSED[case]
    status, text = replay(directory, *words)
    assert status == 2 and told in text and "Traceback" not in text


def test_a_folder_that_is_no_run(replay, tmp_path):
    status, text = replay(tmp_path, "--step", 1)
    assert status == 2 and str(tmp_path) in text
