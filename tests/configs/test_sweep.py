"""Sweeps as data: what axes span, what is refused, and sweep files by name and path."""

import pytest

from configs.knobs import flatten, replace
from configs.load import ABLATIONS, UserError, load, load_sweep, names, to_json
from configs.schema import Experiment
from configs.sweep import Curve, members, seeds, values, variants, zipped

BASE = Experiment()
PLACEMENT = variants("placement", pre={}, post={"model.norm.placement": "post"})
RATE = values("optim.learning_rate", 1e-3, 1e-2, 1e-1)


def complaint(kind: type[Exception], call, *arguments) -> str:
    with pytest.raises(kind) as caught:
        call(*arguments)
    return str(caught.value)


def test_a_product_has_every_combination_in_order():
    """Axes span their product, the last one fastest, each member with its label on every axis and its three knobs set."""
    found = members(BASE, (PLACEMENT, RATE, seeds(2)))
    expected = [(placement, rate, seed) for placement in ("pre", "post") for rate in (1e-3, 1e-2, 1e-1) for seed in (0, 1)]
    assert [(m.config.model.norm.placement, m.config.optim.learning_rate, m.config.train.seed) for m in found] == expected
    for member, (placement, rate, seed) in zip(found, expected, strict=True):
        assert dict(member.labels) == {"placement": placement, "optim.learning_rate": f"{rate:g}", "train.seed": str(seed)}
    assert len({member.name for member in found}) == len(found)


def test_a_member_differs_from_the_base_in_its_overrides_alone():
    """Whatever no axis names is as in the base."""
    (first, *_) = members(BASE, (values("optim.weight_decay", 0.5), values("train.z_loss", 0.25)))
    changed = {knob: value for knob, value in flatten(first.config).items() if flatten(BASE)[knob] != value}
    assert changed == {"optim.weight_decay": 0.5, "train.z_loss": 0.25}


def test_zipped_axes_move_together():
    """Zipped axes give one member per pair of points, in order."""
    found = members(BASE, (zipped(values("model.depth", 2, 4, 8), values("optim.warmup", 5, 6, 7)), seeds(2)))
    assert [(m.config.model.depth, m.config.optim.warmup, m.config.train.seed) for m in found] == [
        (2, 5, 0), (2, 5, 1), (4, 6, 0), (4, 6, 1), (8, 7, 0), (8, 7, 1)]


def test_a_variant_is_a_set_of_overrides():
    """A named variant sets all its knobs, and an empty one none."""
    plain, both = members(BASE, (variants("recipe", plain={}, both={"optim.clip": None, "train.z_loss": 0.0}),))
    assert plain.config == BASE and both.config == replace(BASE, {"optim.clip": None, "train.z_loss": 0.0})
    assert [member.labels for member in (plain, both)] == [(("recipe", "plain"),), (("recipe", "both"),)]


def test_overrides_of_a_member_apply_together():
    """Overrides that are possible together only, in either order of the axes, make a member."""
    base = replace(BASE, {"train.steps": 20})
    longer, warmer = values("train.steps", 100), values("optim.warmup", 50)
    complaint(ValueError, members, base, (warmer,))  # alone it is impossible: the base has 20 steps
    for axes in ((longer, warmer), (warmer, longer)):
        (member,) = members(base, axes)
        assert (member.config.train.steps, member.config.optim.warmup) == (100, 50)


@pytest.mark.parametrize(("axes", "told"), (
    ((values("optim.learning_rat", 1e-3),), ("optim.learning_rat", "optim.learning_rate")),
    ((variants("placement", pre={}, same={"model.norm.placement": "pre"}),), ("placement=pre", "placement=same")),
    ((values("optim.clip", 1, 1.0),), ("clip",)),
    ((values("optim.learning_rate", 1e-3, 1.0000001e-3),), ("learning_rate",)),
    ((), ("empty",)),
    ((RATE, variants("placement")), ("placement",)),
    ((RATE, variants("hot", no={}, yes={"optim.learning_rate": 1.0})), ("'optim.learning_rate'", "'hot'")),
    ((PLACEMENT, variants("placement", none={}, head={"model.attention.qk_norm.kind": "head"})), ("placement",)),
    ((PLACEMENT, values("optim.warmup", 5, 10_000)), ("10000", "optim.warmup")),
    ((PLACEMENT, values("optim.warmup", "five")), ("five", "optim.warmup")),
), ids=("unknown knob", "duplicates", "equal values", "one label for two values", "no axes", "axis without points", "knob set twice",
        "name used twice", "impossible member", "wrong type"))
def test_a_sweep_that_cannot_be_is_refused(axes, told):
    """An impossible sweep is a ValueError that names the axis or the member."""
    error = complaint(ValueError, members, BASE, axes)
    assert all(word in error for word in told), error


def test_zipped_axes_of_unequal_length_are_refused():
    """Axes of two and three points do not zip, and both are named."""
    error = complaint(ValueError, zipped, values("model.depth", 2, 4), RATE)
    assert "model.depth" in error and "optim.learning_rate" in error


def test_zipped_axes_that_set_one_knob_are_refused():
    """Zipping hides no knob that two axes set."""
    def spanned():
        return members(BASE, (zipped(values("optim.warmup", 1, 2), variants("cold", no={"optim.warmup": 3}, yes={"optim.warmup": 4})),))

    assert "optim.warmup" in complaint(ValueError, spanned)


@pytest.mark.parametrize("name", names(ABLATIONS, "base"))
def test_every_sweep_loads(name):
    """Every file of configs/ablations spans members, and its docstring tells the question, the command and what to expect."""
    sweep = load_sweep(name)
    assert sweep.name == name and len(sweep.members) > 1
    assert "Command:" in sweep.question and "Expect:" in sweep.question and f"scripts.ablate {name}" in sweep.question


