"""`python -m scripts.convert` in both directions: the parameters are the same to the bit, and nothing is overwritten."""

import functools
import json

import jax
import numpy as np
import pytest

import scripts.convert
from configs.knobs import replace
from configs.load import UserError, from_json, load, to_json
from models.huggingface.canonical import differences
from models.huggingface.checkpoint import CONFIG, WEIGHTS
from models.parameters import table, values
from tests.models.huggingface.folders import FOLDERS, header
from tests.train.processes import strict_json
from tests.train.small import mesh_of, plan_of, small, text_of
from tests.train.sources import LLAMA, a_checkpoint, a_run, by_layer, values_of
from train.loop import run
from train.source import transformer_in

MODELS = {  # models as they are trained here: changes to the small experiment, and the family that holds each
    "pre": (LLAMA, "llama"),
    "sandwich": ({"model.norm.placement": "sandwich", "model.norm.scale": "1+w", "model.mlp.kind": "gelu_tanh", "model.mlp.gated": True,
                  "model.embedding_scale": 4.0}, "gemma2"),
    "reordered": (LLAMA | {"model.norm.placement": "reordered", "model.attention.qk_norm.kind": "whole"}, "olmo2"),
    "local and global": (LLAMA | {"model.attention.bias": ("q", "k", "v"), "model.pattern": ("", "attention.window=4")}, "qwen2"),
    "mixture": (LLAMA | {"model.moe.experts": 4, "model.moe.balance": 0.01}, "mixtral"),
}


@pytest.fixture(autouse=True)
def usual_promotion():
    """As in training: see tests/train/conftest.py."""
    with jax.numpy_dtype_promotion("standard"):
        yield


@pytest.fixture
def convert(call):
    """words to (exit status, what was printed)."""
    return functools.partial(call, scripts.convert)


def held(directory) -> dict[tuple, np.ndarray]:
    """The parameters of a directory by layer."""
    transformer = transformer_in(directory, mesh_of(), print)
    return by_layer(table(transformer), values(transformer))


def same(ours: dict, theirs: dict) -> bool:
    return ours.keys() == theirs.keys() and all(ours[key].tobytes() == theirs[key].tobytes() for key in ours)


@pytest.mark.parametrize("case", MODELS)
def test_there_and_back(case, tmp_path, convert):
    """A run becomes a checkpoint of the expected family and that a run directory again, with the run's parameters to the bit each time."""
    changes, family = MODELS[case]
    config = small(changes)
    expected = by_layer(plan_of(config).rows, values_of(config))
    a_run(tmp_path / "run", config)
    status, told = convert(tmp_path / "run", tmp_path / "there")
    assert status == 0 and f"as {family}: {tmp_path / 'there'}" in told, told
    assert json.loads((tmp_path / "there" / CONFIG).read_text())["model_type"] == family
    assert same(held(tmp_path / "there"), expected)
    status, told = convert(tmp_path / "there", tmp_path / "back")
    assert status == 0 and "as the checkpoint of step 0" in told, told
    assert same(held(tmp_path / "back"), expected)
    assert differences(config.model, load(str(tmp_path / "back" / CONFIG)).model) == {}


def test_a_converted_directory_is_a_run_that_goes_on(tmp_path, convert):
    """--run.resume continues it from step 0, and it becomes what a run that starts from the same source by init.from becomes."""
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "a.txt").write_text(text_of(4000))
    source = a_checkpoint(tmp_path / "there", small(LLAMA))
    back = tmp_path / "runs" / "back"
    assert convert(source, back)[0] == 0
    made = load(str(back / CONFIG))
    assert (made.run.root, made.run.name, made.init.from_) == (str(tmp_path / "runs"), "back", str(source))
    config = replace(made, {  # a run of one step on a small text, in place of the default one
        "train.steps": 1, "data.source": str(tmp_path / "text"), "data.sequence": 8, "data.batch": 4, "eval.every": 1, "eval.batches": 1,
        "instruments.every": None, "instruments.probe_every": None, "run.progress": False, "run.compilation_cache": None})
    (back / CONFIG).write_text(to_json(config))
    with pytest.raises(UserError, match=r"holds this run already: continue it with --run\.resume"):
        run(config)
    assert run(replace(config, {"run.resume": True})) == 0 == run(replace(config, {"run.name": "fresh"}))
    lines, fresh = ([strict_json(line) for line in (tmp_path / "runs" / name / "metrics.jsonl").read_text().splitlines()]
                    for name in ("back", "fresh"))
    assert [line["step"] for line in lines] == [0, 1] and [line["eval/loss"] for line in lines] == [line["eval/loss"] for line in fresh]
    assert same(held(back), held(tmp_path / "runs" / "fresh")) and not same(held(back), held(source))


def test_a_family_may_be_asked_for(tmp_path, convert):
    """--family writes as that family, which a pre-norm model without windows can be in several."""
    a_run(tmp_path / "run", small(LLAMA))
    assert convert(tmp_path / "run", tmp_path / "there", "--family", "mistral")[0] == 0
    names = header(tmp_path / "there" / WEIGHTS)
    assert json.loads((tmp_path / "there" / CONFIG).read_text())["model_type"] == "mistral" and "model.embed_tokens.weight" in names
    status, told = convert(tmp_path / "run", tmp_path / "other", "--family", "mistrl")
    assert status == 2 and "perhaps you meant 'mistral'" in told and not (tmp_path / "other").exists()


@pytest.mark.parametrize("direction", ["run", "checkpoint"])
def test_a_place_that_is_taken_is_refused(direction, tmp_path, convert):
    """A directory that holds something, and a file: status 2, one line, and everything as it was."""
    source = (a_run if direction == "run" else a_checkpoint)(tmp_path / "source", small(LLAMA))
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "mine").write_text("mine")
    for place in (tmp_path / "taken", tmp_path / "taken" / "mine"):
        status, told = convert(source, place)
        assert status == 2 and "not an empty directory" in told and told.count("\n") == 1, told
    assert [path.name for path in (tmp_path / "taken").iterdir()] == ["mine"] and (tmp_path / "taken" / "mine").read_text() == "mine"


REFUSED = {
    "a placement that no family has": (lambda folder: a_run(folder, small(LLAMA | {"model.norm.placement": "post"})),
                                       "no family can express this model; the nearest is"),
    "a vocabulary below 256": (lambda folder: FOLDERS["llama"], "model.vocab = 96: text is read as bytes"),
    "nothing there": (lambda folder: folder, "config.json cannot be read"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_converted_is_refused(case, tmp_path, convert):
    """Status 2 and one line that says why; no directory is left behind."""
    make, said = REFUSED[case]
    status, told = convert(make(tmp_path / "source"), tmp_path / "there")
    assert status == 2 and said in told and told.count("\n") == 1, told
    assert not (tmp_path / "there").exists()


def test_a_run_directory_is_known_by_its_config(tmp_path, convert):
    """The config of a converted run reads as any other, with its source in it."""
    source = a_checkpoint(tmp_path / "there", small(LLAMA))
    convert(source, tmp_path / "back")
    assert from_json((tmp_path / "back" / CONFIG).read_text()).init.from_ == str(source)
