"""Runs in processes: how they end, and that one that was stopped or killed goes on as if nothing had happened."""

import hashlib
import math
import shutil
import signal
from pathlib import Path

import numpy as np
import orbax.checkpoint as ocp
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tests.train.processes import finish, lines_of, start, strict_json, training, wait_for, write_config
from tests.train.small import text_of

STEPS = 24


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    """A config file that reads a dozen generated documents."""
    folder = tmp_path_factory.mktemp("config")
    (folder / "text").mkdir()
    for index in range(12):
        (folder / "text" / f"{index}.txt").write_text(text_of(2000, index))
    return write_config(folder, folder / "text")


@pytest.fixture(scope="module")
def whole(config, tmp_path_factory):
    """The directory of an uninterrupted run, and what it printed."""
    root = tmp_path_factory.mktemp("runs")
    done = finish(training(config, root))
    assert done.returncode == 0, done.stderr
    return root / "small", done


def summary(directory: Path) -> dict:
    return strict_json((directory / "summary.json").read_text())


def arrays(directory: Path, step: int) -> dict[str, np.ndarray]:
    """Every array of a checkpoint, as orbax alone reads it."""
    with ocp.StandardCheckpointer() as reader:
        return {name: np.asarray(x) for name, x in reader.restore((directory / "checkpoints" / str(step) / "state").absolute()).items()}


def assert_equal_runs(ours: Path, theirs: Path) -> None:
    """The same metrics.jsonl to the byte, and the same arrays in the last checkpoint to the bit."""
    assert (ours / "metrics.jsonl").read_bytes() == (theirs / "metrics.jsonl").read_bytes()
    a, b = arrays(ours, STEPS), arrays(theirs, STEPS)
    assert a.keys() == b.keys() and len(a) > 20
    assert all(a[name].dtype == b[name].dtype and a[name].tobytes() == b[name].tobytes() for name in a)


def shown(directory: Path, tag: str) -> list[int]:
    """The steps at which TensorBoard shows a tag."""
    return [event.step for event in EventAccumulator(str(directory), size_guidance={"scalars": 0}).Reload().Scalars(tag)]


SUMMARY = {"status", "step", "train_loss", "eval_loss", "best_eval_loss", "tokens_per_second", "step_seconds", "largest_attention_logit",
           "spike_score", "parameters", "flops_per_token"}
CONDITIONS = {"devices", "mesh", "dtype", "batch", "versions", "commit", "host", "start"}


def test_a_finished_run_leaves_its_record(whole, config):
    """A completed run ends with status 0, a summary and conditions with every key of the design, and a line for each step."""
    directory, done = whole
    found = summary(directory)
    assert found.keys() >= SUMMARY and found["status"] == "completed" and found["step"] == STEPS
    assert found["step_seconds"].keys() == {"p50", "p95", "p99"}
    assert found["parameters"]["total"] == sum(n for role, n in found["parameters"].items() if role != "total")
    assert found["eval_loss"] < math.log(256) and found["best_eval_loss"] <= found["eval_loss"]
    conditions = strict_json((directory / "conditions.json").read_text())
    assert conditions.keys() >= CONDITIONS and conditions["corpus"]["files"] == 12 and len(conditions["corpus"]["sha256"]) == 64
    lines = lines_of(directory)
    assert [line["step"] for line in lines] == list(range(STEPS + 1))
    assert [line["step"] for line in lines if "grad_norm" in line] == list(range(0, STEPS, 3))
    assert [line["step"] for line in lines if "eval/loss" in line] == [0, 8, 16, 24]
    assert [line["step"] for line in lines if "probe.grad_norm" in line] == [0, 8, 16, 24]
    assert found["eval_loss"] == lines[-1]["eval/loss"] and found["train_loss"] == lines[-2]["train/loss"]
    assert {path.name for path in directory.iterdir()} >= {"config.json", "conditions.json", "metrics.jsonl", "summary.json", "checkpoints"}
    assert "held-out loss" in done.stdout and "bigram entropy" in done.stdout and "tensorboard.main --logdir" in done.stdout
    assert shown(directory, "train/loss") == list(range(STEPS))


