"""The command line: what is understood, and what is refused in one or two lines with exit status 2."""

import importlib
import re
import sys

import pytest

from configs.knobs import diff, knob_types
from configs.load import UserError, load
from configs.schema import Experiment
from tests.train.processes import command, finish, write_config
from train.command_line import exit_with, parse_experiment


def parse(*words: str) -> Experiment:
    return parse_experiment("scripts.train", "Train.", list(words))[0]


def refuse(capsys, *words: str) -> str:
    """What the command says on its way to exit status 2."""
    with pytest.raises(SystemExit) as end:
        exit_with(lambda: parse(*words) and 0)
    told = capsys.readouterr()
    assert end.value.code == 2, told
    return re.sub(r"[\s│─╭╮╰╯]+", " ", told.out + told.err)


UNDERSTOOD = {
    "a choice": (("--model.norm.kind", "layer"), {"model.norm.kind": "layer"}),
    "hyphens": (("--optim.learning-rate", "0.01", "--model.attention.kv-heads", "2"),
                {"optim.learning_rate": 0.01, "model.attention.kv_heads": 2}),
    "underscores": (("--optim.learning_rate", "0.01"), {"optim.learning_rate": 0.01}),
    "an equals sign": (("--optim.learning-rate=0.01",), {"optim.learning_rate": 0.01}),
    "a whole number for a real one": (("--optim.learning-rate", "1"), {"optim.learning_rate": 1.0}),
    "scientific notation": (("--optim.learning-rate", "1e-3"), {"optim.learning_rate": 1e-3}),
    "None": (("--optim.clip", "None", "--instruments.every", "None"), {"optim.clip": None, "instruments.every": None}),
    "a switch": (("--model.tied", "False"), {"model.tied": False}),
    "a bare switch": (("--model.attention.sinks", "--optim.independent-decay"),
                      {"model.attention.sinks": True, "optim.independent_decay": True}),
    "a list": (("--model.overrides", "0: mlp.width=64", "1-2: norm.kind=layer"),
               {"model.overrides": ("0: mlp.width=64", "1-2: norm.kind=layer")}),
    "a nested section": (("--model.attention.qk-norm.kind", "head", "--model.rope.scaling.kind", "linear"),
                         {"model.attention.qk_norm.kind": "head", "model.rope.scaling.kind": "linear"}),
    "two that need each other": (("--model.attention.heads", "6", "--model.attention.kv-heads", "3"),
                                 {"model.attention.heads": 6, "model.attention.kv_heads": 3}),
}


@pytest.mark.parametrize("case", UNDERSTOOD)
def test_overrides_are_understood(case):
    """Every spelling of an override sets its knob and no other; combinations are judged after all of them are set."""
    words, expected = UNDERSTOOD[case]
    assert {knob: here for knob, (_, here) in diff(parse("tiny", *words), load("tiny")).items()} == expected


@pytest.mark.parametrize(("words", "resume"), [((), False), (("--run.resume",), True), (("--run.resume", "True"), True),
                                                (("--run.resume", "False"), False), (("--run.resume", "--train.steps", "30"), True)])
def test_a_bare_resume_means_true(words, resume):
    """--run.resume alone continues a run, whatever follows it."""
    assert parse("tiny", *words).run.resume is resume


def test_a_run_is_named_by_its_difference():
    """Unless told otherwise, the run's name is the experiment's and what was changed; a name that is given is taken."""
    assert parse("tiny").run.name == "tiny"
    assert parse("tiny", "--model.norm.placement", "post").run.name == "tiny,norm.placement=post"
    assert parse("tiny", "--model.norm.placement", "post", "--run.name", "mine").run.name == "mine"


