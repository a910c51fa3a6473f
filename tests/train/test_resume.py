"""Kill -9 at any moment: the bytes on the disk at 25 moments of one run, each continued to the same end.

A killed process leaves what the system was given, no more: a copy of the run directory is that. It is taken while the main thread stands
still; what orbax writes in the background may be copied half, as a kill would leave it.
"""

import contextlib
import dataclasses
import shutil
from pathlib import Path

import numpy as np
import orbax.checkpoint as ocp
import pytest

from configs.knobs import replace
from configs.load import UserError
from tests.train.processes import strict_json
from tests.train.small import small, text_of
from tests.train.test_loop import arrays, shown
from train import directory as run_directory
from train import loop
from train.checkpoint import Checkpoints, Preserved
from train.log import METRICS, Log
from train.programs import Program, Programs

STEPS = 12
MOMENTS = {  # kind: how often it comes in a run, how often it is killed there
    "config.json half written": (1, 1),
    "before conditions.json": (1, 1),
    "in a step": (STEPS, 3),
    "in a probe": (3, 2),
    "in an evaluation": (4, 2),
    "before a line": (STEPS + 1, 2),
    "in a line": (STEPS + 1, 3),
    "after the flush": (5, 1),
    "before a save": (4, 1),
    "in a save": (4, 3),
    "before the commit": (4, 3),
    "after the commit": (4, 2),
    "after the last save": (1, 1),
}


class Copies:
    """Copies of a run directory, each taken at a chosen call of a kind."""

    def __init__(self, directory: Path, to: Path):
        draw = np.random.default_rng(0)
        self.directory, self.to, self.calls = directory, to, dict.fromkeys(MOMENTS, 0)
        self.chosen = {(kind, int(call)) for kind, (of, count) in MOMENTS.items() for call in draw.choice(of, count, replace=False)}

    def take(self, kind: str, change=lambda copy: None) -> None:
        if (kind, self.calls[kind]) in self.chosen:
            copy = self.to / f"{kind} {self.calls[kind]}" / self.directory.name
            with contextlib.suppress(shutil.Error):  # a file that was moved meanwhile
                shutil.copytree(self.directory, copy)
            change(copy)
        self.calls[kind] += 1

    def before(self, kind: str, function):
        return lambda *arguments, **named: (self.take(kind), function(*arguments, **named))[1]

    def after(self, kind: str, function):
        return lambda *arguments, **named: (function(*arguments, **named), self.take(kind))[0]


