"""Two processes on loopback are one run: one record, one decision, one end."""

import shutil
import signal
import socket
import subprocess
import time
from pathlib import Path

import pytest

from configs.knobs import replace
from configs.load import load
from tests.train.processes import lines_of, start, strict_json, training, wait_for, write_config
from tests.train.small import text_of
from train.loop import run

STEPS = 300
KNOBS = {"train.steps": STEPS, "mesh.data": 2, "instruments.every": 1, "instruments.probe_every": None, "checkpoint.every": 50,
         "checkpoint.keep": 6, "eval.every": 100, "run.name": "run"}


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    """A config file that reads one generated text."""
    folder = tmp_path_factory.mktemp("config")
    (folder / "text.txt").write_text(text_of(8000))
    return write_config(folder, folder / "text.txt")


@pytest.fixture(scope="module")
def whole(config, tmp_path_factory):
    """The directory of a run that one process, this one, made on two of its devices."""
    root = tmp_path_factory.mktemp("whole")
    assert run_here(config, root) == 0
    return root / "run"


def run_here(config: Path, root: Path, resume: bool = False) -> int:
    here = {"run.root": str(root), "run.resume": resume, "run.progress": False, "run.compilation_cache": None}
    return run(replace(load(str(config)), KNOBS | here))


def start_pair(config: Path, root: Path, *words: str, program: str | None = None) -> list[subprocess.Popen]:
    """The two processes of a run, told of each other by three environment variables; started by `program` instead of scripts.train."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    knobs = [str(word) for knob, value in KNOBS.items() for word in (f"--{knob}", value)]
    python, *rest = training(config, root, *knobs, *words)
    variables = {"JAX_COORDINATOR_ADDRESS": address, "JAX_NUM_PROCESSES": "2"}
    started = [python, *rest] if program is None else [python, "-c", program, *rest[2:]]
    return [start(started, **variables, JAX_PROCESS_ID=str(index)) for index in range(2)]


def ends(pair: list[subprocess.Popen], timeout: float = 120) -> list[tuple[int, str]]:
    """Exit status and words of each."""
    said = [process.communicate(timeout=timeout)[0] for process in pair]
    return [(process.returncode, words) for process, words in zip(pair, said, strict=True)]


def test_a_signal_at_one_process_ends_both_alike_and_one_process_goes_on(config, whole, tmp_path):
    """SIGUSR1, which Slurm sends ahead of the time limit, at process 1 alone: both finish the same step, save once and exit 75. One process
    on two devices continues from their checkpoint, and metrics.jsonl is that of one process throughout, to the byte: the same batches, the
    same program, and of two addends the sum is the same in either order."""
    directory = tmp_path / "run"
    pair = start_pair(config, tmp_path)
    wait_for(pair[0], lambda: (directory / "metrics.jsonl").exists() and len(lines_of_started(directory)) >= 5, timeout=240)
    pair[1].send_signal(signal.SIGUSR1)
    (first, said), (second, other) = ends(pair)
    assert (first, second) == (75, 75), said + other
    summary = strict_json((directory / "summary.json").read_text())
    assert summary["status"] == "preempted" and 5 <= summary["step"] < STEPS
    assert len(lines_of(directory)) == summary["step"] == max(saved(directory))
    assert "preempted at step" in said and "preempted at step" not in other
    assert strict_json((directory / "conditions.json").read_text())["processes"] == 2
    assert len(list(directory.glob("events.out.tfevents.*"))) == 1
    assert (whole / "metrics.jsonl").read_bytes().startswith((directory / "metrics.jsonl").read_bytes())
    assert run_here(config, tmp_path, resume=True) == 0
    assert (directory / "metrics.jsonl").read_bytes() == (whole / "metrics.jsonl").read_bytes()


def test_two_processes_go_on_from_one_and_end_soon_when_one_is_killed(config, whole, tmp_path):
    """From the checkpoint of one process two go on, to the byte as it did. When one of them is killed, the other ends within a minute, with
    a status that is not zero, a line that says why, and no traceback."""
    shutil.copytree(whole, tmp_path / "run")
    directory = tmp_path / "run"
    for step in saved(directory):
        if step > min(saved(directory)):
            shutil.rmtree(directory / "checkpoints" / str(step))
    begin = min(saved(directory))
    pair = start_pair(config, tmp_path, "--run.resume")
    resumed = lambda: "resumed" in (directory / "conditions.json").read_text() and begin + 5 <= len(lines_of_started(directory)) < STEPS
    wait_for(pair[0], resumed, timeout=240)
    pair[1].kill()
    killed = time.monotonic()
    (status, said), _ = ends(pair)
    assert time.monotonic() - killed < 60 and status not in (0, 75), said
    assert "process 0 of 2" in said and "Traceback" not in said, said
    assert (whole / "metrics.jsonl").read_bytes().startswith((directory / "metrics.jsonl").read_bytes())


def test_both_refuse_what_process_0_refuses(config, whole, tmp_path):
    """A directory that holds this run, and no --run.resume: process 0 says so, both end with status 2, and neither waits for the other."""
    shutil.copytree(whole, tmp_path / "run")
    (first, said), (second, other) = ends(start_pair(config, tmp_path))
    assert (first, second) == (2, 2), said + other
    assert said.count("--run.resume") == 1 and "error:" not in other and "Traceback" not in said + other
    assert (tmp_path / "run" / "metrics.jsonl").read_bytes() == (whole / "metrics.jsonl").read_bytes()


ONE_CANNOT_READ = """
import errno, os, runpy
import orbax.checkpoint as ocp

def at(process, place, handler, change):
    original = handler.restore

    def restore(self, directory, *arguments, **named):
        found = original(self, directory, *arguments, **named)
        return change(found) if os.environ["JAX_PROCESS_ID"] == process and str(directory).endswith(place) else found

    handler.restore = restore

def fail(_):
    raise OSError(errno.EIO, os.strerror(errno.EIO))

at("1", "300/digests", ocp.JsonCheckpointHandler, fail)
at("1", "250/state", ocp.StandardCheckpointHandler, fail)
at("0", "200/digests", ocp.JsonCheckpointHandler, lambda found: found | {"step": "0"})
runpy.run_module("scripts.train", run_name="__main__", alter_sys=True)
"""


def test_what_one_process_cannot_read_none_goes_on_from(config, whole, tmp_path):
    """The newest checkpoint has digests that process 1 cannot read, the one before arrays that it cannot read, and in the one before that
    process 0 finds an array changed: both go on from the fourth, after a line for each of the others, to the byte as one process did."""
    shutil.copytree(whole, tmp_path / "run")
    (first, said), (second, other) = ends(start_pair(config, tmp_path, "--run.resume", program=ONE_CANNOT_READ))
    assert (first, second) == (0, 0), said + other
    told = [line for line in said.splitlines() if "is damaged" in line]
    assert [line.split()[1] for line in told] == ["checkpoints/300", "checkpoints/250", "checkpoints/200"]
    assert all("Input/output error (at process 1 of 2)" in line for line in told[:2]) and "array step does not match" in told[2]
    conditions = strict_json((tmp_path / "run" / "conditions.json").read_text())
    assert [entry["step"] for entry in conditions["resumed"]] == [150]
    assert (tmp_path / "run" / "metrics.jsonl").read_bytes() == (whole / "metrics.jsonl").read_bytes()


def lines_of_started(directory: Path) -> list[str]:
    return (directory / "metrics.jsonl").read_text().splitlines()


def saved(directory: Path) -> list[int]:
    return [int(path.name) for path in (directory / "checkpoints").iterdir() if path.name.isdigit()]
