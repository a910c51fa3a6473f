"""`make train`'s own command, with few steps, on the interpreter's own library."""

import math
import re

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tests.train.processes import ROOT, finish, lines_of, strict_json, training

STEPS = 6


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """(run directory, what the command printed)."""
    root = tmp_path_factory.mktemp("runs")
    intervals = ("--instruments.every", "2", "--instruments.probe-every", "3", "--eval.every", "3", "--checkpoint.every", "3")
    words = ("--train.steps", STEPS, "--optim.warmup", "2", "--eval.batches", "1", "--run.progress", "True", "--run.name", "tiny")
    done = finish(training("tiny", root, *words, *intervals))
    assert done.returncode == 0, done.stderr
    return root / "tiny", done


def test_make_train_is_this_command():
    """The README's command trains the experiment `tiny` by this script."""
    makefile = (ROOT / "Makefile").read_text()
    assert re.search(r"^train:.*\n\t.*python -m scripts\.train tiny", makefile, re.M)


def test_the_events_hold_the_panel(trained):
    """TensorBoard has loss, learning rate and the per-layer statistics of four layers, at the steps at which they were measured."""
    events = EventAccumulator(str(trained[0]), size_guidance={"scalars": 0}).Reload()
    steps = lambda tag: [event.step for event in events.Scalars(tag)]
    assert steps("train/loss") == steps("train/grad_norm") == steps("train/learning_rate") == list(range(STEPS))
    assert steps("eval/loss") == [0, 3, 6]
    for layer in range(4):
        for key in ("grad_norm", "param_rms", "update_rms", "activation_rms.resid.post", "activation_grad_rms.resid.mid",
                    "attention_logit_max", "attention_logit_lse", "attention_entropy", "attention_sink"):
            assert steps(f"{key}/layer_{layer:02}") == [0, 2, 4], key
        assert steps(f"probe.attention_logit_p99/layer_{layer:02}") == [0, 3, 6]
    tags = events.Tags()
    assert not [tag for tag in tags["scalars"] if "layer_04" in tag]
    assert {"config", "custom_scalars__config__", "probe.attention_logit_histogram/layer_03"} <= set(tags["tensors"])


def test_it_learns_and_says_what_it_learnt(trained):
    """The loss falls from some log 256 nats; the last lines give the held-out loss, both entropies and TensorBoard's command."""
    directory, done = trained
    lines = lines_of(directory)
    assert lines[0]["train/loss"] == pytest.approx(math.log(256), rel=0.1) and lines[STEPS - 1]["train/loss"] < lines[0]["train/loss"] - 0.1
    summary = strict_json((directory / "summary.json").read_text())
    found = re.search(r"held-out loss (\S+) nats per byte.*unigram entropy is (\S+), the bigram entropy (\S+)", done.stdout)
    loss, unigram, bigram = map(float, found.groups())
    assert loss == pytest.approx(summary["eval_loss"], abs=1e-4) and 1.5 < bigram < unigram < 4
    assert f"tensorboard.main --logdir {directory.parent}" in done.stdout


def test_progress_is_shown(trained):
    """The progress bar counts the steps."""
    assert f"{STEPS}/{STEPS}" in trained[1].stdout + trained[1].stderr


def test_the_corpus_is_recorded(trained):
    """The conditions name the corpus by its hash and its size."""
    corpus = strict_json((trained[0] / "conditions.json").read_text())["corpus"]
    assert corpus["source"] == "stdlib" and re.fullmatch(r"[0-9a-f]{64}", corpus["sha256"]) and corpus["files"] > 200