def test_the_clock_times_steps_alone(whole):
    """A step beside which a checkpoint, an evaluation or a probe ran has no time: a step's time is a step's."""
    timed = shown(whole[0], "clock/step_seconds")
    assert len(timed) >= STEPS // 3
    assert not [step for step in timed if step % 4 == 0]  # saves at multiples of 4, evaluations and probes at those of 8


def test_a_terminated_run_goes_on_bit_for_bit(config, whole, tmp_path):
    """SIGTERM finishes the step, saves, and exits 75; resumed, the run has the lines and the arrays of one that was never stopped."""
    directory = tmp_path / "small"
    process = start(training(config, tmp_path))
    wait_for(process, lambda: len(lines_of(directory)) >= 6)
    process.send_signal(signal.SIGTERM)
    out = process.communicate(timeout=60)[0]
    assert process.returncode == 75, out
    found = summary(directory)
    assert found["status"] == "preempted" and 6 <= found["step"] < STEPS
    saved = max(int(path.name) for path in (directory / "checkpoints").iterdir() if path.name.isdigit())
    assert saved == len(lines_of(directory)) == found["step"]  # the step in hand was finished, saved and written
    done = finish(training(config, tmp_path, "--run.resume"))
    assert done.returncode == 0, done.stderr
    assert_equal_runs(directory, whole[0])
    assert summary(directory)["status"] == "completed"
    assert shown(directory, "train/loss") == list(range(STEPS)) and shown(directory, "grad_norm/layer_01") == list(range(0, STEPS, 3))
    resumed = strict_json((directory / "conditions.json").read_text())["resumed"]
    assert [entry["step"] for entry in resumed] == [saved]


def saving(directory: Path) -> bool:
    return any(directory.glob("checkpoints/*orbax-checkpoint-tmp*"))


def kill_when(process, happening) -> None:
    """Kills the process at a moment at which `happening()` holds: it is stopped first, so that the moment cannot pass."""
    while True:
        wait_for(process, happening)
        process.send_signal(signal.SIGSTOP)
        if happening():
            break
        process.send_signal(signal.SIGCONT)
    process.kill()
    process.wait(60)
    process.stdout.close()


KILLS = {
    "in training": lambda directory: len(lines_of_started(directory)) >= 11,
    "during the first save": saving,
    "during a later save": lambda directory: (directory / "checkpoints" / "8").exists() and saving(directory),
}


def lines_of_started(directory: Path) -> list[str]:
    path = directory / "metrics.jsonl"
    return path.read_text().splitlines() if path.exists() else []


@pytest.mark.parametrize("moment", KILLS)
def test_a_killed_run_goes_on_bit_for_bit(moment, config, whole, tmp_path):
    """Killed in training or while a checkpoint is being written, a run continues from the newest sound checkpoint to the same end; and
    TensorBoard shows each step once, none of them missing."""
    directory = tmp_path / "small"
    kill_when(start(training(config, tmp_path)), lambda: KILLS[moment](directory))
    assert not (directory / "summary.json").exists() and (directory / "config.json").exists()
    done = finish(training(config, tmp_path, "--run.resume"))
    assert done.returncode == 0, done.stderr
    assert_equal_runs(directory, whole[0])
    assert shown(directory, "train/loss") == list(range(STEPS))


def test_an_interrupted_run_ends_with_130(config, tmp_path):
    """Ctrl-C finishes the step, saves, and exits 130 without a traceback."""
    process = start(training(config, tmp_path))
    wait_for(process, lambda: len(lines_of_started(tmp_path / "small")) >= 3)
    process.send_signal(signal.SIGINT)
    out = process.communicate(timeout=60)[0]
    assert process.returncode == 130 and "Traceback" not in out
    assert summary(tmp_path / "small")["status"] == "interrupted"


DIVERGENT = {"in the middle": (), "in the last update": ("--train.steps", "1", "--optim.warmup", "0", "--model.norm.placement", "none")}


@pytest.mark.parametrize("when", DIVERGENT)
def test_a_diverged_run_ends_with_3(when, config, tmp_path):
    """A loss that is not finite stops the run with status 3, the lines before it written, and a summary that is JSON."""
    done = finish(training(config, tmp_path, "--run.name", "wild", "--optim.learning-rate", "1e30", *DIVERGENT[when]))
    assert done.returncode == 3, done.stdout + done.stderr
    assert "Traceback" not in done.stderr and "diverged" in done.stdout
    assert summary(tmp_path / "wild")["status"] == "diverged"
    lines = lines_of(tmp_path / "wild")
    assert lines[0]["train/loss"] == pytest.approx(math.log(256), rel=0.05) and len(lines) < STEPS


