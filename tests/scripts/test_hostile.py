"""Input made to be wrong: generated overrides, hostile files. It ends in a clear line, writes nothing elsewhere and executes nothing."""

import ast
import collections
import functools
import math
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as some

from configs.knobs import fits, knob_types, replace
from configs.load import UserError, from_json, load, read_json, to_json
from configs.model import Model
from configs.schema import Experiment
from models.description import warnings
from models.huggingface.parity import compare
from models.parameters import bind, table
from models.transformer import Transformer
from tests.train.small import SMALL, small
from train.command_line import exit_with, parse_experiment
from train.loop import run
from train.mesh import make_mesh

ROOT = Path(__file__).parents[2]
KNOBS = knob_types(Experiment)
NUMBERS = (-1, 0, 1, 2, 3, 4, 7, 8, 16, 64, 300, 2**31, 10**30, 0.5, 1.5, -0.1, 1e-30, 1e300, 1e-320, math.nan, math.inf, -math.inf)
TEXTS = ("", "none", "NaN", "rms", "nrom", "0: mlp.width=8", "0-9: norm.kind=layer", "attention.window=2", "norm.eps=1e999", "norm.eps=nan",
         "mlp.width=((((((", "rope.theta=-1", "0: model.depth=9", "x=__import__('os')", "../../etc/passwd", "\0", "q", "embed", "字")
plain = some.one_of(some.sampled_from(NUMBERS), some.sampled_from(TEXTS), some.none(), some.booleans(), some.integers(1, 12))


def values(kind):
    """Values for a knob: of its choices, its type, and of anything else."""
    choices = [option for option in ("pre", "post", *literals(kind)) if fits(option, kind)]
    fitting = [plain.filter(lambda value: fits(value, kind)), some.tuples(plain, plain), some.tuples(plain)]
    return some.one_of(*([some.sampled_from(choices)] if choices else []), fitting[0], fitting[0], *fitting[1:], plain)


def literals(kind) -> list:
    inner = getattr(kind, "__args__", ())
    return [x for part in inner for x in ([part] if isinstance(part, str) else literals(part))]


overrides = some.dictionaries(some.sampled_from(sorted(KNOBS)), some.none(), min_size=3, max_size=3).flatmap(
    lambda chosen: some.fixed_dictionaries({knob: values(KNOBS[knob]) for knob in chosen}))


@functools.cache
def logits_of(model: Model) -> tuple[int, ...]:
    """The shape of the logits of two sequences of four, evaluated without a number."""
    transformer = Transformer(model)
    rows = table(transformer)
    parameters = {row.path: jax.ShapeDtypeStruct(row.shape, jnp.float32) for row in rows}
    forward = lambda parameters, tokens: bind(transformer, parameters)(tokens).logits
    return jax.eval_shape(forward, parameters, jax.ShapeDtypeStruct((2, 4), jnp.int32)).shape


def is_short(message: str) -> bool:
    return 0 < len(message.strip().splitlines()) <= 2 and len(message) < 2000


def check_plan(config: Experiment) -> None:
    """An accepted plan has a model whose shapes can be evaluated, a text form that is the same plan, and a mesh or a line about it."""
    assert from_json(to_json(config)) == config
    assert logits_of(config.model) == (2, 4, config.model.vocab)
    warnings(config.model)
    try:
        make_mesh(config.mesh)
    except UserError as error:
        assert is_short(str(error))


def test_a_plan_is_run_or_refused():
    """Two thousand overrides, three at a time: each plan is accepted and its model's shapes evaluated, or refused in one or two lines."""
    base, seen = small(), collections.Counter()

    def fitting(knob: str, value):
        """A float for a float: beartype, which checks the shapes here, takes no whole number for one."""
        return float(value) if type(value) is int and fits(0.5, KNOBS[knob]) else value

    @settings(max_examples=670, deadline=None, database=None, derandomize=True, suppress_health_check=list(HealthCheck))
    @given(overrides)
    def check(changes):
        seen["overrides"] += len(changes)
        try:
            config = replace(base, {knob: fitting(knob, value) for knob, value in changes.items()})
        except ValueError as error:
            seen["refused"] += 1
            assert is_short(str(error)), changes
            return
        seen["accepted"] += 1
        check_plan(config)

    check()
    assert seen["overrides"] >= 2000 and min(seen["refused"], seen["accepted"]) > 60, seen


