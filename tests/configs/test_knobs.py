"""Dotted knobs: read, written, compared, and errors that help."""

import ast
import dataclasses
import inspect
import itertools

import pytest

from configs import attention, model, norm, schema
from configs.knobs import build, diff, fits, flatten, knob_types, parse_changes, replace
from configs.schema import Experiment

KNOBS = knob_types(Experiment)


def refusal(changes: dict) -> str:
    """The message, of one line, with which these changes to the default experiment are refused."""
    with pytest.raises(ValueError) as caught:
        replace(Experiment(), changes)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_flatten_and_build_are_inverse():
    """Every knob of a config is in its flat form, and building from that gives the config back."""
    config = replace(Experiment(), {"model.norm.kind": "layer", "optim.betas": (0.8, 0.9), "run.name": "x"})
    assert build(Experiment, flatten(config)) == config
    assert flatten(config).keys() == KNOBS.keys()


@pytest.mark.parametrize(("knob", "nearest"), (
    ("model.norm.knd", "model.norm.kind"), ("model.norm.placment", "model.norm.placement"), ("train.step", "train.steps"),
    ("optim.learningrate", "optim.learning_rate"), ("model.attention.qk_norm.kinds", "model.attention.qk_norm.kind"),
))
def test_unknown_knob(knob, nearest):
    """A knob that does not exist is told with the nearest that does."""
    message = refusal({knob: 1})
    assert repr(knob) in message
    assert repr(nearest) in message


@pytest.mark.parametrize(("knob", "value", "rule", "nearest"), (
    ("model.norm.placement", "sandwhich", "one of", "'sandwich'"), ("model.norm.kind", "rmsnorm", "'rms'", "'rms'"),
    ("optim.schedule", "cosin", "one of", "'cosine'"), ("model.norm.scale", "1+W", "'1+w'", "'1+w'"),
    ("model.attention.bias", ("query",), "'q', 'k', 'v', 'out'", ""), ("optim.decay", ("embedd",), "'embed'", ""),
    ("train.steps", "ten", "int", ""), ("train.steps", 1.5, "int", ""), ("train.steps", True, "int", ""), ("train.steps", None, "int", ""),
    ("optim.learning_rate", "3e-3", "float", ""), ("optim.learning_rate", True, "float", ""), ("model.norm.bias", 1, "bool", ""),
    ("model.rope.theta", "big", "float or None", ""), ("optim.betas", (0.9,), "tuple", ""), ("optim.betas", [0.9, 0.95], "tuple", ""),
    ("model.attention.kv_heads", 2.0, "int or None", ""), ("run.name", 3, "str or None", ""),
    ("model.pattern", "norm.kind=rms", "tuple", ""),
))
def test_wrong_value(knob, value, rule, nearest):
    """A value that does not fit is told with its knob, itself, the rule, and the nearest choice where one is near."""
    message = refusal({knob: value})
    assert f"{knob} = {value!r}" in message
    assert rule in message
    assert nearest in message


@pytest.mark.parametrize(("knob", "value"), (
    ("optim.learning_rate", 1), ("model.rope.theta", None), ("model.norm.scale", None), ("optim.clip", None), ("optim.decay", ()),
    ("model.attention.bias", ("q", "out")), ("model.norm.eps", 0), ("instruments.every", None),
))
def test_fitting_value(knob, value):
    """None means off where the knob says so, an int passes for a float, and a tuple may be empty."""
    assert flatten(replace(Experiment(), {knob: value}))[knob] == value


def test_every_default_fits_its_own_type():
    """The defaults are values that the knobs would accept."""
    for knob, value in flatten(Experiment()).items():
        assert fits(value, KNOBS[knob]), knob


@pytest.mark.parametrize("module", (attention, model, norm, schema), ids=lambda module: module.__name__)
def test_every_knob_has_its_text(module):
    """What --help prints stands as a text under every knob."""
    for section in (kind for kind in vars(module).values() if dataclasses.is_dataclass(kind) and kind.__module__ == module.__name__):
        body = next(node for node in ast.parse(inspect.getsource(section)).body if isinstance(node, ast.ClassDef)).body
        for knob, text in itertools.pairwise(body):
            if isinstance(knob, ast.AnnAssign) and not dataclasses.is_dataclass(section.__dataclass_fields__[knob.target.id].type):
                assert isinstance(text, ast.Expr) and len(ast.literal_eval(text.value)) > 4, f"{section.__name__}.{knob.target.id}"


def test_changes_are_applied_together_and_checked_once():
    """Two changes that are impossible one at a time are fine together, in either order."""
    changes = {"model.attention.heads": 6, "model.attention.kv_heads": 3}
    for order in (changes, dict(reversed(changes.items()))):
        attention = replace(replace(Experiment(), {"model.attention.kv_heads": 4}), order).model.attention
        assert (attention.heads, attention.kv_heads) == (6, 3)


def test_replace_leaves_the_original():
    """A config is frozen and hashable; replacing makes another."""
    base = Experiment()
    assert replace(base, {"train.steps": 70}).train.steps == 70
    assert base == Experiment() and hash(base) == hash(Experiment())
    with pytest.raises(dataclasses.FrozenInstanceError):
        base.train.steps = 7


@pytest.mark.parametrize(("text", "changes"), (
    ("", {}), ("attention.window=512", {"attention.window": 512}),
    ("norm.kind=rms  rope.theta=1e4", {"norm.kind": "rms", "rope.theta": 1e4}),
    ("rope.theta=None norm.bias=True", {"rope.theta": None, "norm.bias": True}),
    ("attention.bias=('q','k')", {"attention.bias": ("q", "k")}),
    ("norm.scale=1+w", {"norm.scale": "1+w"}),
))
def test_parse_changes(text, changes):
    """A layer's change reads as Python literals, and a bare word as a text."""
    assert parse_changes(text) == changes


@pytest.mark.parametrize("text", ("attention.window", "=3", "norm.kind=", "norm.kind = rms"))
def test_unreadable_changes(text):
    """A change that is not knob=value is refused in one line that shows it."""
    with pytest.raises(ValueError, match="knob=value"):
        parse_changes(text)


def test_diff():
    """A diff holds each knob that differs, as (base, ours), sorted, without the run section."""
    base = Experiment()
    ours = replace(base, {"train.steps": 70, "model.norm.kind": "layer", "run.name": "x", "run.resume": True})
    assert list(diff(ours, base).items()) == [("model.norm.kind", ("rms", "layer")), ("train.steps", (300, 70))]
    assert diff(base, base) == {}
