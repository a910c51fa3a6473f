"""The floors of the house: what each may import, and how large a room may be."""

import ast
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FLOORS = ("configs", "models", "train", "scripts", "tests")
FILES = {floor: sorted((ROOT / floor).rglob("*.py")) for floor in FLOORS}
EVERY = [path for paths in FILES.values() for path in paths]
LINES = 320  # "over about 300 lines wants a second room"

ARRAYS = {"jax", "flax", "numpy", "jaxtyping"}
FILES_OF_MODELS = {"safetensors", "ml_dtypes"}  # in models/huggingface alone: a published checkpoint is a part of a model's contract


def names(path: Path) -> str:
    return str(path.relative_to(ROOT))


def imported(path: Path) -> set[str]:
    """Top-level packages that a file imports, anywhere in it; "." for a relative import."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found.add("." if node.level else node.module.split(".")[0])
    return found


def test_every_floor_is_looked_at():
    """The files of the two lower floors are found (so that the tests below cannot pass on nothing)."""
    assert {"schema.py", "load.py"} <= {path.name for path in FILES["configs"]}
    assert {"norms.py", "dense.py"} <= {path.name for path in FILES["models"]}


@pytest.mark.parametrize("path", FILES["configs"], ids=names)
def test_configs_need_the_standard_library_alone(path):
    """A config imports the standard library and other configs."""
    assert imported(path) <= sys.stdlib_module_names | {"configs"}


@pytest.mark.parametrize("path", FILES["models"], ids=names)
def test_models_know_no_optimiser_and_no_files(path):
    """The model floor imports jax, flax, numpy, jaxtyping and configs: no optimiser, checkpoint, log or data library."""
    extra = FILES_OF_MODELS if path.parent.name == "huggingface" else set()
    assert imported(path) <= sys.stdlib_module_names | ARRAYS | extra | {"configs", "models"}


@pytest.mark.parametrize("path", [path for floor in FLOORS[:-1] for path in FILES[floor]], ids=names)
def test_nobody_looks_up(path):
    """Nobody imports scripts or tests; imports name their module in full."""
    assert not imported(path) & {"scripts", "tests", "."}


@pytest.mark.parametrize("path", EVERY, ids=names)
def test_rooms_are_small(path):
    """A file is one room of about 300 lines at most."""
    assert len(path.read_text().splitlines()) <= LINES
