"""The experiment: a floor of its own, identity, and the runs that cannot be."""

import subprocess
import sys
import typing
from pathlib import Path

import pytest

from configs.knobs import diff, flatten, knob_types, replace
from configs.load import fingerprint, from_json, to_json
from configs.schema import Experiment
from tests.configs.test_knobs import refusal

ROOT = Path(__file__).parent.parent.parent


def test_imports_nothing_but_the_standard_library():
    """Importing the configs in a fresh interpreter loads no package from outside the standard library."""
    code = ("import sys; before = set(sys.modules); import configs.schema, configs.load, configs.base; "
            "print(*{name.split('.')[0] for name in set(sys.modules) - before})")
    loaded = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    assert "configs" in loaded
    assert set(loaded) <= sys.stdlib_module_names | {"configs"}


IMPOSSIBLE = [
    ({"optim.learning_rate": 0.0}, "optim.learning_rate = 0.0"), ({"optim.learning_rate": float("nan")}, "optim.learning_rate = nan"),
    ({"optim.warmup": -1}, "optim.warmup = -1"), ({"optim.warmup": 300}, "train.steps = 300"),
    ({"optim.betas": (0.9, 1.0)}, "optim.betas"),
    ({"optim.floor": 2.0}, "optim.floor = 2.0"), ({"optim.cooldown": 0.0}, "optim.cooldown = 0.0"),
    ({"optim.clip": 0.0}, "optim.clip = 0.0"),
    ({"optim.weight_decay": -0.1}, "optim.weight_decay = -0.1"), ({"optim.eps": -1e-8}, "optim.eps = -1e-08"),
    ({"train.steps": -1}, "train.steps = -1"), ({"train.accumulate": 0}, "train.accumulate = 0"),
    ({"train.accumulate": 3}, "data.batch = 16"),
    ({"train.z_loss": -1e-4}, "train.z_loss = -0.0001"),
    ({"data.batch": 0}, "data.batch = 0"), ({"data.sequence": 0}, "data.sequence = 0"),
    ({"model.learned_positions": True, "model.context": 127}, "data.sequence = 128"),
    ({"model.learned_positions": True, "model.context": 128, "data.sequence": 129}, "model.context = 128"),
    ({"mesh.data": 0}, "mesh.data = 0"), ({"mesh.fsdp": -1}, "mesh.fsdp = -1"), ({"mesh.tensor": 0}, "mesh.tensor = 0"),
    ({"mesh.data": 3}, "mesh.data x mesh.fsdp x mesh.expert = 3"),
    ({"mesh.data": 4, "mesh.fsdp": 2, "train.accumulate": 4}, "mesh.data x mesh.fsdp x mesh.expert = 8"),
    ({"mesh.data": 16}, "instruments.probe_batch = 8"),
    ({"mesh.fsdp": 4, "model.width": 90, "model.attention.head_width": 8}, "model.width = 90"),
    ({"mesh.tensor": 3}, "model.attention.heads = 4"), ({"mesh.tensor": 4, "model.mlp.width": 6}, "model.mlp.width = 6"),
    ({"mesh.tensor": 2, "model.overrides": ("2: mlp.width=7",)}, "layer 2"),
    ({"model.vocab": 255}, "model.vocab = 255"),
    ({"instruments.every": 0}, "instruments.every = 0"), ({"instruments.probe_every": -5}, "None for off"),
    ({"instruments.probe_batch": 0}, "instruments.probe_batch = 0"), ({"instruments.rows": 0}, "instruments.rows = 0"),
    ({"eval.every": 0}, "eval.every = 0"), ({"eval.batches": 0}, "eval.batches = 0"), ({"checkpoint.every": 0}, "checkpoint.every = 0"),
    ({"checkpoint.keep": 0}, "checkpoint.keep = 0"),
    ({"data.skip": ((-1, 2),)}, "data.skip = ((-1, 2),)"), ({"data.skip": ((4, 0),)}, "data.skip = ((4, 0),)"),
    ({"spikes.deviations": 0.0}, "spikes.deviations = 0.0"), ({"spikes.window": 19}, "spikes.window = 19"),
    ({"spikes.ring": 0}, "spikes.ring = 0"),
]


