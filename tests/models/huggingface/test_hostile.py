"""Checkpoints made to be wrong: each ends in one line, and no file beside the directory is read. Other files are not read at all."""

import json
import pickle
import struct
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

from configs.load import UserError
from models.huggingface import load
from models.huggingface.checkpoint import CONFIG, INDEX, WEIGHTS, load_config
from tests.models.huggingface.folders import copy, keys_of
from train.convert import to_huggingface

NORM, UP = "model.norm.weight", "model.layers.1.mlp.up_proj.weight"


def refusal(folder: Path) -> str:
    with pytest.raises(UserError) as error:
        load(folder)
    told = str(error.value)
    assert "\n" not in told and len(told) < 1000
    return told


def with_header(folder: Path, change) -> None:
    """Changes the header of the weights: a text, or what `change` makes of the dictionary."""
    raw = (folder / WEIGHTS).read_bytes()
    (size,) = struct.unpack("<Q", raw[:8])
    held = json.loads(raw[8 : 8 + size])
    changed = change(held)
    text = (changed if isinstance(changed, str) else json.dumps(changed)).encode()
    (folder / WEIGHTS).write_bytes(struct.pack("<Q", len(text)) + text + raw[8 + size :])


def entry(**changes):
    return lambda held: held | {NORM: held[NORM] | changes}


HEADERS = {
    "an offset out of range": entry(data_offsets=[0, 2**62]),
    "an offset backwards": entry(data_offsets=[100, 0]),
    "a negative offset": entry(data_offsets=[-192, 0]),
    "the place of another tensor": lambda held: held | {NORM: held[NORM] | {"data_offsets": held[UP]["data_offsets"]}},
    "an absurd shape": entry(shape=[2**62]),
    "a shape that overflows": entry(shape=[2**33, 2**33]),
    "a negative shape": entry(shape=[-48]),
    "another number of elements": entry(shape=[49]),
    "a type that is none": entry(dtype="F99"),
    "a type of another size": entry(dtype="F64"),
    "NaN for a number": lambda held: json.dumps(held).replace("[48]", "[NaN]", 1),
    "nesting": lambda held: '{"a":' * 10**5,
    "no object": lambda held: "[]",
    "nothing": lambda held: "",
}


@pytest.mark.parametrize("case", HEADERS)
def test_a_hostile_header_is_told_by_its_file(case, tmp_path):
    """Sizes, offsets and types that cannot be end in a line with the file's name."""
    folder = copy("llama", tmp_path)
    with_header(folder, HEADERS[case])
    assert WEIGHTS in refusal(folder)


@pytest.mark.parametrize("size", [0, 2**20, 2**62, 2**64 - 1])
def test_a_header_of_absurd_size_is_told(size, tmp_path):
    """A header that would be larger than the file, or empty."""
    folder = copy("llama", tmp_path)
    raw = (folder / WEIGHTS).read_bytes()
    (folder / WEIGHTS).write_bytes(struct.pack("<Q", size) + raw[8:])
    assert WEIGHTS in refusal(folder)


SHAPES = {"a number": (), "too many dimensions": (1, 2, 3, 4, 2), "nothing": (0,), "nothing by much": (0, 48)}


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("name", "tensor"), [("llama", UP), ("phi3", "model.layers.0.mlp.gate_up_proj.weight"),
                                              ("gpt2", "transformer.h.0.attn.c_attn.bias")])
def test_a_tensor_of_strange_shape_is_told_by_its_name(name, tensor, shape, tmp_path):
    """Of any rank, of a fused tensor too."""
    folder = copy(name, tmp_path, tensors=lambda tensors: tensors | {tensor: np.zeros(SHAPES[shape], np.float32)})
    assert tensor in refusal(folder)


NAMES = ["../outside.safetensors", "/etc/passwd", "sub/a.safetensors", "..", "", "a.safetensors\0", "circle.safetensors", "model.pkl",
         "pytorch_model.bin", 3, None, ["a.safetensors"], {"a": 1}]


@pytest.mark.parametrize("name", NAMES, ids=repr)
def test_an_index_names_files_beside_it_alone(name, tmp_path):
    """A shard elsewhere, a link in circles, a pickle or no name at all is refused with the index or the shard; an outside file is not read
    even if it is a sound one."""
    folder = copy("llama", tmp_path)
    (folder / WEIGHTS).rename(tmp_path / "outside.safetensors")
    (folder / "circle.safetensors").symlink_to(folder / "circle.safetensors")
    (folder / INDEX).write_text(json.dumps({"weight_map": {NORM: name}}))
    told = refusal(folder)
    assert INDEX in told or "circle.safetensors" in told


