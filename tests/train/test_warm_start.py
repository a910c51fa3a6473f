"""--init.from: a run that starts from a run or from a published checkpoint has its model and its values, or is refused by name."""

import dataclasses
import shutil

import numpy as np
import pytest

from configs.knobs import diff, replace
from configs.load import UserError
from models.parameters import values
from tests.models.huggingface.folders import FOLDERS
from tests.train.small import SAME, mesh_of, plan_of, small, text_of, tokens_of
from tests.train.sources import KINDS, LLAMA, a_checkpoint, a_run, by_layer, loss_of, values_of
from train.command_line import parse_experiment
from train.loop import run
from train.programs import structure
from train.source import model_in, transformer_in
from train.step import make_evaluation
from train.warm_start import start


def started(changes: dict, source, told=None):
    """(plan, state) of the small run that starts from a directory; what is not taken from there is left as shapes."""
    plan = plan_of(small(LLAMA | changes | {"init.from": str(source)}))
    return plan, start(plan, plan.shapes(), tokens_of(plan.config, plan.mesh), print if told is None else told.append)


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    """A directory of each kind with the same values."""
    root = tmp_path_factory.mktemp("sources")
    return {kind: make(root / kind, small(LLAMA)) for kind, make in KINDS.items()}


@pytest.mark.parametrize("kind", KINDS)
def test_the_values_are_those_of_the_source_to_the_bit(kind, sources):
    """At step 0 every parameter is the source's; whatever else a state holds is that of a fresh run; nothing is told."""
    told = []
    plan, state = started({}, sources[kind], told)
    ours, theirs = by_layer(plan.rows, state.parameters), by_layer(plan.rows, values_of(small(LLAMA)))
    assert ours.keys() == theirs.keys() and all(ours[key].tobytes() == theirs[key].tobytes() for key in ours)
    shapes = plan.shapes()
    assert state == dataclasses.replace(shapes, parameters=state.parameters) and told == []


@pytest.mark.parametrize("kind", KINDS)
def test_the_first_evaluation_is_the_loss_of_the_source(kind, sources):
    """The loss before the first step is that of the model in the directory."""
    plan, state = started({}, sources[kind])
    tokens = tokens_of(plan.config, plan.mesh)
    theirs = transformer_in(sources[kind], plan.mesh, print)
    assert float(make_evaluation(plan)(state.parameters, tokens)) == pytest.approx(loss_of(theirs, tokens), rel=SAME)


@pytest.mark.parametrize("kind", KINDS)
def test_another_division_into_segments_finds_its_values(kind, sources):
    """A window in one layer makes two segments of one; every layer keeps its own values, and the difference is told."""
    told = []
    plan, state = started({"model.overrides": ("1: attention.window=4",)}, sources[kind], told)
    source = plan_of(small(LLAMA))
    assert len(plan.model.stack.segments) == 2 != len(source.model.stack.segments)
    ours, theirs = by_layer(plan.rows, state.parameters), by_layer(source.rows, values_of(small(LLAMA)))
    assert all(ours[key].tobytes() == theirs[key].tobytes() for key in theirs) and ours.keys() == theirs.keys()
    assert len(told) == 1 and "attention.window = 4 here, None there (layers 1)" in told[0]


@pytest.mark.parametrize("kind", KINDS)
def test_the_values_lie_on_the_mesh_of_the_run(kind, sources):
    """On eight devices, which do not divide the source's batch of four, the values are the same and laid out as the plan says."""
    if kind == "run":
        sources = {kind: a_run(sources[kind].with_name("narrow"), small(LLAMA | {"data.batch": 4, "instruments.probe_batch": 4}))}
    plan, state = started({"mesh.data": 4, "mesh.fsdp": 2}, sources[kind])
    theirs = values_of(small(LLAMA))
    for path, value in state.parameters.items():
        assert value.sharding == plan.shardings.parameters[path]
        np.testing.assert_array_equal(np.asarray(value), theirs[path])