IMPOSSIBLE = {  # words: what the message must have, each in it
    ("--model.norm.knd", "rms"): ("--model.norm.knd", "--model.norm.kind"),
    ("--model.norm.kind", "rmsnorm"): ("rmsnorm", "model.norm.kind", "rms"),
    ("--model.norm.placement", "sandwitch"): ("sandwitch", "sandwich"),
    ("--train.steps", "many"): ("train.steps", "many", "INT"),
    ("--train.steps", "1.5"): ("train.steps", "1.5"),
    ("--train.steps",): ("train.steps",),
    ("--optim.learning-rate", "nan"): ("optim.learning_rate", "nan"),
    ("--optim.weight-decay", "inf"): ("optim.weight_decay", "inf", "finite"),
    ("--optim.learning-rate", "-1"): ("optim.learning_rate = -1", "positive"),
    ("--model.attention.heads", "7", "--model.attention.kv-heads", "2"): ("attention.kv_heads = 2", "7", "divide"),
    ("--model.attention.heads", "7"): ("attention.heads = 7", "model.width = 96"),
    ("--model.init.kind", "deepnorm"): ("model.init.kind", "deepnorm", "placement"),
    ("--model.norm.placement", "hybrid"): ("hybrid", "qk_norm.values"),
    ("--optim.warmup", "500"): ("optim.warmup = 500", "train.steps = 300"),
    ("--train.accumulate", "3"): ("train.accumulate = 3", "data.batch = 16"),
    ("--data.batch", "6", "--mesh.data", "4"): ("mesh.data", "6"),
    ("--mesh.tensor", "3"): ("mesh.tensor = 3", "divide"),
    ("--model.vocab", "100"): ("model.vocab = 100", "256"),
    ("--model.rope.fraction", "0.3"): ("rope.fraction = 0.3", "even"),
    ("--model.overrides", "9: mlp.width=8"): ("9: mlp.width=8", "0 to 3"),
    ("--model.overrides", "0: mlp.wdth=8"): ("mlp.wdth", "mlp.width"),
    ("--model.overrides", "0: mlp.width=8.5"): ("mlp.width", "8.5", "int"),
    ("--model.pattern", "attention.window"): ("attention.window", "knob=value"),
    ("--instruments.every", "0"): ("instruments.every = 0", "None"),
    ("--checkpoint.keep", "-1"): ("checkpoint.keep = -1", "positive"),
    ("--optim.betas", "0.9", "1.5"): ("optim.betas", "1.5", "[0, 1)"),
    ("stray",): ("stray",),
}


@pytest.mark.parametrize("words", IMPOSSIBLE, ids=" ".join)
def test_what_cannot_be_is_told_with_its_rule(words, capsys):
    """An unknown knob, a bad value or an impossible combination ends with status 2; the message has the knob, the value, the rule or the
    nearest spelling, and no traceback."""
    told = refuse(capsys, "tiny", *words)
    assert "Traceback" not in told
    for part in IMPOSSIBLE[words]:
        assert part in told, f"{part!r} is not in {told!r}"


def test_a_knob_has_one_name(capsys):
    """A knob's value of the wrong type is told by the knob's dotted name, whichever of its spellings was used."""
    for spelling in ("--optim.learning-rate", "--optim.learning_rate"):
        assert re.search(r"optim\.learning[-_]rate", refuse(capsys, "tiny", spelling, "fast"))


CONFIGS = {
    "does not exist": (None, "does not exist"),
    "does not parse": ("def config(:\n", "line 1"),
    "does not import": ("import a_package_that_is_not_there\n", "a_package_that_is_not_there"),
    "has no config": ("x = 1\n", "config"),
    "fails": ("def config():\n    return 1 / 0\n", "line 2"),
    "returns something else": ("def config():\n    return 7\n", "Experiment"),
    "asks for the impossible": ("from configs.knobs import replace\nfrom configs.schema import Experiment\n\n\ndef config():\n"
                                "    return replace(Experiment(), {'optim.lerning_rate': 1.0})\n", "optim.learning_rate"),
    "exits": ("raise SystemExit(0)\n", "mine.py"),
}