@pytest.mark.parametrize("held", ["[]", '{"weight_map": []}', '{"weight_map": "a"}', '{"weight_map": null}', "[" * 10**5, "9" * 5000])
def test_an_index_of_another_kind_is_told(held, tmp_path):
    """An index that is no object, or whose weight map is none."""
    folder = copy("llama", tmp_path)
    (folder / INDEX).write_text(held)
    assert INDEX in refusal(folder)


def test_a_shard_may_be_a_link(tmp_path):
    """The reference library's cache keeps links to files elsewhere: that is no name that leads elsewhere."""
    folder = copy("llama", tmp_path)
    (folder / WEIGHTS).rename(tmp_path / "blob")
    (folder / WEIGHTS).symlink_to(tmp_path / "blob")
    load(folder)


ABSURD = (-1, 0, 10**9, 10**30, 1.5, float("nan"), float("inf"), "NaN", [], [[]], {}, {"a": {}}, None, True)


@pytest.mark.parametrize("value", ABSURD, ids=repr)
@pytest.mark.parametrize("name", ["llama", "gemma3_text", "gpt_oss", "qwen3_moe"])
def test_a_key_of_absurd_value_is_told(name, value, tmp_path):
    """Whichever key has a value without sense: the checkpoint is refused in one line, or the key changes no number."""
    folder = copy(name, tmp_path)
    keys = keys_of(name)
    for key in keys:
        (folder / CONFIG).write_text(json.dumps(keys | {key: value}))
        try:
            load_config(folder)
        except UserError as error:
            assert "\n" not in str(error) and len(str(error)) < 1000


def test_a_model_beyond_memory_is_told(tmp_path):
    """Sizes that no memory holds end in a line, before a tensor is read."""
    folder = copy("llama", tmp_path, keys={"hidden_size": 2**31 - 8, "intermediate_size": 2**31 - 8, "vocab_size": 2**31 - 8})
    assert "memory" in refusal(folder) or "config.json" in refusal(folder)


@pytest.fixture
def opened():
    """The paths that this process opens from Python while the test runs; an audit hook cannot be taken away, so it is only silenced."""
    paths: list[str] | None = []

    def listen(event: str, arguments: tuple) -> None:
        if event == "open" and paths is not None:
            paths.append(str(arguments[0]))

    sys.addaudithook(listen)
    yield paths
    paths = None


class Trap:
    """Executed where it is unpickled."""

    def __init__(self, sign: Path):
        self.sign = sign

    def __reduce__(self):
        return Path.touch, (self.sign,)


def test_tokenizers_code_and_pickles_are_not_read(tmp_path, opened):
    """Text is bytes here, and weights are safetensors: whatever else lies beside a checkpoint, nested, endless, a link in circles, code or
    a pickle, is neither opened nor executed, and what is converted from it holds none of it."""
    folder, sign = copy("llama", tmp_path), tmp_path / "executed"
    held = {"tokenizer.json": b"[" * 10**5, "tokenizer_config.json": b"9" * 5000, "special_tokens_map.json": b'{"a":' * 10**5,
            "tokenizer.model": b"\x80\x04\x95\xff" * 100, "generation_config.json": b"\0", "chat_template.jinja": b"{{ 1/0 }}"}
    code = f"from pathlib import Path; Path({str(sign)!r}).touch()".encode()
    held |= dict.fromkeys(("modeling_llama.py", "__init__.py", "setup.py", "config.py", "conftest.py"), code)
    held |= dict.fromkeys(("pytorch_model.bin", "training_args.bin", "optimizer.pt", "model.pkl"), pickle.dumps(Trap(sign)))
    for name, content in held.items():
        (folder / name).write_bytes(content)
    (folder / "vocab.json").symlink_to(folder / "merges.txt")
    (folder / "merges.txt").symlink_to(folder / "vocab.json")
    opened.clear()
    load(folder)
    with jax.numpy_dtype_promotion("standard"):
        assert to_huggingface(folder, tmp_path / "again", None) == "llama"
    names = {Path(path).name for path in opened if str(folder) in path}
    assert names == {CONFIG} and not sign.exists()
    assert {path.name for path in (tmp_path / "again").iterdir()} == {CONFIG, WEIGHTS}


def test_nothing_but_safetensors_is_read(tmp_path):
    """A directory with a pickle for weights has no weights."""
    folder = copy("llama", tmp_path)
    (folder / WEIGHTS).rename(folder / "pytorch_model.bin")
    assert f"{WEIGHTS} cannot be read" in refusal(folder)
