"""Checkpoints give back what was saved, or say that they cannot."""

import gc
import itertools
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as some

from configs.load import UserError
from tests.train.conftest import at
from tests.train.small import SAME, plan_of, small, tokens_of
from train.checkpoint import Checkpoints, digests
from train.step import make_evaluation

pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
"""orbax leaves coroutines unawaited where a read fails."""


@pytest.fixture(scope="module", autouse=True)
def collected():
    """What a failed read leaves behind warns when it is collected: before the next module."""
    yield
    gc.collect()


KEEP = {"checkpoint.keep": 3}


def same(ours, theirs) -> bool:
    pairs = zip(jax.tree.leaves(jax.device_get(ours)), jax.tree.leaves(jax.device_get(theirs)), strict=True)
    return all(a.dtype == b.dtype and a.tobytes() == b.tobytes() for a, b in pairs)


def restore(folder: Path, plan, report=None):
    """(what was restored, what was reported)."""
    told, checkpoints = [], Checkpoints(folder, plan.config)
    try:
        return checkpoints.restore(plan.shapes(), told.append if report is None else report), told
    finally:
        checkpoints.close()


def test_what_was_saved_comes_back_to_the_bit(saved, plan, states):
    """The newest checkpoint gives every array of its state back exactly, and without a word."""
    (step, state), told = restore(saved, plan)
    assert step == 2 and same(state, states[2]) and told == []
    assert jax.tree.structure(state) == jax.tree.structure(states[2])


def test_nothing_saved_is_nothing_restored(tmp_path, plan):
    """A new run has no checkpoint, which is no error."""
    assert restore(tmp_path / "checkpoints", plan) == (None, [])


def test_a_checkpoint_moves_to_another_mesh(saved, plan, states):
    """Saved on one device, a checkpoint comes back to the bit on eight, laid out as these want it."""
    cube = plan_of(small(KEEP | {"mesh.data": 2, "mesh.fsdp": 2, "mesh.tensor": 2}))
    (step, state), told = restore(saved, cube)
    assert step == 2 and same(state, states[2]) and told == []
    assert all(x.sharding == y.sharding for x, y in zip(jax.tree.leaves(state), jax.tree.leaves(cube.shapes()), strict=True))
    assert digests({"x": state.parameters["embed"]}) == digests({"x": states[2].parameters["embed"]})


def test_a_cubes_checkpoint_moves_to_a_row_and_to_one_device(tmp_path):
    """Saved on data 2 x fsdp 2 x tensor 2, a checkpoint comes back to the bit on eight shares and on one device, and its held-out loss is
    the same but for the order of the sums."""
    cube = plan_of(small(KEEP | {"mesh.data": 2, "mesh.fsdp": 2, "mesh.tensor": 2}))
    state, checkpoints = at(cube.fresh(), 1), Checkpoints(tmp_path / "checkpoints", cube.config)
    checkpoints.save(1, state, None)
    checkpoints.finish()
    checkpoints.close()
    loss = lambda plan, state: float(make_evaluation(plan)(state.parameters, tokens_of(plan.config, plan.mesh)))
    for mesh in ({"mesh.fsdp": 8}, {}):
        plan = plan_of(small(KEEP | mesh))
        (step, moved), told = restore(tmp_path / "checkpoints", plan)
        assert step == 1 and same(moved, state) and told == []
        assert loss(plan, moved) == pytest.approx(loss(cube, state), rel=SAME)