REFUSED = {
    "another width": ({"model.mlp.width": 48}, r"mlp\.\w+\.weight of layer 0 has shape .*32.* there, .*48.* in this model"),
    "a parameter more": ({"model.attention.bias": ("q",)}, r"lacks attention\.q\.bias of layer 0, which this model has"),
    "a head of its own": ({"model.tied": False}, r"lacks head\.weight, which this model has"),
    "a parameter less": ({"model.norm.scale": None}, r"has .*scale.*, for which this model has no place"),
    "a layer more": ({"model.depth": 3}, "lacks .* of layer 2, which this model has"),
    "a layer less": ({"model.depth": 1}, "has .* of layer 1, for which this model has no place"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_another_model_is_refused_by_name(case, sources):
    """A parameter that is missing, too many, or of another shape is named, with its layer."""
    changes, said = REFUSED[case]
    with pytest.raises(UserError, match=said) as error:
        started(changes, sources["Hugging Face"])
    assert "\n" not in str(error.value) and "init.from" in str(error.value)


def test_a_directory_that_holds_no_model_is_refused(tmp_path, sources):
    """No directory, no config, a run that has saved nothing: each is one line."""
    empty = tmp_path / "empty"
    empty.mkdir()
    unsaved = tmp_path / "unsaved"
    unsaved.mkdir()
    shutil.copy(sources["run"] / "config.json", unsaved)
    unread = "config.json cannot be read"
    for place, said in ((tmp_path / "none", unread), (empty, unread), (unsaved, "holds no checkpoint")):
        with pytest.raises(UserError, match=said):
            transformer_in(place, mesh_of(), print)


def test_members_that_differ_in_their_source_share_programs_and_no_state(sources, tmp_path):
    """init.from is no part of the programs' structure; each member has the values of its own source."""
    other = {path: 2 * value for path, value in values_of(small(LLAMA)).items()}
    a_checkpoint(tmp_path / "other", small(LLAMA), other)
    (plan, ours), (theirs_plan, theirs) = started({}, sources["run"]), started({}, tmp_path / "other")
    assert structure(plan.config) == structure(theirs_plan.config) == structure(small(LLAMA))
    assert all(np.array_equal(2 * np.asarray(ours.parameters[path]), np.asarray(theirs.parameters[path])) for path in ours.parameters)


def parse(*words):
    return parse_experiment("scripts.train", "", list(map(str, words)))[0]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("spelling", [["--init.from", "{}"], ["--init.from={}"]])
def test_the_command_line_takes_the_model_of_the_directory(kind, spelling, sources):
    """Nothing but the directory need be said: the model is the source's, to which further words apply."""
    words = [word.format(sources[kind]) for word in spelling]
    config = parse("tiny", *words, "--train.steps", "20")
    assert config.model == model_in(sources[kind]) and config.init.from_ == str(sources[kind]) and config.train.steps == 20
    changed = parse("tiny", *words, "--model.attention.qk-norm.kind", "head")
    assert diff(changed.model, config.model).keys() == {"attention.qk_norm.kind"}
    assert parse("tiny", "--init.from", "None").model == parse("tiny").model


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_a_vocabulary_below_256_is_refused(name):
    """Text is read as bytes: the reference checkpoints, of 96 tokens, cannot be trained."""
    with pytest.raises(UserError, match=r"model\.vocab = 96: text is read as bytes, so it must be at least 256"):
        parse("tiny", "--init.from", FOLDERS[name])


def test_a_run_from_a_checkpoint_resumes_to_the_bit(sources, tmp_path):
    """Continued from its second step, a run that began from a checkpoint ends with the parameters that it had when nothing stopped it, and
    it does not read the source again."""
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "a.txt").write_text(text_of(4000))
    source = shutil.copytree(sources["Hugging Face"], tmp_path / "source")
    config = small(LLAMA | {
        "init.from": str(source), "train.steps": 4, "data.source": str(tmp_path / "text"), "eval.every": 2, "eval.batches": 1,
        "checkpoint.every": 2, "instruments.every": None, "instruments.probe_every": None, "run.root": str(tmp_path), "run.name": "run",
        "run.progress": False, "run.compilation_cache": None})
    assert run(config) == 0
    whole = values(transformer_in(tmp_path / "run", mesh_of(), print))
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "4")
    shutil.rmtree(source)
    assert run(replace(config, {"run.resume": True})) == 0
    again = values(transformer_in(tmp_path / "run", mesh_of(), print))
    assert all(np.asarray(whole[path]).tobytes() == np.asarray(again[path]).tobytes() for path in whole)
