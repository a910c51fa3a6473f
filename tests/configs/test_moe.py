"""Mixtures that cannot be, and those that can."""

import pytest

from configs.knobs import replace
from configs.schema import Experiment
from tests.configs.test_knobs import refusal

MOE = "model.moe."
EIGHT = {MOE + "experts": 8}
CHOOSING = EIGHT | {MOE + "choice": "expert", MOE + "normalise": False}
LONG = EIGHT | {"mesh.expert": 3, "data.batch": 12, "instruments.probe_batch": 6}

IMPOSSIBLE = [  # changes, and what the message must name
    ({MOE + "experts": 0}, "moe.experts = 0"), (EIGHT | {MOE + "top_k": 9}, "between 1 and moe.experts = 8"),
    (EIGHT | {MOE + "top_k": 0}, "moe.top_k = 0"), (EIGHT | {MOE + "width": 0}, "moe.width = 0"), ({MOE + "shared": -1}, "moe.shared = -1"),
    (EIGHT | {MOE + "groups": 3, MOE + "group_top_k": 1}, "moe.groups = 3: must divide moe.experts = 8; the nearest is 2"),
    (EIGHT | {MOE + "groups": 4}, "both or neither"), (EIGHT | {MOE + "group_top_k": 1}, "both or neither"),
    (EIGHT | {MOE + "groups": 4, MOE + "group_top_k": 5}, "between 1 and moe.groups = 4"),
    (EIGHT | {MOE + "groups": 4, MOE + "group_top_k": 1, MOE + "top_k": 3}, "moe.group_top_k = 1 groups have only 2 experts"),
    ({MOE + "capacity": 0.5}, "moe.capacity = 0.5"), ({MOE + "jitter": 1.0}, "moe.jitter = 1.0"), ({MOE + "jitter": 0.0}, "None for off"),
    ({MOE + "bias_rate": 1e-3}, "set moe.selection_bias to True"),
    ({MOE + "selection_bias": True, MOE + "bias_rate": -1e-3}, "moe.bias_rate = -0.001"),
    ({MOE + "balance": -0.1}, "moe.balance = -0.1"), ({MOE + "z_loss": -0.1}, "moe.z_loss = -0.1"),
    (CHOOSING | {MOE + "normalise": True}, "moe.normalise = True with"),
    (CHOOSING | {MOE + "selection_bias": True}, "moe.selection_bias = True with"),
    (CHOOSING | {MOE + "groups": 4, MOE + "group_top_k": 1}, "moe.groups = 4 with"), (CHOOSING | {MOE + "balance": 0.1}, "even already"),
    (LONG, "mesh.expert = 3: must divide model.moe.experts = 8 of layer 0"), ({"mesh.expert": 2}, "no layer is a mixture"),
    (EIGHT | {"mesh.expert": 8, "train.accumulate": 4}, "mesh.expert = 8: must divide a part"),
    (EIGHT | {"mesh.tensor": 4, MOE + "width": 6}, "model.moe.width = 6 of layer 0"),
    (EIGHT | {MOE + "dispatch": "droples"}, "perhaps you meant 'dropless'"), ({MOE + "router": "sigmod"}, "perhaps you meant 'sigmoid'"),
]


@pytest.mark.parametrize(("changes", "named"), IMPOSSIBLE, ids=lambda value: str(value).replace("model.", ""))
def test_impossible_mixtures(changes, named):
    """A mixture that cannot be is refused in one line that names the knob and its value, or what it clashes with."""
    assert named in refusal(changes)


POSSIBLE = {
    "DeepSeek-V3": {MOE + "experts": 256, MOE + "top_k": 8, MOE + "groups": 8, MOE + "group_top_k": 4, MOE + "router": "sigmoid",
                    MOE + "selection_bias": True, MOE + "bias_rate": 1e-3, MOE + "shared": 1,
                    "model.overrides": ("0-2: moe.experts=None",)},
    "Switch": EIGHT | {MOE + "top_k": 1, MOE + "normalise": False, MOE + "balance": 0.01, MOE + "jitter": 0.01,
                       MOE + "dispatch": "capacity"},
    "expert choice": CHOOSING,
    "every expert": EIGHT | {MOE + "top_k": 8},
    "a width of its own leaves the dense one alone": EIGHT | {"mesh.tensor": 4, MOE + "width": 8, "model.mlp.width": 6},
    "experts over devices, one layer dense": EIGHT | {"mesh.expert": 4, "model.overrides": ("0: moe.experts=None",)},
}


@pytest.mark.parametrize("name", POSSIBLE)
def test_possible_mixtures(name):
    """Published mixtures, and combinations at the edge of the rules, are accepted."""
    assert replace(Experiment(), POSSIBLE[name]).model.mixture


def test_the_first_layers_may_be_dense():
    """An override takes the mixture from the first layers; the knobs of the mixture that are left over do no harm."""
    model = replace(Experiment(), EIGHT | {MOE + "balance": 0.1, "model.overrides": ("0-1: moe.experts=None",)}).model
    assert [layer.moe.experts for layer in model.layers] == [None, None, 8, 8]
    assert not replace(model, {"overrides": ("0-3: moe.experts=None",)}).mixture
