"""Initial values: the table of standard deviations, and weights that models share by name and shape."""

import math

import jax.numpy as jnp
import numpy as np
import pytest

from configs.norm import NormContract
from models import init, parameters
from models.init import INITS, initialise
from models.norms import NORMS, PLACEMENTS, Norm
from models.transformer import Transformer
from tests.models import reference
from tests.models.reference import EPS32, assert_close, by_layer, draw, tiny

SIGMAS = 5  # a sampling error beyond five of its standard deviations happens once in two million draws


def initial(model, seed=0):
    """(table, values, [weights of each layer])."""
    rows = parameters.table(Transformer(model))
    values = initialise(rows, model, seed)
    return rows, values, by_layer(rows, values, model.depth)


def assert_shared(ours: list[dict], theirs: list[dict], least: int = 6) -> None:
    """In every layer that both have, each weight of the same name and shape has the same values."""
    for a, b in zip(ours, theirs, strict=False):
        shared = [name for name in a.keys() & b.keys() if name.endswith("weight") and a[name].shape == b[name].shape]
        assert len(shared) >= least
        for name in shared:
            np.testing.assert_array_equal(a[name], b[name])


NORMAL = {"init.kind": "normal"}
HYBRID = {"attention.qk_norm.kind": "head", "attention.qk_norm.values": True}


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_placements_share_weights(placement):
    """Under one init kind two placements start from the same weights, embedding included, for the same seed."""
    _, ours, layers = initial(tiny(NORMAL | HYBRID | {"norm.placement": placement}))
    _, theirs, pre = initial(tiny(NORMAL))
    assert_shared(layers, pre)
    np.testing.assert_array_equal(ours["embed"], theirs["embed"])


@pytest.mark.parametrize("changes", (
    {"pattern": ("", "attention.window=4")}, {"pattern": ("", "", "attention.window=4")}, {"overrides": ("2: attention.window=4",)},
    {"overrides": ("1: mlp.gated=True",)}, {"stack": "scan"}, {"stack": "unroll"}, {"tied": False},
))
def test_grouping_does_not_move_weights(changes):
    """A layer's weights depend on its number and their names, not on the segment that holds it or what stands beside it."""
    base = NORMAL | {"depth": 6}
    assert_shared(initial(tiny(base | changes))[2], initial(tiny(base))[2])


def test_another_width_in_one_layer_leaves_the_others():
    """Overriding the MLP width of layer 1 redraws its two MLP weights and nothing else."""
    ours, theirs = initial(tiny(NORMAL | {"overrides": ("1: mlp.width=8",)}))[2], initial(tiny(NORMAL))[2]
    assert_shared(ours, theirs, least=4)
    assert_shared([ours[0], ours[2]], [theirs[0], theirs[2]], least=6)


def test_normal_does_not_know_the_depth():
    """Under `normal` a deeper model starts from the same first layers."""
    assert_shared(initial(tiny(NORMAL | {"depth": 5}))[2], initial(tiny(NORMAL | {"depth": 3}))[2])


def test_no_two_weights_are_copies():
    """Layers, names and seeds each draw numbers of their own."""
    weights = [layer[name] for seed in (0, 1) for layer in initial(tiny(NORMAL), seed)[2] for name in layer
               if name.startswith("attention") and name.endswith("weight")]
    flat = [weight.reshape(-1) for weight in weights]
    assert len({weight.tobytes() for weight in flat}) == len(flat) == 2 * 3 * 4


D, F, HEADS, KV, K, DEPTH = 48, 96, 4, 2, 12, 3
FANS = {  # inputs, outputs
    "attention.q": (D, HEADS * K), "attention.k": (D, KV * K), "attention.v": (D, KV * K), "attention.out": (HEADS * K, D),
    "mlp.up": (D, F), "mlp.gate": (D, F), "mlp.down": (F, D), "head": (D, 64), "embed": (64, D),
}


def deviation(kind: str, role: str) -> float:
    """The table, written out."""
    if role == "embed":
        return 0.02
    fan_in, fan_out = FANS[role]
    branch_output, value_path = role in ("attention.out", "mlp.down"), role.startswith("mlp") or role in ("attention.v", "attention.out")
    return {
        "normal": 0.02,
        "scaled": 0.02 / math.sqrt(2 * DEPTH) if branch_output else 0.02,
        "fan_in": 1 / math.sqrt(fan_in),
        "deepnorm": math.sqrt(2 / (fan_in + fan_out)) * ((8 * DEPTH) ** -0.25 if value_path else 1),
    }[kind]