def test_sweeps_are_found():
    """The folder holds the quick sweep, and the names are those of its files (so that the test above cannot pass on nothing)."""
    assert "norm_placement_quick" in names(ABLATIONS, "base")
    assert set(names(ABLATIONS, "base")) == {path.stem for path in ABLATIONS.glob("*.py")} - {"__init__"}


def test_an_unknown_sweep_is_told_with_the_nearest():
    """A misspelt sweep is a UserError with the nearest name."""
    error = complaint(UserError, load_sweep, "norm_placment_quick")
    assert "'norm_placment_quick'" in error and "'norm_placement_quick'" in error


HEADER = "from configs.schema import Experiment\nfrom configs.sweep import *\n"
SOUND = HEADER + "def base():\n    return Experiment()\nAXES = (values('model.depth', 2, 4), seeds(2))\n"


@pytest.mark.parametrize(("text", "told"), (
    (HEADER + "def base(:\n", ("SyntaxError", "line 3")),
    (HEADER + "def base():\n    return Experiment()\n", ("AXES",)),
    (HEADER + "AXES = (seeds(2),)\n", ("base",)),
    (HEADER + "def base():\n    return Experiment(steps=3)\nAXES = (seeds(2),)\n", ("steps", "line 4")),
    (HEADER + "def base():\n    return 3\nAXES = (seeds(2),)\n", ("base()", "Experiment")),
    (HEADER + "def base():\n    return Experiment()\nAXES = seeds(2)\n", ("Axis",)),
    (HEADER + "def base():\n    return Experiment()\nAXES = ({'train.seed': 1},)\n", ("AXES",)),
    (HEADER + "def base():\n    return Experiment()\nAXES = ()\n", ("empty",)),
    (HEADER + "def base():\n    return Experiment()\nAXES = (values('optim.learning_rat', 1.0),)\n", ("optim.learning_rat",)),
    (HEADER + "raise SystemExit(0)\n", ("SystemExit",)),
    (SOUND + "CURVES = (Curve('grad_norm', over='model.dept'),)\n", ("'model.dept'", "'model.depth'")),
    (SOUND + "CURVES = (Curve('grad_norm', over='placement'),)\n", ("'placement'", "layer", "step", "model.depth", "train.seed")),
    (SOUND + "CURVES = ('grad_norm',)\n", ("CURVES", "configs.sweep.Curve")),
    (SOUND + "CURVES = {'grad_norm': 'layer'}\n", ("CURVES", "configs.sweep.Curve")),
    (SOUND + "CURVES = Curve('grad_norm', over='layer')\n", ("Curve",)),
    (SOUND + "CURVES = (Curve('grad_norm'),)\n", ("over", "line 6")),
), ids=("syntax", "no axes", "no base", "bad base", "base of another type", "axes without a tuple", "axes of another type", "empty",
        "unknown knob", "exit", "curve over a misspelt axis", "curve over no axis", "curves of another type", "curves as a dictionary",
        "curve without a tuple", "curve over nothing"))
def test_a_broken_sweep_file_is_told(text, told, tmp_path):
    """Whatever is wrong with a sweep file is a UserError of one line or two that names the file and the fault."""
    path = tmp_path / "mine.py"
    path.write_text(text)
    error = complaint(UserError, load_sweep, str(path))
    assert len(error.splitlines()) <= 2 and str(path) in error and all(word in error for word in told), error


@pytest.mark.parametrize(("text", "expected"), (
    ("", ()), ("CURVES = ()\n", ()),
    ("CURVES = [Curve('eval/loss', 'step'), Curve('grad_norm', over='model.depth', layer='last', step='first')]\n",
     (Curve("eval/loss", "step", "mean", "last"), Curve("grad_norm", "model.depth", "last", "first"))),
), ids=("absent", "none", "two"))
def test_curves_are_optional(text, expected, tmp_path):
    """A sweep has the curves that its file asks for, over layers, steps or an axis of its own; without CURVES it has none."""
    path = tmp_path / "mine.py"
    path.write_text(SOUND + text)
    assert load_sweep(str(path)).curves == expected


@pytest.mark.parametrize("changes", (
    {}, {"run.name": "a,b=c", "run.root": "there", "run.resume": True},
    {"optim.betas": (0.5, 0.75), "optim.decay": (), "optim.clip": None, "optim.eps": 1e-30, "instruments.every": None},
), ids=("default", "run section", "tuples and None"))
def test_a_config_written_as_json_loads_by_path(changes, tmp_path):
    """What to_json wrote, load reads back by its path, equal in every knob, the run section with it."""
    config, path = replace(BASE, changes), tmp_path / "x.json"
    path.write_text(to_json(config))
    found = load(str(path))
    assert found == config and flatten(found) == flatten(config)


def test_a_damaged_json_is_told(tmp_path):
    """A config.json that was cut short is a UserError that names the file."""
    path = tmp_path / "x.json"
    path.write_text(to_json(BASE)[:100])
    assert str(path) in complaint(UserError, load, str(path))


@pytest.mark.parametrize(("knob", "value", "hint"), (("layer", "lst", "'last'"), ("step", "frist", "'first'"), ("key", 3, "str")))
def test_a_curve_with_a_wrong_word_is_refused(knob, value, hint):
    """A curve tells of a wrong layer, step or key when it is made, with the nearest right word: not after the sweep has run."""
    with pytest.raises(ValueError, match=rf"curve {knob} = {value!r}.*{hint}"):
        Curve(**{"key": "eval/loss", "over": "layer"} | {knob: value})