def cut_the_last_line(copy: Path) -> None:
    lines = (copy / METRICS).read_bytes().splitlines(keepends=True)
    (copy / METRICS).write_bytes(b"".join(lines[:-1]) + lines[-1][: len(lines[-1]) // 2])


def half_claimed(copy: Path) -> None:
    (copy / run_directory.CONFIG).rename(copy / f"{run_directory.CONFIG}.new")


def watch(copies: Copies, patch: pytest.MonkeyPatch) -> None:
    """Puts the moments into the code."""

    def write(log, step, values, original=Log.write):
        copies.take("before a line")
        line = original(log, step, values)
        copies.take("in a line", cut_the_last_line)
        return line

    def call(program, *arguments, original=Program.__call__):
        found = original(program, *arguments)
        if program.name in ("quiet", "loud", "probe"):
            copies.take("in a probe" if program.name == "probe" else "in a step")
        return found

    def claim(config, original=run_directory.claim):
        found = original(config)
        copies.take("config.json half written", half_claimed)
        return found

    manager = ocp.CheckpointManager
    patch.setattr(Log, "write", write)
    patch.setattr(Log, "flush", copies.after("after the flush", Log.flush))
    patch.setattr(Program, "__call__", call)
    patch.setattr(Programs, "evaluate", copies.after("in an evaluation", Programs.evaluate))
    patch.setattr(run_directory, "claim", claim)
    patch.setattr(run_directory, "describe", copies.before("before conditions.json", run_directory.describe))
    patch.setattr(Checkpoints, "save", copies.before("before a save", Checkpoints.save))
    patch.setattr(Preserved, "should_preserve", copies.after("in a save", Preserved.should_preserve))
    patch.setattr(manager, "_finalize", copies.after("after the commit", copies.before("before the commit", manager._finalize)))
    patch.setattr(Checkpoints, "close", copies.after("after the last save", Checkpoints.close))


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """(config, directory, folder of copies) of an uninterrupted run, copied at 25 moments."""
    root = tmp_path_factory.mktemp("runs")
    (root / "text.txt").write_text(text_of(4000))
    config = small({
        "data.source": str(root / "text.txt"), "train.steps": STEPS, "instruments.every": 3, "instruments.probe_every": 5, "eval.every": 4,
        "eval.batches": 2, "checkpoint.every": 3, "checkpoint.keep": 2, "run.root": str(root), "run.name": "run", "run.progress": False,
        "run.compilation_cache": None})
    copies = Copies(root / "run", root / "copies")
    with pytest.MonkeyPatch.context() as patch:
        watch(copies, patch)
        assert loop.run(config) == 0
    assert copies.calls == {kind: of for kind, (of, _) in MOMENTS.items()}
    return config, root / "run", sorted((root / "copies").iterdir())


def test_killed_at_25_moments_a_run_comes_to_the_same_end(whole):
    """From the bytes of each moment the run goes on to the same metrics.jsonl to the byte, the same parameters and optimiser state to the
    bit; TensorBoard shows each step once, and no line is there twice."""
    config, directory, copies = whole
    expected, lines = arrays(directory, STEPS), (directory / METRICS).read_bytes()
    assert len(copies) == 25
    continued = set()
    for copy in copies:
        there = sorted(int(path.name) for path in (copy / "run" / "checkpoints").glob("*") if path.name.isdigit())
        continued.add(there[-1] if there else 0)
        run = dataclasses.replace(config.run, root=str(copy), resume=True)
        assert loop.run(dataclasses.replace(config, run=run)) == 0, copy.name
        assert (copy / "run" / METRICS).read_bytes() == lines, copy.name
        found = arrays(copy / "run", STEPS)
        assert found.keys() == expected.keys() and len(found) > 20
        assert all(found[name].tobytes() == expected[name].tobytes() for name in found), copy.name
        assert shown(copy / "run", "train/loss") == list(range(STEPS)), copy.name
        assert shown(copy / "run", "grad_norm/layer_01") == list(range(0, STEPS, 3)), copy.name
        assert shown(copy / "run", "eval/loss") == [0, 4, 8, 12], copy.name
        assert not list((copy / "run" / "checkpoints").glob("*tmp*")), copy.name
    assert continued >= {0, 3, 6, 9}


def flip(path: Path, at: float) -> None:
    """Flips a bit of the byte at a share of a file."""
    content = bytearray(path.read_bytes())
    content[int(at * len(content))] ^= 0x01
    path.write_bytes(content)


def continue_copy(whole, to: Path, harm) -> Path:
    """The run of the fixture, harmed by `harm(directory)` and continued."""
    config, directory, _ = whole
    shutil.copytree(directory, to / "run")
    harm(to / "run")
    run = dataclasses.replace(config.run, root=str(to), resume=True)
    assert loop.run(dataclasses.replace(config, run=run)) == 0
    return to / "run"


def flip_late(directory: Path) -> None:
    """A digit of a number in the line of step 10: after the checkpoint of step 9, before that of step 12."""
    lines = (directory / METRICS).read_bytes().splitlines(keepends=True)
    at = lines[10].index(b'"train/loss": ') + len(b'"train/loss": ') + 3
    lines[10] = lines[10][:at] + bytes([lines[10][at] ^ 1]) + lines[10][at + 1:]
    (directory / METRICS).write_bytes(b"".join(lines))


HARMED_LINES = {  # how, and whether the newest checkpoint has lost the lines before it
    "a half-written last line": (cut_the_last_line, False),
    "a quarter of it": (lambda directory: (cut_the_last_line(directory), cut_the_last_line(directory)), False),
    "a bit of a number": (flip_late, True),
    "a byte that is no text": (lambda directory: flip_late(directory) or (directory / METRICS).write_bytes(
        (directory / METRICS).read_bytes()[:-5] + b"\xff\xfe\n"), True),
}


@pytest.mark.parametrize("harm", HARMED_LINES)
def test_harmed_lines_are_written_anew(harm, whole, tmp_path, capsys):
    """Whatever happens to the lines of metrics.jsonl after the last sound checkpoint, a continued run has every line as it was; where lines
    before a checkpoint have changed, even by one bit of a number, it goes back to the checkpoint before them and says so."""
    change, earlier = HARMED_LINES[harm]
    directory = continue_copy(whole, tmp_path, change)
    assert (directory / METRICS).read_bytes() == (whole[1] / METRICS).read_bytes()
    told = capsys.readouterr().err
    assert ("checkpoints/12 is damaged" in told and METRICS in told) == earlier
    assert (directory / "checkpoints" / "12.damaged").is_dir() == earlier
    found, expected = arrays(directory, STEPS), arrays(whole[1], STEPS)
    assert all(found[name].tobytes() == expected[name].tobytes() for name in expected)


@pytest.mark.parametrize("harm", ["emptied", "removed", "a bit of the first line"])
def test_lines_that_no_checkpoint_can_bring_back_end_the_run(harm, whole, tmp_path):
    """Where lines from before every checkpoint are lost or changed, the run is not continued with a hole in its record: it ends with a
    line, and nothing changes."""
    harms = {"emptied": lambda path: path.write_bytes(b""), "removed": Path.unlink,
             "a bit of the first line": lambda path: flip(path, 0.001)}
    before = sorted(path.name for path in (whole[1] / "checkpoints").iterdir())
    with pytest.raises(UserError, match="checkpoints are damaged; nothing was changed"):
        continue_copy(whole, tmp_path, lambda directory: harms[harm](directory / METRICS))
    assert sorted(path.name for path in (tmp_path / "run" / "checkpoints").iterdir()) == before


HOSTILE_JSON = {
    "emptied": b"", "half": b'{"host": "a', "no text": b"\xff\xfe\x00", "nested": b'{"resumed":' * 10**5, "a list": b"[]",
    "of another kind": b'{"resumed": 3}',
}


@pytest.mark.parametrize("harm", HOSTILE_JSON)
def test_a_damaged_conditions_file_is_written_anew(harm, whole, tmp_path, capsys):
    """conditions.json is told to be damaged and written anew; the run goes on."""
    directory = continue_copy(whole, tmp_path, lambda directory: (directory / "conditions.json").write_bytes(HOSTILE_JSON[harm]))
    told = capsys.readouterr()
    assert ("conditions.json cannot be read" in told.out + told.err) == (harm != "of another kind")
    found = strict_json((directory / "conditions.json").read_text())
    assert [entry["step"] for entry in found["resumed"]] == [STEPS]


@pytest.mark.parametrize("harm", [*HOSTILE_JSON, "a bit", "removed"])
def test_a_damaged_config_file_ends_the_run(harm, whole, tmp_path):
    """A config.json that is damaged, gone, or differs in one bit is told by its path or its knob, in two lines at most."""
    def change(directory: Path) -> None:
        path = directory / "config.json"
        text = path.read_text()
        path.write_bytes(HOSTILE_JSON.get(harm, text.replace('"width": 16', '"width": 17').encode()))
        if harm == "removed":
            path.unlink()

    with pytest.raises(UserError, match=r"config\.json|model\.width = 17 there, 16 here|holds another config") as error:
        continue_copy(whole, tmp_path, change)
    assert len(str(error.value).splitlines()) <= 2


@pytest.mark.parametrize("answer", ["stop", "continue"])
def test_a_run_on_a_full_disk_does_as_it_is_told(answer, whole, tmp_path, monkeypatch, capsys):
    """train.on_save_error: a save that finds no room stops the run, or is told in one line and the run comes to the same end; either way
    the checkpoint before it is there, and the knob may be another when the run is continued."""
    config = dataclasses.replace(whole[0], run=dataclasses.replace(whole[0].run, root=str(tmp_path)))
    config = replace(config, {"train.on_save_error": answer})
    saved, original = [], Checkpoints.has_space

    def has_space(checkpoints, size):
        saved.append(size)
        if len(saved) == 2:
            monkeypatch.setattr(shutil, "disk_usage", lambda folder: original_usage(folder)._replace(free=0))
        try:
            return original(checkpoints, size)
        finally:
            monkeypatch.setattr(shutil, "disk_usage", original_usage)

    original_usage = shutil.disk_usage
    monkeypatch.setattr(Checkpoints, "has_space", has_space)
    if answer == "stop":
        with pytest.raises(UserError, match="disk is full"):
            loop.run(config)
        assert strict_json((tmp_path / "run" / "summary.json").read_text())["status"] == "failed"
        assert loop.run(replace(config, {"train.on_save_error": "continue", "run.resume": True})) == 0
    else:
        assert loop.run(config) == 0
        (line,) = [line for line in capsys.readouterr().err.splitlines() if "cannot be written" in line]
        assert "step 3 is untouched" in line
    assert (tmp_path / "run" / METRICS).read_bytes() == (whole[1] / METRICS).read_bytes()
    found, expected = arrays(tmp_path / "run", STEPS), arrays(whole[1], STEPS)
    assert all(found[name].tobytes() == expected[name].tobytes() for name in expected)
