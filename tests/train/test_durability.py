"""What is on the disk when a checkpoint begins: all that a run continued from it will not write again; and what a long run holds on to."""

import os

import pytest

from tests.train.small import small, text_of
from train.checkpoint import Checkpoints
from train.log import Log
from train.loop import run


def test_a_checkpoint_waits_for_every_step_before_it_to_be_on_the_disk(tmp_path, monkeypatch):
    """Before the save of step s begins, steps 0 to s - 1 are written and then flushed, events too: a kill from then on loses no point."""
    (tmp_path / "text.txt").write_text(text_of(4000))
    calls: list[tuple] = []

    def watched(kind: type, name: str, note) -> None:
        original = getattr(kind, name)
        monkeypatch.setattr(kind, name, lambda self, *arguments: (calls.append(note(*arguments)), original(self, *arguments))[1])

    watched(Log, "write", lambda step, values: ("write", step))
    watched(Log, "flush", lambda: ("flush",))
    watched(Checkpoints, "save", lambda step, *rest: ("save", step))
    knobs = {"data.source": str(tmp_path / "text.txt"), "train.steps": 9, "checkpoint.every": 4, "instruments.every": None,
             "instruments.probe_every": None, "run.root": str(tmp_path), "run.name": "run", "run.progress": False,
             "run.compilation_cache": None}
    assert run(small(knobs)) == 0
    saves = [index for index, call in enumerate(calls) if call[0] == "save"]
    assert [calls[index] for index in saves] == [("save", 4), ("save", 8), ("save", 9)]
    for index in saves:
        assert calls[index - 1] == ("flush",)
        assert [call[1] for call in calls[:index] if call[0] == "write"] == list(range(calls[index][1]))


@pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="open files are counted as Linux tells them")
def test_a_long_run_grows_by_its_lines_alone(tmp_path, monkeypatch):
    """Over 600 steps with panels, evaluations and checkpoints, open files between two saves stay as many as they were, and the record
    grows evenly: by as many bytes in the last 200 steps as in the 200 before, to 5 %, and by less than 2 kB a step on two layers, events
    included."""
    (tmp_path / "text.txt").write_text(text_of(4000))
    sizes, files = [], []

    def write(log, step, values, original=Log.write):
        line = original(log, step, values)
        if step % 200 == 0:
            log.events.flush()
            sizes.append(sum(path.stat().st_size for path in (tmp_path / "run").iterdir() if path.name.startswith(("metrics", "events"))))
        return line

    def finish(checkpoints, report=None, original=Checkpoints.finish):
        original(checkpoints, report)
        files.append(len(os.listdir("/proc/self/fd")))

    monkeypatch.setattr(Log, "write", write)
    monkeypatch.setattr(Checkpoints, "finish", finish)
    knobs = {"data.source": str(tmp_path / "text.txt"), "train.steps": 601, "checkpoint.every": 100, "checkpoint.keep": 2,
             "eval.every": 100, "eval.batches": 1, "instruments.every": 20, "instruments.probe_every": None,
             "run.root": str(tmp_path), "run.name": "run", "run.progress": False, "run.compilation_cache": None}
    assert run(small(knobs)) == 0
    assert len(files) >= 6 and max(files[2:]) <= files[1], files  # the second save is the first after one
    assert sizes[3] - sizes[2] == pytest.approx(sizes[2] - sizes[1], rel=0.05)
    assert sizes[3] / 600 < 2000