@settings(max_examples=30, deadline=None)
@given(data=some.data(), dtype=some.sampled_from([np.float32, np.int32, np.uint16]))
def test_one_flipped_bit_shows(data, dtype):
    """The digest of an array differs from that of the same array with any single bit flipped."""
    array = np.random.default_rng(0).integers(0, 256, 24 * np.dtype(dtype).itemsize).astype(np.uint8).view(dtype).reshape(4, 6)
    flipped = array.copy().view(np.uint8).reshape(-1)
    bit = data.draw(some.integers(0, flipped.size * 8 - 1))
    flipped[bit // 8] ^= 1 << (bit % 8)
    of = lambda x: digests({"x": jnp.asarray(x)})["x"]
    assert of(array) != of(flipped.view(dtype).reshape(4, 6)) and of(array) == of(array.copy()) and len(of(array)) == 16


def test_places_and_names_show():
    """Two elements exchanged, or two equal-shaped arrays exchanged, change the digests: not only what is there counts, but where."""
    x = np.arange(12, dtype=np.float32).reshape(3, 4)
    y = x.copy()
    y[0, 0], y[2, 1] = x[2, 1], x[0, 0]
    first, second = digests({"a": jnp.asarray(x), "b": jnp.asarray(y)}), digests({"a": jnp.asarray(y), "b": jnp.asarray(x)})
    assert len({*first.values(), *second.values()}) == 4
    assert digests({"a": jnp.asarray(x.T)})["a"] != first["a"]


def flip(path: Path, places: slice) -> None:
    """Flips a bit of the bytes at these places."""
    content = np.frombuffer(path.read_bytes(), np.uint8).copy()
    content[places] ^= 0x10
    path.write_bytes(content.tobytes())


def one_bit(share: float):
    return lambda path: flip(path, slice(int(share * path.stat().st_size), int(share * path.stat().st_size) + 1))


DAMAGES = {
    "a bit near the start": one_bit(0.1),
    "a bit in the middle": one_bit(0.5),
    "a bit near the end": one_bit(0.9),
    "a bit of every 16th byte": lambda path: flip(path, slice(None, None, 16)),
    "cut in half": lambda path: path.write_bytes(path.read_bytes()[: path.stat().st_size // 2]),
    "emptied": lambda path: path.write_bytes(b""),
    "removed": lambda path: path.unlink(),
}


def files(folder: Path) -> list[Path]:
    return sorted(path.relative_to(folder) for path in folder.rglob("*") if path.is_file() and path.stat().st_size)


def check_damage(damage: str, name: Path, saved: Path, folder: Path, plan, states) -> int:
    """Damages a file of the newest checkpoint; the step whose exact state came back all the same."""
    shutil.copytree(saved, folder)
    DAMAGES[damage](folder / "2" / name)
    (step, state), told = restore(folder, plan)
    assert same(state, states[step]), f"wrong numbers after {damage} of {name}"
    assert step == 2 or any("checkpoints/2" in line and "\n" not in line for line in told), f"{name}: {told}"
    shutil.rmtree(folder)
    return step


@pytest.mark.parametrize("damage", ["a bit of every 16th byte", "cut in half", "emptied", "removed"])
def test_damaged_arrays_are_noticed(damage, saved, plan, states, tmp_path):
    """Damage to the largest file of arrays of the newest checkpoint is named in one line, and the state before comes back exactly."""
    of_arrays = [name for name in files(saved / "2") if name.parent.name == "d"]
    largest = max(of_arrays, key=lambda name: (saved / "2" / name).stat().st_size)
    assert check_damage(damage, largest, saved, tmp_path / "checkpoints", plan, states) == 1


@pytest.mark.parametrize("damage", ["a bit in the middle", "cut in half", "emptied", "removed"])
def test_no_damaged_file_gives_wrong_numbers(damage, saved, plan, states, tmp_path):
    """Whichever file of the newest checkpoint is damaged, either its exact state comes back all the same, or it is named and the exact
    state of the one before comes back."""
    names = files(saved / "2")
    assert len(names) > 8
    for name in names:
        check_damage(damage, name, saved, tmp_path / "checkpoints", plan, states)


@pytest.mark.parametrize("item", ["config", "digests"])
def test_a_damaged_description_is_noticed(item, saved, plan, states, tmp_path):
    """Damage to the config or the digests beside the arrays is no other model and no end of the run: the checkpoint is passed over."""
    for damage in ("a bit in the middle", "a bit near the end", "emptied"):
        assert check_damage(damage, Path(item) / "metadata", saved, tmp_path / "checkpoints", plan, states) == 1


@pytest.mark.parametrize("item", ["state", "digests", "config"])
def test_an_item_that_is_missing_is_noticed(item, saved, plan, states, tmp_path):
    """A checkpoint without its arrays, its digests or its config is named and passed over."""
    folder = tmp_path / "checkpoints"
    shutil.copytree(saved, folder)
    shutil.rmtree(folder / "2" / item)
    (step, state), told = restore(folder, plan)
    assert step == 1 and same(state, states[1]) and "checkpoints/2" in told[0]


def test_all_damaged_is_the_users_to_know(saved, plan, tmp_path):
    """Where no checkpoint is sound, the run does not start anew over them: it ends with their number and place, and they stay."""
    folder = tmp_path / "checkpoints"
    shutil.copytree(saved, folder)
    for step in ("1", "2"):
        shutil.rmtree(folder / step / "digests")
    before = files(folder)
    with pytest.raises(UserError, match=rf"{folder}.*2 checkpoints are damaged"):
        restore(folder, plan)
    assert files(folder) == before


def test_a_checkpoint_of_another_model_is_refused_by_its_knobs(saved):
    """A checkpoint of another model is not taken for a damaged one: the knobs that differ are named with both values."""
    with pytest.raises(UserError, match=r"another model.*model\.depth = 2 there, 3 here"):
        restore(saved, plan_of(small({"model.depth": 3})))


def test_the_best_is_kept_beside_the_latest(plan, states, tmp_path):
    """Of six checkpoints the latest two and the one with the lowest held-out loss remain."""
    config = small({"checkpoint.keep": 2})
    checkpoints = Checkpoints(tmp_path / "checkpoints", config)
    losses = {1: 3.0, 2: 1.0, 3: 2.0, 4: None, 5: 2.5, 6: None}
    for step, loss in losses.items():
        checkpoints.save(step, states[1], None if loss is None else jnp.float32(loss))
    checkpoints.finish()
    assert checkpoints.steps() == [6, 5, 2]
    checkpoints.close()


def test_a_save_copies_before_the_step_goes_on(plan, states, tmp_path):
    """A state may be donated as soon as `save` returns: what is written is what it was then."""
    checkpoints = Checkpoints(tmp_path / "checkpoints", plan.config)
    state = jax.tree.map(jnp.copy, states[3])
    checkpoints.save(3, state, None)
    for leaf in jax.tree.leaves(state):
        leaf.delete()
    checkpoints.finish()
    checkpoints.close()
    (step, restored), told = restore(tmp_path / "checkpoints", plan)
    assert step == 3 and same(restored, states[3]) and told == []


def test_every_array_has_a_digest(plan, states):
    """Parameters, both moments, counters: no array of a state is without a digest, and no two have the same."""
    from train.checkpoint import named

    arrays = named(states[1])
    found = digests(arrays)
    assert found.keys() == arrays.keys() and len(arrays) == len(jax.tree.leaves(states[1]))
    assert all(a != b for a, b in itertools.combinations(found.values(), 2))
