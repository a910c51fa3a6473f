"""Spikes: found as the published scores find them, the same in a resumed run, and kept with their evidence."""

import functools
import json
import math
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from configs.knobs import replace
from configs.schema import Spikes
from tests.train.processes import lines_of
from tests.train.runs import experiment, trained
from tests.train.small import text_of
from tests.train.test_loop import arrays
from train.data.batches import training_windows
from train.data.corpus import Corpus
from train.detector import LEAST, SINGLE, Detector, judge, no_values
from train.metrics import spike_score, spike_score_of_steps, spiking

WINDOW, DEVIATIONS = 30, 5.0


def series(places: dict[int, float], length: int = 200, seed: int = 0) -> np.ndarray:
    """Normal numbers, and planted ones so many standard deviations above their mean."""
    found = np.random.default_rng(seed).normal(3.0, 0.1, length)
    for place, height in places.items():
        found[place] = 3.0 + height * 0.1
    return found


def lines_from(loss: np.ndarray) -> list[dict]:
    return [{"step": step, "train/loss": float(x)} for step, x in enumerate(loss)]


@pytest.mark.parametrize("places", [{}, {19: 50.0}, {20: 50.0}, {60: 9.0, 61: 9.0, 90: -50.0}, {199: 20.0}], ids=str)
def test_the_detector_finds_what_the_score_counts(places):
    """Line by line, the detector finds the values that the definition of the scores names over the whole series."""
    loss = series(places)
    detector = Detector(Spikes(action="record", window=WINDOW, deviations=DEVIATIONS))
    ours = [bool(detector.judge(line)) for line in lines_from(loss)]
    np.testing.assert_array_equal(ours, spiking(loss, DEVIATIONS, WINDOW, LEAST))
    assert all(ours[place] == (height > DEVIATIONS and place >= LEAST) for place, height in places.items() if place not in (61,))


def test_a_value_that_is_not_finite_neither_spikes_nor_counts():
    """A diverged or skipped step leaves mean and deviation of the others as they are."""
    loss = series({150: 20.0})
    with_holes = np.insert(loss, [40, 90], [np.nan, np.inf])
    assert spike_score(with_holes) == spike_score(loss) > 0
    found = [step for step, line in enumerate(lines_from(with_holes)) if step >= 0 and line["train/loss"] > 4.5]
    detector = Detector(Spikes(action="record", window=WINDOW))
    assert [line["step"] for line in lines_from(with_holes) if detector.judge(line)] == [step for step in found if step not in (41 + 50,)]


def test_every_watched_number_is_judged():
    """Gradient norm, update RMS and the largest logit of all layers spike each for itself; layers without the statistic do not matter."""
    draw = np.random.default_rng(0)
    around = lambda mean: draw.normal(mean, 0.1)
    lines = [{"step": step, "train/loss": around(3), "train/grad_norm": around(1), "train/update_rms": around(1),
              "attention_logit_max": [around(5), None, around(2)]} for step in range(50)]
    for key, value in (("train/grad_norm", 9.0), ("train/update_rms", 9.0), ("attention_logit_max", [5.0, None, 40.0])):
        detector = Detector(Spikes(action="record"), lines)
        assert list(detector.judge(lines[0] | {key: value})) == [key]


@pytest.mark.parametrize("stopped", [0, 10, 25, 101, 199])
def test_a_resumed_detector_decides_the_same(stopped):
    """Made from the lines before, wherever the run was stopped, a detector finds the same spikes at the same distances."""
    lines, config = lines_from(series({30: 9.0, 100: 30.0, 101: 12.0})), Spikes(action="record", window=WINDOW)
    whole = Detector(config)
    expected = [whole.judge(line) for line in lines]
    resumed = Detector(config, lines[:stopped])
    assert [resumed.judge(line) for line in lines[stopped:]] == expected[stopped:]
    assert any(expected)


def test_the_score_of_steps_counts_either():
    """OLMo-core's score counts steps at which the loss or the gradient norm spikes, once each, of all steps."""
    loss, grad_norm = series({127: 40.0, 150: 40.0, 180: 40.0}), series({150: 40.0, 170: 40.0}, seed=1)
    assert spike_score_of_steps(loss, grad_norm) == pytest.approx(100 * 3 / 200)
    assert spike_score_of_steps(loss[:0], loss[:0]) == 0.0


SPIKE, RING, STEPS = 50, 4, 60
WATCHED = {"train.steps": STEPS, "optim.learning_rate": 1e-2, "optim.schedule": "constant", "instruments.every": 6, "checkpoint.every": 8,
           "checkpoint.keep": 1, "spikes.action": "record", "spikes.window": 20, "spikes.deviations": 10.0, "spikes.ring": RING}