def fingerprint(directory: Path) -> dict[str, str]:
    """The content of every file of a tree."""
    return {str(path): hashlib.sha256(path.read_bytes()).hexdigest() for path in directory.rglob("*") if path.is_file()}


REFUSED = {
    "another config": (("--optim.learning-rate", "0.5", "--run.resume"), r"optim.learning_rate = 0.003 there, 0.5 here"),
    "another model": (("--model.norm.placement", "sandwich"), r"model.norm.placement = 'pre' there, 'sandwich' here"),
    "the same without resume": ((), "--run.resume"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_held_directory_is_never_overwritten(case, config, whole, tmp_path):
    """A directory of another config is refused with the difference, one of this config with the way to continue it; nothing changes."""
    words, told = REFUSED[case]
    shutil.copytree(whole[0], tmp_path / "small")
    before = fingerprint(tmp_path)
    done = finish(training(config, tmp_path, "--run.name", "small", *words))
    assert done.returncode == 2 and told in done.stderr and "Traceback" not in done.stderr
    assert len(done.stderr.strip().splitlines()) <= 2 and fingerprint(tmp_path) == before


def test_a_foreign_directory_is_left_alone(config, tmp_path):
    """A directory that holds something else than a run is refused, and left as it is."""
    (tmp_path / "small").mkdir()
    (tmp_path / "small" / "thesis.tex").write_text("years of work")
    done = finish(training(config, tmp_path))
    assert done.returncode == 2 and "not empty" in done.stderr and "Traceback" not in done.stderr
    assert fingerprint(tmp_path).keys() == {str(tmp_path / "small" / "thesis.tex")}


def test_a_finished_run_resumed_stays_as_it_is(config, whole, tmp_path):
    """Resumed at its end, a run has nothing to do: status 0, the same lines, the same arrays."""
    shutil.copytree(whole[0], tmp_path / "small")
    done = finish(training(config, tmp_path, "--run.resume"))
    assert done.returncode == 0, done.stderr
    assert_equal_runs(tmp_path / "small", whole[0])
    assert shown(tmp_path / "small", "train/loss") == list(range(STEPS))
    assert summary(tmp_path / "small")["train_loss"] == summary(whole[0])["train_loss"]


FULL_DISK = """
import resource, runpy, signal, sys
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # a write beyond the limit fails with EFBIG, as one on a full disk does with ENOSPC
resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[1]), int(sys.argv[1])))
sys.argv = sys.argv[1:]
runpy.run_module("scripts.train", run_name="__main__")
"""
WIDE = ("--model.width", "64", "--instruments.every", "None", "--instruments.probe-every", "None", "--run.name", "wide",
        "--checkpoint.every", "8")


def test_a_save_that_cannot_be_written_loses_nothing(config, tmp_path):
    """Where the disk takes no more while a checkpoint is written, the run ends with status 2 and one line that names the folder; the
    checkpoint before is untouched, and the run goes on from it once there is room."""
    process = start(training(config, tmp_path, *WIDE))
    directory = tmp_path / "wide"
    wait_for(process, lambda: (directory / "checkpoints" / "8" / "commit_success.txt").exists() or len(lines_of_started(directory)) > 14)
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=60)
    assert process.returncode in (0, 75)
    before = fingerprint(directory / "checkpoints")
    words = training(config, tmp_path, *WIDE, "--run.resume")
    done = finish([words[0], "-c", FULL_DISK, str(100_000), *words[3:]])
    assert done.returncode == 2 and "Traceback" not in done.stderr, done.stderr
    (line,) = [line for line in done.stderr.splitlines() if "cannot be written" in line]
    assert "checkpoints" in line and "untouched" in line
    assert fingerprint(directory / "checkpoints").items() >= before.items()
    assert summary(directory)["status"] == "failed"
    done = finish([*words])
    assert done.returncode == 0 and summary(directory)["step"] == STEPS, done.stderr