@pytest.mark.parametrize(("changes", "named"), IMPOSSIBLE, ids=str)
def test_impossible_runs(changes, named):
    """A run that cannot be is refused in one line that names the knob and its value, or what it clashes with."""
    assert named in refusal(changes)


KNOBS = knob_types(Experiment)
EXAMPLES = {"model.pattern": ("norm.kind=layer",), "model.overrides": ("0: norm.kind=layer",), "data.source": "some/text.txt",
            "data.skip": ((40, 8), (60, 1))}
MSCALES = {"model.rope.scaling.mscale": 1.0, "model.rope.scaling.mscale_all_dim": 1.0}
GROUPS = {"model.moe.groups": 2, "model.moe.group_top_k": 1}
NEEDS = {  # what must be set for a knob to have another value
    "model.learned_positions": {"model.context": 128}, "model.mlp.limit": {"model.mlp.gated": True},
    "model.mlp.up_offset": {"model.mlp.gated": True}, "model.attention.qk_norm.values": {"model.attention.qk_norm.kind": "head"},
    "model.rope.scaling.mscale": MSCALES, "model.rope.scaling.mscale_all_dim": MSCALES,
    "model.moe.groups": GROUPS, "model.moe.group_top_k": GROUPS, "mesh.expert": {"model.moe.experts": 4},
}


def others(kind, value):
    """Values of a type other than this one."""
    options, arguments = typing.get_origin(kind), typing.get_args(kind)
    if options is typing.Literal:
        yield from (choice for choice in arguments if choice != value)
    elif options is tuple:
        yield from ((value or ())[:-1], (value or ())[:1] * 2, *((other,) for other in others(arguments[0], None)))
    elif arguments:
        yield from (other for option in arguments for other in others(option, value))
        yield from () if value is None else (None,)
    elif kind is bool:
        yield not value
    elif kind in (int, float):
        yield from (kind((value or 0) * factor + plus) for factor, plus in ((2, 0), (1, 1), (0.5, 0), (1.5, 0.5), (0, 8)))
    elif kind is str:
        yield f"{value} other"


def changed(knob: str, base: Experiment) -> Experiment:
    """The experiment with another value of this knob alone."""
    default = flatten(base)[knob]
    for value in (EXAMPLES[knob],) if knob in EXAMPLES else others(KNOBS[knob], default):
        try:
            config = replace(base, {knob: value})
        except ValueError:
            continue
        if flatten(config)[knob] != default:
            return config
    pytest.fail(f"{knob} has no other value by itself: say in NEEDS what else must be set")


LONELY = {knob for knob, kind in KNOBS.items() if typing.get_origin(kind) is typing.Literal and len(typing.get_args(kind)) == 1}


@pytest.mark.parametrize("knob", sorted(KNOBS.keys() - LONELY))
def test_every_knob_counts(knob):
    """Any knob outside the run section changes the fingerprint and alone makes the diff; a knob of the run section does neither."""
    base = replace(Experiment(), NEEDS.get(knob, {}))
    config = changed(knob, base)
    counts = not knob.startswith("run.")
    assert (fingerprint(config) != fingerprint(base)) == counts
    assert list(diff(config, base)) == [knob] * counts
    assert from_json(to_json(config)) == config


def test_fingerprint():
    """A fingerprint is twelve hexadecimal digits, equal for equal configs, however a number was written."""
    assert len(fingerprint(Experiment())) == 12
    int(fingerprint(Experiment()), 16)
    ours, theirs = (replace(Experiment(), {"model.rope.theta": theta}) for theta in (10_000, 10_000.0))
    assert ours == theirs
    assert fingerprint(ours) == fingerprint(theirs)
