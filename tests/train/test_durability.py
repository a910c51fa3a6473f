"""What is on the disk when a checkpoint begins: all that a run continued from it will not write again."""

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
