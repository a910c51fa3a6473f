"""Experiments by name and path, their names as folders, and JSON."""

import hashlib
import json
import re

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from configs.knobs import flatten, replace
from configs.load import UserError, fingerprint, from_json, load, names, run_name, to_json
from configs.schema import Experiment

HEADER = "from configs.schema import Experiment\n"
GOOD = HEADER + "def config():\n    return Experiment()\n"


def complaint(call, *arguments) -> str:
    """The UserError of a call: at most two lines."""
    with pytest.raises(UserError) as caught:
        call(*arguments)
    assert len(str(caught.value).splitlines()) <= 2
    return str(caught.value)


@pytest.mark.parametrize("name", names())
def test_every_experiment_loads(name):
    """Every experiment of the folder loads by its name, carries it, and survives JSON."""
    config = load(name)
    assert config.run.name == name
    assert from_json(to_json(config)) == config


def test_base_is_the_default():
    """The experiment that others are told against is every knob at its default."""
    assert replace(load("base"), {"run.name": None}) == Experiment()


def test_by_path(tmp_path):
    """A file of one's own loads by its path and is named after it, unless it names itself."""
    path = tmp_path / "mine.py"
    path.write_text(GOOD)
    assert load(str(path)).run.name == "mine"
    path.write_text(HEADER + "from configs.schema import Run\ndef config():\n    return Experiment(run=Run(name='other'))\n")
    assert load(str(path)).run.name == "other"


def test_missing(tmp_path):
    """A name or path that is not there is told as given; a name with the nearest one."""
    path = str(tmp_path / "absent.py")
    assert path in complaint(load, path)
    assert "'bsae'" in complaint(load, "bsae") and "'base'" in complaint(load, "bsae")


@pytest.mark.parametrize(("text", "named"), (
    ("x = 1\ndef config(:\n", ("SyntaxError", "line 2")),
    (HEADER + "\n\nnonsense\n" + GOOD, ("NameError", "nonsense", "line 4")),
    (HEADER + "def config():\n    return Experiment(steps=3)\n", ("TypeError", "steps", "line 3")),
    (HEADER + "from configs.model import Mlp\n\ndef config():\n    return Mlp(width=0)\n", ("mlp.width = 0", "line 5")),
    (HEADER + "def config():\n    return 3\n", ("Experiment", "int")), (HEADER + "def config():\n    pass\n", ("Experiment", "NoneType")),
    (HEADER, ("config",)), ("import no_such_package\n", ("no_such_package", "line 1")), ("", ("config",)),
    ("raise ValueError('one\\ntwo\\nthree')\n", ("one", "line 1")), ("\x00", ()),
    ("def config():\n    return config()\n", ("RecursionError",)),
))
def test_broken_files(tmp_path, text, named):
    """A file that does not give an experiment is told by its path, the error and its line, in two lines at most."""
    path = tmp_path / "mine.py"
    path.write_text(text)
    message = complaint(load, str(path))
    for part in (str(path), *named):
        assert part in message


@pytest.mark.parametrize(("text", "named"), (
    ("", ""), ("{", ""), ("[]", ""), ("3", ""), ('{"model": 3}', "model"), ('{"model": {"widht": 3}}', "model.width"),
    ('{"model": {"width": "3"}}', "model.width"), ('{"train": {"steps": -1}}', "train.steps"), ('{"model": {"norm": null}}', "model.norm"),
))
def test_broken_json(text, named):
    """Text that is no config is refused with the knob at fault."""
    assert named in complaint(from_json, text)


def test_json_is_nested_and_partial():
    """JSON follows the sections; a knob that it lacks has its default."""
    nested = json.loads(to_json(Experiment()))
    assert nested["model"]["attention"]["qk_norm"]["kind"] == "none"
    assert from_json('{"model": {"norm": {"kind": "layer"}}}') == replace(Experiment(), {"model.norm.kind": "layer"})


CHANGES = {"model.norm.kind": "layer", "optim.betas": (0.5, 0.75), "optim.clip": None, "train.steps": 40, "data.source": "elsewhere"}


@pytest.mark.parametrize("changes", ({}, {"model.depth": 3}, CHANGES), ids=("none", "one", "several"))
def test_a_fingerprint_is_that_of_the_changes(changes):
    """It is the SHA-256 of the knobs that differ from their defaults, in JSON: a knob that the code gains later changes none."""
    written = json.dumps(changes, sort_keys=True).encode()
    assert fingerprint(replace(Experiment(), changes)) == hashlib.sha256(written).hexdigest()[:12]


def test_the_run_section_is_no_part_of_a_fingerprint():
    """Where a run goes, and what it is called, is left out, whatever else was changed."""
    section = {"run.root": "there", "run.name": "x", "run.resume": True, "run.progress": False, "run.compilation_cache": None}
    assert section.keys() == {knob for knob in flatten(Experiment()) if knob.startswith("run.")}
    assert fingerprint(replace(Experiment(), CHANGES | section)) == fingerprint(replace(Experiment(), CHANGES))


def test_an_older_json_keeps_its_fingerprint():
    """A config.json that lacks knobs, as an older version wrote it, has the fingerprint of one that has them at their defaults."""
    config = replace(Experiment(), CHANGES)
    nested = json.loads(to_json(config))
    del nested["mesh"], nested["model"]["rope"], nested["model"]["attention"]["qk_norm"], nested["optim"]["cooldown"], nested["run"]
    nested["train"] = {"steps": 40}
    assert fingerprint(from_json(json.dumps(nested))) == fingerprint(config)
    del nested["train"]
    assert fingerprint(from_json(json.dumps(nested))) != fingerprint(config)  # what was changed has to be there


@settings(deadline=None, database=None, derandomize=True)
@given(st.text(st.characters(codec="utf-8", exclude_characters="\0"), min_size=1, max_size=200), st.floats(1e-9, 1e9), st.booleans())
@example("../../etc/passwd", 1.0, True)
@example("\u5b57" * 100, 3e-3, False)
def test_run_name_is_a_folder(source, rate, bias):
    """Whatever was changed, a run's name is one path component of at most 120 plain characters that begins with its experiment."""
    base = load("base")
    config = replace(base, {"data.source": source, "optim.learning_rate": rate, "model.norm.bias": bias, "model.vocab": 300})
    assert re.fullmatch(r"base[A-Za-z0-9_.,=+-]{0,116}", run_name(config, base))


def test_run_name_is_the_diff():
    """The name is the experiment's and what was changed, without the word model; nothing changed, nothing added."""
    base = load("base")
    assert run_name(base, base) == "base"
    ours = replace(base, {"model.norm.placement": "post", "optim.learning_rate": 0.01, "run.resume": True})
    assert run_name(ours, base) == "base,norm.placement=post,optim.learning_rate=0.01"


def test_long_names_stay_apart():
    """Two runs whose names are cut at the same place still have two names."""
    base = load("base")
    long = {"model.pattern": ("attention.window=64 norm.placement=sandwich mlp.width=128",) * 4}
    first, second = (run_name(replace(base, long | {"train.steps": steps}), base) for steps in (20, 30))
    assert first != second
    assert max(len(first), len(second)) <= 120
