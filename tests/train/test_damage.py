"""Checkpoints that are damaged, made to be wrong, or find no room: what is sound stays, and comes back."""

import errno
import os
import pickle
import shutil
from pathlib import Path

import orbax.checkpoint as ocp
import pytest

from configs.load import UserError
from tests.train.small import small
from tests.train.test_checkpoint import files, restore, same
from train.checkpoint import Checkpoints, SaveError

pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
"""orbax leaves coroutines unawaited where a read fails."""


def test_a_damaged_checkpoint_makes_way(saved, plan, states, tmp_path):
    """The step of a checkpoint that was passed over is saved again, and the damaged one is set aside, whole: it counts neither as the
    latest nor as the best, so that with one checkpoint kept the sound one stays."""
    folder = tmp_path / "checkpoints"
    shutil.copytree(saved, folder)
    shutil.rmtree(folder / "2" / "state")
    checkpoints = Checkpoints(folder, small({"checkpoint.keep": 1}))
    step, state = checkpoints.restore(plan.shapes(), lambda line: None)
    assert step == 1 and checkpoints.steps() == [1] and (folder / "2.damaged" / "digests").is_dir()
    checkpoints.save(2, states[2], None)
    checkpoints.finish()
    checkpoints.close()
    (step, state), told = restore(folder, plan)
    assert step == 2 and same(state, states[2]) and told == []


def test_who_only_reads_moves_nothing(saved, plan, tmp_path):
    """A source of parameters is read beside its damage: nothing in it is renamed."""
    folder = tmp_path / "checkpoints"
    shutil.copytree(saved, folder)
    (folder / "2" / "digests" / "metadata").write_bytes(b"")
    before = sorted(path.relative_to(folder) for path in folder.rglob("*"))
    checkpoints = Checkpoints(folder, plan.config, read_only=True)
    assert checkpoints.restore(plan.shapes(), lambda line: None)[0] == 1
    checkpoints.close()
    assert sorted(path.relative_to(folder) for path in folder.rglob("*")) == before


def test_a_record_that_is_not_what_it_was_is_noticed(plan, states, tmp_path):
    """A checkpoint before whose step metrics.jsonl has changed is passed over like a damaged one; where none is compared it is read."""
    checkpoints = Checkpoints(tmp_path / "checkpoints", plan.config)
    for step in (1, 2):
        checkpoints.save(step, states[step], None, f"digest of {step}")
    checkpoints.finish()
    told = []
    assert checkpoints.restore(plan.shapes(), told.append, lambda step: "digest of 1")[0] == 1
    assert len(told) == 1 and "checkpoints/2" in told[0] and "metrics.jsonl" in told[0]
    checkpoints.close()
    assert restore(tmp_path / "checkpoints", plan)[0][0] == 1


def no_room(*_, **__):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


class Disk:
    """Ways for a disk to be full, each with how it is freed."""

    def before_a_save(self, patch) -> None:
        patch.setattr(shutil, "disk_usage", lambda folder: shutil._ntuple_diskusage(10**9, 10**9, 0))

    def in_the_middle(self, patch) -> None:
        patch.setattr(ocp.StandardCheckpointHandler, "finalize", no_room)


@pytest.mark.parametrize("when", ["before_a_save", "in_the_middle"])
def test_a_full_disk_costs_its_own_save_alone(when, saved, plan, states, tmp_path):
    """A save that finds no room is told in one line and leaves nothing half written; the checkpoint before it stays usable, and the next
    save is written as soon as there is room."""
    folder = tmp_path / "checkpoints"
    shutil.copytree(saved, folder)
    checkpoints, told = Checkpoints(folder, plan.config), []
    with pytest.MonkeyPatch.context() as patch:
        getattr(Disk(), when)(patch)
        checkpoints.save(3, states[3], None, report=told.append)
        checkpoints.finish(told.append)
        with pytest.raises(SaveError, match="step 2 is untouched"):
            checkpoints.save(3, states[3], None)
            checkpoints.finish()
    assert len(told) == 1 and "\n" not in told[0] and "cannot be written" in told[0] and "step 2 is untouched" in told[0]
    assert sorted(path.name for path in folder.iterdir()) == ["1", "2"]
    (step, state), _ = restore(folder, plan)
    assert step == 2 and same(state, states[2])
    checkpoints.save(4, states[3], None)
    checkpoints.finish()
    checkpoints.close()
    (step, state), _ = restore(folder, plan)
    assert step == 4 and same(state, states[3])


NESTED = b'{"a":' * 10**5
HOSTILE = {
    "a link to itself": lambda folder: (folder / "3").symlink_to(folder / "3"),
    "a link to its own folder": lambda folder: (folder / "3").symlink_to(folder),
    "a file": lambda folder: (folder / "3").write_text("x"),
    "an empty folder": lambda folder: (folder / "3").mkdir(),
    "a number beyond 64 bits": lambda folder: (folder / str(10**30)).mkdir(),
    "metrics of another writer": lambda folder: shutil.copytree(folder / "2" / "digests", folder / "2" / "metrics") and
    (folder / "2" / "metrics" / "metadata").rename(folder / "2" / "metrics" / "metrics").write_text("["),
    "nested digests": lambda folder: (folder / "2" / "digests" / "metadata").write_bytes(NESTED),
    "digests of another kind": lambda folder: (folder / "2" / "digests" / "metadata").write_text("[1]"),
    "nested metadata": lambda folder: (folder / "2" / "_CHECKPOINT_METADATA").write_bytes(NESTED),
    "nested metadata of arrays": lambda folder: (folder / "2" / "state" / "_METADATA").write_bytes(NESTED),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_a_hostile_directory_ends_in_a_line(case, saved, plan, states, tmp_path):
    """Links in circles, strange names and nesting without end: an exact state comes back, or one line says what is wrong."""
    folder = tmp_path / "checkpoints"
    shutil.copytree(saved, folder)
    HOSTILE[case](folder)
    try:
        (step, state), told = restore(folder, plan)
    except UserError as error:
        assert str(folder) in str(error) and "\n" not in str(error)
    else:
        assert same(state, states[step]) and (step == 2 or len(told) == 1)


def test_no_pickle_is_read_from_a_checkpoint(saved, plan, states, tmp_path):
    """A pickle in the place of any file of a checkpoint is damage like any other: what it would do is not done."""
    class Trap:
        def __reduce__(self):
            return Path.touch, (tmp_path / "executed",)

    folder = tmp_path / "checkpoints"
    shutil.copytree(saved, folder)
    for name in files(folder / "2"):
        (folder / "2" / name).write_bytes(pickle.dumps(Trap()))
    (step, state), told = restore(folder, plan)
    assert step == 1 and same(state, states[1]) and len(told) == 1
    assert not (tmp_path / "executed").exists()