def write_text(folder, config) -> None:
    """A text whose windows in the batch of step SPIKE, and no others, are of letters that occur nowhere else."""
    text, length = bytearray(text_of(12000).encode()), config.data.sequence
    train = np.frombuffer(bytes(text[: len(text) - len(text) // 10]), np.uint8)
    of = training_windows(Corpus("text", train, train, 1, ""), config.data, config.train.seed)
    for row in range(config.data.batch):
        place = of(SPIKE, row)
        text[place * length : (place + 1) * length] = "ÿ".encode() * (length // 2)
    (folder / "text.txt").write_bytes(bytes(text))


@pytest.fixture(scope="module")
def spiked(tmp_path_factory):
    """A run whose batch of step 50 is text as none before."""
    folder = tmp_path_factory.mktemp("runs")
    config = experiment(folder, "run", WATCHED)
    write_text(folder, config)
    return config, trained(config)


def evidence(directory) -> dict:
    return json.loads((directory / "spikes" / str(SPIKE) / "spike.json").read_text())


def test_the_evidence_of_a_spike(spiked):
    """The spike is found where it was planted and nowhere before; kept are the panels of the steps up to it, its batch as text, and the
    checkpoint before it, though later ones have come."""
    _, directory = spiked
    assert min(int(path.name) for path in (directory / "spikes").iterdir()) == SPIKE
    found = evidence(directory)
    assert "train/loss" in found["deviations"] and found["checkpoint"] == 48
    assert sorted(int(path.name) for path in (directory / "checkpoints").iterdir() if path.name.isdigit()) == [48, STEPS]
    panels = [json.loads(line) for line in (directory / "spikes" / str(SPIKE) / "panels.jsonl").read_text().splitlines()]
    assert [panel["step"] for panel in panels] == list(range(SPIKE - RING + 1, SPIKE + 1))
    lines = lines_of(directory)
    assert all(len(panel["grad_norm"]) == 2 and panel["train/loss"] == lines[panel["step"]]["train/loss"] for panel in panels)
    batch = json.loads((directory / "spikes" / str(SPIKE) / "batch.json").read_text())
    assert len(batch["windows"]) == 8 and all("ÿÿÿ" in text for text in batch["text"])


def test_the_ring_is_not_written(spiked):
    """Steps that measure a panel for the ring alone write single numbers; every sixth line has its panel."""
    assert [line["step"] for line in lines_of(spiked[1]) if "grad_norm" in line] == list(range(0, STEPS, 6))


def test_a_resumed_run_finds_the_same_spike(spiked, tmp_path):
    """Gone on from the checkpoint before it, the run has the same lines, and finds the same spike from them; the checkpoint stays kept."""
    config, directory = spiked
    shutil.copytree(directory, tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "checkpoints" / str(STEPS))
    shutil.rmtree(tmp_path / "run" / "spikes")
    again = trained(replace(config, {"run.root": str(tmp_path), "run.resume": True}))
    assert (again / "metrics.jsonl").read_bytes() == (directory / "metrics.jsonl").read_bytes()
    assert evidence(again) == evidence(directory)
    kept = lambda of: {path.name: path.read_bytes() for path in (of / "spikes" / str(SPIKE)).iterdir()}
    assert kept(again) == kept(directory)  # panels of steps before the checkpoint too


def test_a_spike_ends_the_run_where_asked(spiked, tmp_path, capsys):
    """spikes.action = stop ends with exit status 3 after the line of the spike, and says what spiked."""
    config, directory = spiked
    stopped = trained(replace(config, {"run.root": str(tmp_path), "spikes.action": "stop"}), 3)
    assert (stopped / "metrics.jsonl").read_text().splitlines() == (directory / "metrics.jsonl").read_text().splitlines()[: SPIKE + 1]
    summary = json.loads((stopped / "summary.json").read_text())
    assert summary["status"] == "diverged" and summary["step"] == SPIKE and "train/loss spikes" in summary["cause"]
    assert "train/loss spikes" in capsys.readouterr().err and evidence(stopped)["deviations"] == evidence(directory)["deviations"]


def test_a_step_judges_as_the_lines_are_judged():
    """Inside a step, from the recent values alone, the same values spike as line by line; holes of values that are not finite included."""
    config, draw = Spikes(action="skip", window=WINDOW, deviations=DEVIATIONS), np.random.default_rng(2)
    lines = [{key: 3 + 0.1 * float(x) for key, x in zip(SINGLE, row, strict=True)} for row in draw.standard_normal((100, len(SINGLE)))]
    loss, grad_norm, update_rms = SINGLE
    for step, key, value in ((19, loss, 9.0), (40, loss, 9.0), (60, grad_norm, math.nan), (65, grad_norm, math.inf),
                             (70, grad_norm, 9.0), (99, update_rms, 9.0)):
        lines[step][key] = value
    detector, recent, step = Detector(config), no_values(config), jax.jit(functools.partial(judge, config))
    ours = []
    for line in lines:
        spikes, recent = step(recent, {key: jnp.float32(value) for key, value in line.items()})
        ours.append(bool(spikes))
    assert ours == [bool(detector.judge(line)) for line in lines] and [step for step, x in enumerate(ours) if x] == [40, 70, 99]


def test_a_spike_is_skipped_where_asked(spiked, tmp_path, capsys):
    """spikes.action = skip: up to the spike the run is as if it were only recorded; the state after the spike's step is the state before it
    but for counters and recent values; evidence is kept, and a run stopped before the spike and resumed skips the same."""
    config, directory = spiked
    skipping = replace(config, {"run.root": str(tmp_path), "spikes.action": "skip", "checkpoint.every": 1, "checkpoint.keep": STEPS})
    run = trained(skipping)
    lines, theirs = lines_of(run), lines_of(directory)
    assert lines[: SPIKE] == theirs[: SPIKE] and lines[SPIKE + 2] != theirs[SPIKE + 2]
    assert [line["train/skipped"] for line in lines[SPIKE - 1 : SPIKE + 1]] == [0, 1] and "its update is skipped" in capsys.readouterr().err
    assert evidence(run)["deviations"].keys() == evidence(directory)["deviations"].keys()
    before, after = (arrays(run, step) for step in (SPIKE, SPIKE + 1))
    changed = {name.split("/")[0] for name in before if before[name].tobytes() != after[name].tobytes()}
    assert changed == {"step", "skipped", "recent"}
    for step in range(SPIKE - 3, STEPS + 1):
        shutil.rmtree(run / "checkpoints" / str(step))
    whole = (run / "metrics.jsonl").read_bytes()
    assert (trained(replace(skipping, {"run.resume": True})) / "metrics.jsonl").read_bytes() == whole
