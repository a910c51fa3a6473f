"""Sweeps whose schedules differ in length, and such as have no step at all."""

import re

import pytest

from configs.load import load_sweep
from tests.train.ablation.sweeps import PLACEMENT, ablate_here, final, report_here, summary, tree, write_sweep, write_text
from tests.train.processes import lines_of
from train.ablation import curves, figures, tables
from train.ablation.collect import collect
from train.ablation.sweep import placed
from train.loop import run
from train.programs import programs_of, structure

NAME = "tiny_sweep"


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return write_text(tmp_path_factory.mktemp("source"))


@pytest.fixture(scope="module")
def lengths(source, tmp_path_factory):
    """The folder of a finished sweep over 4 and 8 steps, two seeds each."""
    folder = tmp_path_factory.mktemp("lengths")
    every = {"instruments.every": 2, "instruments.probe_every": 2, "eval.every": 2}
    curve = 'Curve("eval/loss", over="step"), Curve("train/loss", over="step"),'
    file = write_sweep(folder, source, 'values("train.steps", 4, 8), seeds(2)', every, curves=curve)
    done = ablate_here(file, "--root", folder / "runs")
    assert done.status == 0, done.err
    return folder / "runs" / NAME


def test_both_lengths_span_their_schedules(lengths):
    """Heat maps and curves over the steps go from 0 to 1 for runs of 4 and of 8 steps; half-way, the one has done 2, the other 4."""
    table = collect(lengths)
    held_out, train = (curves.lines(table, curve) for curve in table.curves)
    assert {steps: line.x.tolist() for steps, line in held_out.items()} == {"4": [0, 0.5, 1], "8": [0, 0.25, 0.5, 0.75, 1]}
    assert {steps: line.x.tolist() for steps, line in train.items()} == {
        "4": [0, 0.25, 0.5, 0.75], "8": [step / 8 for step in range(8)]}
    half = {steps: line.values[line.x.tolist().index(0.5), 0] for steps, line in held_out.items()}
    for steps, at in (("4", 2), ("8", 4)):
        assert half[steps] == lines_of(lengths / f"steps={steps},seed=0")[at]["eval/loss"]
    figure = figures.heatmaps({steps: tables.best_run(table, steps) for steps in ("4", "8")}, "gradient norm", "grad_norm", True)
    short, long = figure.axes[:2]
    for axes, cells in ((short, 2), (long, 4)):
        (mesh,) = axes.collections
        assert mesh.get_coordinates()[0, :, 0].tolist() == [cell / cells for cell in range(cells + 1)] and axes.get_xlim() == (0, 1)


def test_final_losses_are_those_at_the_end_of_each_schedule(lengths):
    """What is compared is the held-out loss at fraction 1: after 4 updates of the one run and 8 of the other."""
    table = collect(lengths)
    for run_ in table.results:
        steps = run_.config.train.steps
        last = lines_of(run_.directory)[-1]
        fraction, values = run_.series("eval/loss")
        assert (last["step"], fraction[-1]) == (steps, 1.0) and run_.loss == values[-1] == last["eval/loss"] == final(run_.directory)[0]
        assert run_.loss in tables.best(table, str(steps))


def test_both_lengths_are_told(lengths):
    """The report's captions, its conditions and its axes tell both lengths."""
    assert report_here(lengths).status == 0
    text = (lengths / "report.md").read_text()
    captions = re.findall(r"\.png\)\n\n\*(.*)\*$", text, re.M)
    assert len(captions) == 6 and all("4 runs of 4 or 8 steps x 4 x 16 bytes, compared at equal fractions" in line for line in captions)
    assert all("train.steps (4, 8)" in line for line in captions) and "| steps | 4 or 8 |" in text


@pytest.fixture(scope="module")
def untrained(source, tmp_path_factory):
    """(sweep file, root) of a finished sweep without a step, over axes that would have sensitivities and interactions."""
    folder = tmp_path_factory.mktemp("untrained")
    axes = f'{PLACEMENT}, variants("decay", none={{"optim.weight_decay": 0.0}}, some={{}}), values("optim.learning_rate", 0.01, 0.1)'
    file = write_sweep(folder, source, axes, {"train.steps": 0, "optim.warmup": 0}, curves='Curve("probe.grad_norm", over="layer"),')
    programs_of.cache_clear()
    done = ablate_here(file, "--root", folder / "runs")
    assert done.status == 0, done.err
    return file, folder / "runs"


def test_without_a_step_the_initial_model_is_measured(untrained):
    """A run of no step is completed and leaves one line, that of step 0, with the held-out loss and the probe batch's panel alone."""
    _, root = untrained
    for directory in (path.parent for path in (root / NAME).glob("*/summary.json")):
        of = summary(directory)
        (line,) = lines_of(directory)
        assert (of["status"], of["step"], of["train_loss"]) == ("completed", 0, None)
        assert line["step"] == 0 and of["eval_loss"] == of["initial_eval_loss"] == line["eval/loss"] > 0
        assert len(line["probe.grad_norm"]) == 2 and {key.partition(".")[0] for key in line} == {"step", "eval/loss", "probe"}
        assert not (directory / "checkpoints").exists() or not any((directory / "checkpoints").iterdir())


def test_without_a_step_no_step_is_compiled(untrained):
    """Probe and evaluation are the programs of a run that has no step."""
    programs = programs_of(structure(load_sweep(str(untrained[0])).base))
    assert programs.compile().keys() == {"probe", "evaluate"}


def test_a_report_of_initial_models_draws_no_conclusion_about_losses(untrained):
    """Such a report has its curves, the loss at init and what models cost, and neither winner, sensitivity, spike score nor interaction."""
    _, root = untrained
    done = report_here(root / NAME)
    assert done.status == 0, done.err
    text = (root / NAME / "report.md").read_text().split("## What came out")[1]
    assert "initial models alone" in done.out and "probe.grad_norm_over_layer_mean_last.png" in text and "| loss at init |" in text
    assert "8 runs of 0 steps" in text and "fractions of their schedules" not in text
    for word in ("lowest held-out loss", "sensitivity", "spike score", "interaction", "best loss", "higher by"):
        assert word not in text and word not in done.out, word
    assert {path.stem for path in (root / NAME).glob("*.png")} == {"probe.grad_norm_over_layer_mean_last"}


def test_a_finished_run_without_a_step_may_be_resumed(untrained):
    """Asked to continue, it ends at once with status 0, and its metrics, its config and what its summary says of the model stay."""
    file, root = untrained
    member = placed(load_sweep(str(file)), str(root))[0]
    directory = root / NAME / member.name
    before, said = tree(directory), summary(directory)
    assert run(member.config) == 0
    after = tree(directory)
    assert all(after[path][0] == of[0] for path, of in before.items() if path in ("metrics.jsonl", "config.json"))
    assert summary(directory) == said and "summary.json" in after
