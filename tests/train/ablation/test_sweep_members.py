"""Sweeps in which something happens to a member: it diverges, fails, or is never evaluated at its start."""

import itertools

import pytest

from configs.load import load_sweep
from tests.train.ablation.sweeps import PLACEMENT, ablate_here, final, report_here, summary, tree, write_sweep, write_text
from train.ablation.run import unfinished
from train.ablation.sweep import placed
from train.programs import structure

NAME = "tiny_sweep"


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return write_text(tmp_path_factory.mktemp("source"))


def test_members_of_one_structure_follow_each_other(source, tmp_path):
    """Whatever the order of the axes, all members are to run, those that share a program one after the other."""
    norms = 'variants("norm", **{kind: {"model.norm.kind": kind} for kind in ("rms", "layer")})'
    sweep = load_sweep(str(write_sweep(tmp_path, source, f'seeds(2), {PLACEMENT}, values("optim.learning_rate", 0.1, 0.2), {norms}')))
    members = placed(sweep, str(tmp_path / "runs"))
    order = unfinished(members)
    assert {member.name for member in order} == {member.name for member in members} and len(order) == 16
    runs = [key for key, _ in itertools.groupby(structure(member.config) for member in order)]
    assert len(runs) == len(set(runs)) == 4


def test_a_diverged_member_is_a_result(source, tmp_path):
    """A member that diverges is recorded, those after it run, the sweep ends with status 0, and the report lists it at its loss at init."""
    file = write_sweep(tmp_path, source, 'values("optim.learning_rate", 1e30, 0.01)')
    done = ablate_here(file, "--root", tmp_path / "runs")
    folder = tmp_path / "runs" / NAME
    assert done.status == 0, done.err
    lost, kept = summary(folder / "learning_rate=1e+30"), summary(folder / "learning_rate=0.01")
    assert (lost["status"], kept["status"]) == ("diverged", "completed")
    before = tree(folder)
    assert ablate_here(file, "--root", tmp_path / "runs").status == 0 and tree(folder)[
        "learning_rate=1e+30/summary.json"] == before["learning_rate=1e+30/summary.json"]
    done = report_here(folder)
    assert done.status == 0, done.err
    text = (folder / "report.md").read_text()
    listed = text.split("## Runs that diverged")[1].split("##")[0]
    assert f"| all | 1e+30 | 0 | {lost['step']} |" in listed and "0.01" not in listed
    ours, initial = final(folder / "learning_rate=0.01")
    assert f"| {(initial - ours) / 2:.4f} (" in text  # its sensitivity: zero at the best rate, up to the loss at init at the other


def test_a_sweep_evaluated_only_at_its_end_is_reported_or_refused(source, tmp_path):
    """Without a loss at init (eval.every = None) there is a report, or a clear line; no traceback."""
    file = write_sweep(tmp_path, source, 'values("optim.learning_rate", 0.1, 0.01)', {"eval.every": None})
    assert ablate_here(file, "--root", tmp_path / "runs").status == 0
    done = report_here(tmp_path / "runs" / NAME)
    assert done.status == 0 or "eval.every" in done.err


def test_a_member_that_fails_does_not_stop_the_others(source, tmp_path):
    """A member that cannot run (its sequences are longer than the text) is told, and those after it run."""
    file = write_sweep(tmp_path, source, 'variants("length", long={"data.sequence": 100_000}, short={})')
    done = ablate_here(file, "--root", tmp_path / "runs")
    assert "data.sequence = 100000" in done.out + done.err
    assert summary(tmp_path / "runs" / NAME / "length=short")["status"] == "completed"
