"""`scripts.ablate` in processes of its own: killed and continued, divided among jobs, and printed as commands for others to run."""

import re
import shlex
import shutil
import sys

import pytest

from tests.train.ablation.sweeps import ablate_here, refused, summary, tree, write_sweep, write_text
from tests.train.processes import ROOT, command, finish, lines_of, start, wait_for

NAME = "tiny_sweep"
STEPS = 120
RATES = ("0.01", "0.03", "0.1")
MEMBERS = [f"learning_rate={rate}" for rate in RATES]
CACHE = ROOT / ".cache" / "jax-tests-runs"


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return write_text(tmp_path_factory.mktemp("source"))


@pytest.fixture(scope="module")
def file(source, tmp_path_factory):
    """A sweep of three members of one structure, long enough to be killed in the middle."""
    axes = f'values("optim.learning_rate", {", ".join(RATES)})'
    changes = {"train.steps": STEPS, "checkpoint.every": 20, "instruments.every": 20, "instruments.probe_every": None, "eval.every": 60}
    return write_sweep(tmp_path_factory.mktemp("sweep"), source, axes, changes, cache=CACHE)


@pytest.fixture(scope="module")
def whole(file, tmp_path_factory):
    """The folder of the sweep, never interrupted."""
    root = tmp_path_factory.mktemp("whole")
    done = finish(command("scripts.ablate", file, "--root", root))
    assert done.returncode == 0, done.stderr
    return root / NAME


def assert_same_metrics(ours, theirs) -> None:
    """Every member has the same metrics.jsonl, to the byte, and is completed."""
    for name in MEMBERS:
        assert (ours / name / "metrics.jsonl").read_bytes() == (theirs / name / "metrics.jsonl").read_bytes(), name
        assert len(lines_of(ours / name)) == STEPS + 1 and summary(ours / name)["status"] == "completed"


def test_a_killed_sweep_goes_on(file, whole, tmp_path):
    """Killed in its second member, the sweep leaves the first untouched when it goes on, and ends with an uninterrupted one's metrics."""
    first, second, third = (tmp_path / NAME / name for name in MEMBERS)
    process = start(command("scripts.ablate", file, "--root", tmp_path))
    wait_for(process, lambda: len(lines_of(second)) >= 40)
    process.kill()
    process.communicate(timeout=60)
    assert (first / "summary.json").exists() and not (second / "summary.json").exists() and not third.exists()
    before = tree(first)
    done = finish(command("scripts.ablate", file, "--root", tmp_path))
    assert done.returncode == 0, done.stderr
    assert tree(first) == before and "[1/2]" in done.stdout and "[2/2]" in done.stdout
    assert_same_metrics(tmp_path / NAME, whole)


def test_jobs_divide_the_sweep(file, whole, tmp_path):
    """Two local jobs run the same sweep to the same metrics."""
    done = finish(command("scripts.ablate", file, "--root", tmp_path, "--jobs", 2, "--where", "local"))
    assert done.returncode == 0, done.stderr
    assert len(re.findall(r"^job \S+: ", done.stdout, re.M)) == 2
    assert_same_metrics(tmp_path / NAME, whole)


@pytest.mark.parametrize(("folder", "axis"), (
    ("runs", 'values("optim.eps", 1e-8, 1e-6)'), ("runs", 'values("optim.betas", (0.9, 0.95), (0.5, 0.75))'),
    ("my runs", 'values("optim.eps", 1e-8, 1e-6)'),
), ids=("plain", "labels with spaces and brackets", "a folder with a space"))
def test_printed_commands_run_the_members(source, tmp_path, folder, axis):
    """There is one command for each unfinished member; a shell's words of it run that member, and the sweep then takes it for done."""
    root = tmp_path / folder
    file = write_sweep(tmp_path, source, axis, cache=CACHE)
    commands = ablate_here(file, "--root", root, "--print-commands").out.splitlines()
    assert len(commands) == 2 and not list(root.rglob("metrics.jsonl"))
    python, *words = shlex.split(commands[1])
    assert python == "python"
    done = finish([sys.executable, *words])
    assert done.returncode == 0, done.stderr
    left = ablate_here(file, "--root", root, "--print-commands").out.splitlines()
    assert left == commands[:1]


@pytest.mark.skipif(shutil.which("srun") is not None, reason="Slurm is installed here")
def test_no_slurm_is_told(file, tmp_path):
    """Where Slurm is asked for and not installed, that is told in a line, with exit status 2."""
    refused(ablate_here(file, "--root", tmp_path, "--where", "slurm"), "srun")


@pytest.mark.parametrize(("words", "told"), (
    (("norm_placment_quick",), ("'norm_placement_quick'",)), (("absent.py",), ("absent.py",)),
    (("norm_placement_quick", "--jobs", 0), ("--jobs",)), (("norm_placement_quick", "--slurm", "partition"), ("--slurm",)),
))
def test_a_mistake_on_the_command_line_is_told(words, told, tmp_path):
    """A mistake is told in a line with exit status 2, and nothing is written."""
    refused(ablate_here(*words, "--root", tmp_path), *told)
    assert not list(tmp_path.iterdir())


def test_a_mistake_in_a_job_is_told(tmp_path):
    """A mistake that shows in a job only, here a text that is not there, ends the sweep with status 2 and is told without a traceback."""
    file = write_sweep(tmp_path, tmp_path / "absent", 'values("optim.eps", 1e-8, 1e-6)', cache=CACHE)
    done = finish(command("scripts.ablate", file, "--root", tmp_path, "--jobs", 2))
    assert done.returncode == 2 and "absent" in done.stderr and "Traceback" not in done.stderr, done.stderr