@pytest.mark.parametrize("case", CONFIGS)
def test_a_broken_config_file_is_told_by_its_path(case, tmp_path, capsys):
    """A config file that is missing or broken ends with status 2 and the file's path, the reason and the line, in at most two lines."""
    text, reason = CONFIGS[case]
    path = tmp_path / "mine.py"
    if text is not None:
        path.write_text(text)
    told = refuse(capsys, str(path))
    assert str(path) in told and reason in told and "Traceback" not in told


def test_no_name_and_a_wrong_name_list_the_names(capsys):
    """Without a name, or with one that is misspelt, the command says which there are."""
    assert "tiny" in refuse(capsys) and "tiny" in refuse(capsys, "--train.steps", "5")
    told = refuse(capsys, "tinny")
    assert "'tinny'" in told and "'tiny'" in told


@pytest.mark.parametrize("words", [("--help",), ("tiny", "--help"), ("tiny", "-h")])
def test_help_lists_every_knob(words, capsys):
    """--help ends with status 0 and shows every knob of an experiment with its meaning, before or after a name."""
    with pytest.raises(SystemExit) as end:
        parse(*words)
    told = capsys.readouterr().out
    assert end.value.code in (0, None)
    missing = [knob for knob in knob_types(Experiment) if f"--{knob.replace('_', '-')}" not in told and f"--{knob}" not in told]
    assert not missing
    assert "Peak learning rate" in told and "sandwich" in told


def test_a_users_own_config_is_a_config(tmp_path):
    """A .py file anywhere is an experiment: its name is the run's, its values the defaults, overrides come after."""
    config = parse(str(write_config(tmp_path, tmp_path)), "--train.steps", "30")
    assert (config.model.width, config.train.steps, config.run.name) == (16, 30, "small,train.steps=30")


@pytest.mark.parametrize("module", ["train", "describe", "bench"])
def test_every_script_tells_mistakes_so(module, capsys, monkeypatch):
    """Each command ends with status 2 and one message where the command line is wrong."""
    script = importlib.import_module(f"scripts.{module}")
    for words in (("tyni",), ("tiny", "--model.norm.kind", "rmsnorm"), ("tiny", "--train.steps", "-1")):
        monkeypatch.setattr(sys, "argv", [f"scripts.{module}", *words])
        with pytest.raises(SystemExit) as end:
            exit_with(script.main)
        assert end.value.code == 2 and words[-1] in "".join(capsys.readouterr())


PROCESS = {
    "no name": ((), "NAME_OR_PATH"),
    "an impossible combination": (("tiny", "--optim.warmup", "500"), "optim.warmup = 500"),
    "a mesh larger than the devices": (("tiny", "--mesh.data", "2", "--run.root", "{}"),
                                       "mesh.data x mesh.fsdp x mesh.tensor x mesh.expert = 2"),
    "a missing corpus": (("tiny", "--data.source", "{}/nowhere", "--run.root", "{}"), "nowhere"),
    "bytes beyond the vocabulary": (("tiny", "--data.source", "{}/text.txt", "--model.vocab", "128", "--run.root", "{}"), "model.vocab"),
}


@pytest.mark.parametrize("case", PROCESS)
def test_a_process_ends_with_2_and_writes_nothing(case, tmp_path):
    """The command itself ends with status 2, without a traceback, and leaves no run directory."""
    words, reason = PROCESS[case]
    (tmp_path / "text.txt").write_text("caf\u00e9 " * 2000)
    done = finish(command("scripts.train", *(word.format(tmp_path) for word in words)))
    assert done.returncode == 2 and reason in done.stdout + done.stderr and "Traceback" not in done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["text.txt"]


def test_only_an_existing_file_is_a_path():
    """A name that ends in .py is a path; any other is looked up among the experiments."""
    with pytest.raises(UserError, match=r"nowhere\.py does not exist"):
        load("nowhere.py")
    with pytest.raises(UserError, match="no experiment is named 'nowhere'"):
        load("nowhere")