@settings(max_examples=80, deadline=None, database=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(changes=overrides, stray=some.sampled_from(((), ("--model.nrom.kind", "rms"), ("--model.overrides", "0: norm.eps=nan"), ("--",))))
def test_a_command_line_is_run_or_refused(changes, stray, capsys):
    """The same through the command line: exit status 2 and a message without a traceback, or a plan whose shapes can be evaluated."""
    words = [word for knob, value in changes.items() for word in (f"--{knob}", *map(str, value if isinstance(value, tuple) else (value,)))]
    start = [f"--{knob}={value}" for knob, value in SMALL.items() if knob not in changes]
    plans = []
    with pytest.raises(SystemExit) as end:
        exit_with(lambda: plans.append(parse_experiment("scripts.train", "Train.", ["tiny", *start, *words, *stray])[0]) or 0)
    told = capsys.readouterr()
    assert end.value.code == (0 if plans else 2), told
    assert "Traceback" not in told.out + told.err
    if plans:
        check_plan(plans[0])
    else:
        assert told.out + told.err


DEEP = 10**5
JSON = {
    "nested": "[" * DEEP,
    "nested objects": '{"model":' * DEEP,
    "closed nesting": '{"model":' * DEEP + "1" + "}" * DEEP,
    "an endless number": '{"train": {"steps": ' + "9" * 5000 + "}}",
    "a long number": '{"train": {"steps": ' + "9" * 4000 + "}}",
    "a long number for a real one": '{"optim": {"learning_rate": ' + "9" * 4000 + "}}",
    "beyond a float": '{"optim": {"learning_rate": 1e400}}',
    "not a number": '{"optim": {"learning_rate": NaN}}',
    "a text for a number": '{"optim": {"learning_rate": "NaN"}}',
    "an object for a number": '{"optim": {"learning_rate": {"a": 1}}}',
    "a list of lists": '{"optim": {"betas": [[0.9], [0.9]]}}',
    "a huge model": '{"model": {"depth": 2000000000}}',
    "huge heads": '{"model": {"attention": {"heads": 99999999999999999999}}}',
    "a name that leads elsewhere": '{"run": {"name": "../../elsewhere"}}',
    "an absolute name": '{"run": {"name": "/elsewhere"}}',
    "a name with a zero byte": '{"run": {"name": "a\\u0000b"}}',
    "half a character": '{"data": {"source": "\\ud800"}}',
    "code": '{"data": {"source": "text"}, "__class__": "os.system"}',
}


@pytest.mark.parametrize("case", JSON)
def test_hostile_json_is_no_config(case, tmp_path):
    """A JSON config that is made to be wrong ends in one line that names its file."""
    path = tmp_path / "config.json"
    path.write_text(JSON[case])
    with pytest.raises(UserError) as error:
        load(str(path))
    assert str(path) in str(error.value) and is_short(str(error.value))


@pytest.mark.parametrize("content", ["[" * DEEP, '{"a":' * DEEP, "9" * 5000, "\0", "[]", ""])
def test_hostile_json_is_no_object(content, tmp_path):
    """Any other JSON file: the same."""
    (tmp_path / "x.json").write_text(content)
    with pytest.raises(UserError, match=r"x\.json cannot be read") as error:
        read_json(tmp_path / "x.json")
    assert is_short(str(error.value))


def test_a_config_that_leads_in_circles_is_told(tmp_path):
    """A config that is a link to itself ends in one line."""
    (tmp_path / "a.json").symlink_to(tmp_path / "a.json")
    with pytest.raises(UserError, match=r"a\.json"):
        load(str(tmp_path / "a.json"))


SOURCES = [path for folder in ("configs", "models", "train", "scripts") for path in sorted((ROOT / folder).rglob("*.py"))]


def calls_of(path: Path) -> list[ast.Call]:
    return [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)]


def test_nothing_that_is_read_is_executed():
    """No source reads a pickle or evaluates a text: numpy loads say allow_pickle=False, and of the modules that execute what they read none
    is imported; a user's own .py config is the one thing that runs."""
    assert len(SOURCES) > 60
    for path in SOURCES:
        text = path.read_text()
        assert not re.search(r"^\s*(import|from) (pickle|cPickle|dill|cloudpickle|joblib|marshal|shelve|torch)\b", text, re.M), path
        for call in calls_of(path):
            name = ast.unparse(call.func)
            assert name not in ("eval", "exec", "compile", "__import__", "os.system", "torch.load"), (path, name)
            if name in ("np.load", "numpy.load", "jnp.load"):
                assert "allow_pickle=False" in ast.unparse(call), path
    assert [path.name for path in SOURCES if "exec_module" in path.read_text()] == ["load.py"]


def test_no_pickle_in_a_source_of_parity(tmp_path):
    """A reference.npz with an object in it is refused, unread."""
    class Trap:
        def __reduce__(self):
            return Path.touch, (tmp_path / "executed",)

    np.savez(tmp_path / "reference.npz", input_ids=np.array([Trap()], dtype=object), allow_pickle=True)
    with pytest.raises(UserError, match=r"reference\.npz cannot be read"):
        compare(tmp_path)
    assert not (tmp_path / "executed").exists()


@pytest.mark.parametrize("knob", ["--data.source", "--run.root", "--init.from"])
def test_the_home_of_nobody_is_told(knob, capsys):
    """A path in the home of a user who is not known ends in a line."""
    with pytest.raises(SystemExit) as end:
        words = ["tiny", knob, "~nobody_here/x", "--run.compilation-cache", "None"]
        exit_with(lambda: run(parse_experiment("scripts.train", "Train.", words)[0]))
    assert end.value.code == 2 and "~nobody_here/x" in capsys.readouterr().err
