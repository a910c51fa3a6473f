"""The reference checkpoints, and altered copies of them."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from configs.model import Model
from models.huggingface.checkpoint import CONFIG, WEIGHTS, family_of, from_keys

ROOT = Path(__file__).parents[3]
FOLDERS = {path.parent.name: path.parent for path in sorted((ROOT / "tests" / "data" / "parity").glob(f"*/{CONFIG}"))}
"""Compact copies by name: config, checkpoint, ids and float64 logits."""
COMPLETE = ROOT.parent / "shared" / "parity"
"""The same with every array, where they are at hand."""
where_complete = pytest.mark.skipif(not COMPLETE.is_dir(), reason="the reference checkpoints with every array are not at hand")
LEGACY = [name for name, folder in FOLDERS.items() if (folder / "config_legacy.json").exists()]

ABSENT = object()
"""In the place of a key's value: the key is taken out."""


def keys_of(name: str, file: str = CONFIG) -> dict[str, Any]:
    return json.loads((FOLDERS[name] / file).read_text())


def changed(keys: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """Keys with some values changed; "rope_parameters.factor" is a key inside another, ABSENT takes one out."""
    keys = json.loads(json.dumps(keys))
    for path, value in changes.items():
        *outer, last = path.split(".")
        inner = keys
        for key in outer:
            inner = inner[key]
        if value is ABSENT:
            inner.pop(last, None)
        else:
            inner[last] = value
    return keys


def model_of(keys: dict[str, Any]) -> Model:
    return from_keys(family_of(keys["model_type"]), keys)


def copy(name: str, to: Path, keys: dict[str, Any] | None = None, tensors=None) -> Path:
    """A copy of a folder with some keys of its config changed, and its tensors as `tensors(dictionary)` makes them."""
    folder = to / name
    shutil.copytree(FOLDERS[name], folder, copy_function=shutil.copyfile)
    if keys:
        (folder / CONFIG).write_text(json.dumps(changed(keys_of(name), keys)))
    if tensors:
        store(folder / WEIGHTS, tensors(load_file(folder / WEIGHTS)))
    return folder


def store(file: Path, tensors: dict[str, np.ndarray]) -> None:
    save_file({name: np.ascontiguousarray(tensor) for name, tensor in tensors.items()}, file, metadata={"format": "pt"})


def header(file: Path) -> dict[str, tuple]:
    """The (type, shape) of each tensor of a file."""
    with file.open("rb") as stream:
        size = int.from_bytes(stream.read(8), "little")
        held = json.loads(stream.read(size))
    return {name: (of["dtype"], tuple(of["shape"])) for name, of in held.items() if name != "__metadata__"}
