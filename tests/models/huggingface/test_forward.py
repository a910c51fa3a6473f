"""The models of all reference checkpoints compute what the reference library computed."""

import filecmp

import numpy as np
import pytest

from models.huggingface.families import FAMILIES
from models.huggingface.parity import compare
from tests.models.huggingface.folders import COMPLETE, FOLDERS, keys_of, where_complete


def assert_logits_agree(name: str, dtype: str, within: float) -> None:
    """The logits of every case that the folder has are as close as that."""
    found, reference = compare(FOLDERS[name], dtype), np.load(FOLDERS[name] / "reference.npz")
    assert [row.case for row in found] == ["short", "long"][: 1 + ("long_input_ids" in reference)]
    assert all(row.site == "logits" and row.holds and row.largest < within for row in found), found


def test_every_family_has_a_reference():
    """A family without a reference checkpoint would be believed, not known."""
    assert {keys_of(name)["model_type"] for name in FOLDERS} == FAMILIES.keys() and len(FOLDERS) == 23


@pytest.mark.parametrize("name", FOLDERS)
def test_logits_agree_in_float32(name):
    """Within 5e-5 of the library's own in float64: its own float32 is up to 1.3e-5 off, a wrong convention moves logits by 5e-3."""
    assert_logits_agree(name, "float32", 5e-5)


@where_complete
@pytest.mark.parametrize("name", FOLDERS)
def test_the_compact_copy_is_the_reference(name):
    """Config and checkpoint are the same files; ids and float64 logits the same arrays."""
    files = [path.name for path in FOLDERS[name].iterdir() if path.name != "reference.npz"]
    assert filecmp.cmpfiles(FOLDERS[name], COMPLETE / name, files, shallow=False)[0] == files
    ours, theirs = np.load(FOLDERS[name] / "reference.npz"), np.load(COMPLETE / name / "reference.npz")
    for key in ours:
        np.testing.assert_array_equal(ours[key], theirs[key])