@pytest.mark.parametrize("kind", INITS)
def test_standard_deviations(kind):
    """Mean and standard deviation of every weight are those of the table, within the error of so many draws."""
    model = tiny({"width": D, "depth": DEPTH, "vocab": 64, "mlp.width": F, "mlp.gated": True, "attention.kv_heads": KV, "tied": False,
                  "init.kind": kind, "norm.placement": "deepnorm"})
    rows, values, _ = initial(model)
    drawn = [row for row in rows if row.constant is None]
    assert {row.role for row in drawn} == set(FANS)
    for row in drawn:
        w, std = np.asarray(values[row.path], np.float64), deviation(kind, row.role)
        assert abs(w.std() - std) < SIGMAS * std / math.sqrt(2 * w.size), row.role
        assert abs(w.mean()) < SIGMAS * std / math.sqrt(w.size), row.role


def test_std_is_a_knob():
    """init.std scales every weight of `normal`, and the embedding under every kind."""
    ours, theirs = initial(tiny(NORMAL | {"init.std": 0.5}))[1], initial(tiny(NORMAL | {"init.std": 0.25}))[1]
    for path, value in ours.items():
        if path.endswith("weight") or path == "embed":
            np.testing.assert_array_equal(value, 2 * theirs[path])


def test_auto_follows_the_placement():
    """`auto` is GPT-2's scaled for pre-norm, Xavier with small branches for DeepNorm, and no second shrinking under LayerNorm Scaling."""
    kind = lambda placement: init.kind(tiny({"norm.placement": placement}))
    assert (kind("pre"), kind("deepnorm")) == ("scaled", "deepnorm")
    assert kind("layernorm_scaling") != "scaled"
    assert {init.kind(tiny({"norm.placement": placement} | HYBRID)) for placement in PLACEMENTS} <= set(INITS)


def test_warning_of_a_fight():
    """LayerNorm Scaling with scaled init is told in one line that names both; no placement fights with its own `auto`."""
    line = init.warning(tiny({"norm.placement": "layernorm_scaling", "init.kind": "scaled"}))
    assert "layernorm_scaling" in line and "scaled" in line and "\n" not in line
    assert init.warning(tiny({"norm.placement": "layernorm_scaling", "init.kind": "normal"})) is None
    assert [init.warning(tiny({"norm.placement": placement} | HYBRID)) for placement in PLACEMENTS] == [None] * len(PLACEMENTS)


@pytest.mark.parametrize("changes", (
    {"pattern": ("norm.placement=layernorm_scaling",)}, {"overrides": ("0-2: norm.placement=layernorm_scaling",)},
))
def test_warning_of_a_fight_inside_the_layers(changes):
    """The warning goes by the layers as they are, also where a pattern or an override placed the norm."""
    assert init.warning(tiny({"init.kind": "scaled"} | changes)) is not None


@pytest.mark.parametrize("scale", ("w", "1+w"))
@pytest.mark.parametrize("kind", NORMS)
def test_norms_start_without_gain_and_bias(kind, scale):
    """However its gain is stored, a new norm multiplies by one and adds zero; tanh starts with a factor 1/2 inside."""
    norm = Norm(NormContract(kind, scale=scale, bias=True), (16,))
    x = draw("x", 4, 16).astype(np.float32)
    y = parameters.bind(norm, initialise(parameters.table(norm), tiny(), 0))(jnp.asarray(x))
    assert_close(y, reference.norm(x.astype(np.float64), kind, alpha=0.5), 4 * 16, EPS32)


def test_other_constants():
    """Biases and sinks start at zero, a learned temperature at its knob."""
    model = tiny({"attention.sinks": True, "attention.bias": ("q", "k", "v", "out"), "mlp.bias": True, "attention.qk_norm.kind": "l2",
                  "attention.qk_norm.temperature": 7.0})
    rows, values, _ = initial(model)
    constants = {row.role: set(np.unique(values[row.path])) for row in rows if row.group in ("bias", "sinks", "qk_norm")}
    biases = [f"attention.{name}.bias" for name in ("q", "k", "v", "out")] + ["mlp.up.bias", "mlp.down.bias"]
    assert constants == {"qk_norm.temperature": {7.0}, "attention.sinks": {0.0}} | {role: {0.0} for role in biases}
