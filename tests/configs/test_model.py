"""The list of layers: patterns, overrides, Mix-LN; and the models that cannot be."""

import pytest

from configs.knobs import replace
from configs.model import Layer, Model
from tests.configs.test_knobs import refusal


def layers(**changes):
    return replace(Model(), changes).layers


def windows(**changes) -> list[int | None]:
    return [layer.attention.window for layer in layers(**changes)]


def test_plain_layers_are_the_models_own_sections():
    """Without pattern and overrides each of `depth` layers is what the model's sections say."""
    model = replace(Model(), {"depth": 3, "norm.kind": "layer", "mlp.width": 8})
    assert model.layers == (Layer(model.norm, model.attention, model.rope, model.mlp),) * 3


@pytest.mark.parametrize("depth", (1, 5, 6, 13))
def test_pattern_repeats(depth):
    """Five local layers to one global, over and over, cut at the depth."""
    assert windows(depth=depth, pattern=("attention.window=4",) * 5 + ("",)) == ([4, 4, 4, 4, 4, None] * 3)[:depth]


def test_overrides_come_after_the_pattern_and_after_each_other():
    """A later override beats an earlier one, and both beat the pattern; knobs that it does not name keep the pattern's value."""
    found = layers(depth=4, pattern=("attention.window=4 mlp.width=8",), overrides=("1-2: attention.window=5", "2: attention.window=None"))
    assert [layer.attention.window for layer in found] == [4, 5, None, 4]
    assert {layer.mlp.width for layer in found} == {8}


def test_changes_of_a_layer_are_checked_together():
    """In one layer two changes may be possible only together."""
    [layer, _] = layers(depth=2, overrides=("0: attention.heads=6 attention.kv_heads=3",))
    assert (layer.attention.heads, layer.attention.kv_heads) == (6, 3)


@pytest.mark.parametrize(("depth", "post"), ((1, 1), (4, 1), (5, 2), (8, 2), (12, 3), (26, 7)))
def test_mix_is_a_quarter_post(depth, post):
    """Mix-LN: the layers that begin in the first quarter of the depth are post-norm, the others pre-norm."""
    found = layers(depth=depth, **{"norm.placement": "mix"})
    assert [layer.norm.placement for layer in found] == ["post"] * post + ["pre"] * (depth - post)


def test_an_override_beats_mix():
    """A layer that names its own placement is no part of the mix."""
    found = layers(depth=4, overrides=("3: norm.placement=sandwich",), **{"norm.placement": "mix"})
    assert [layer.norm.placement for layer in found] == ["post", "pre", "pre", "sandwich"]


ATTENTION, NORM, QK, SCALING = "model.attention.", "model.norm.", "model.attention.qk_norm.", "model.rope.scaling."
YARN, LLAMA3, LONGROPE = ({SCALING + "kind": kind, SCALING + "original": 64} for kind in ("yarn", "llama3", "longrope"))
IMPOSSIBLE = [  # changes, and what the message must name
    ({"model.width": 0}, "model.width = 0"), ({"model.depth": 0}, "model.depth = 0"), ({"model.vocab": -1}, "model.vocab = -1"),
    ({"model.softcap": 0.0}, "model.softcap = 0.0"), ({NORM + "eps": -1e-6}, "eps = -1e-06"), ({"model.mlp.width": 0}, "mlp.width = 0"),
    ({"model.init.std": -0.02}, "init.std = -0.02"),
    ({ATTENTION + "heads": 0}, "attention.heads = 0"), ({ATTENTION + "heads": 7}, "model.width = 96"),
    ({ATTENTION + "heads": 7, ATTENTION + "head_width": 8, ATTENTION + "kv_heads": 2}, "attention.kv_heads = 2"),
    ({ATTENTION + "heads": 6, ATTENTION + "kv_heads": 4}, "the nearest is 3"), ({ATTENTION + "kv_heads": 0}, "attention.kv_heads = 0"),
    ({ATTENTION + "kv_heads": 8}, "attention.heads = 4"), ({ATTENTION + "window": 0}, "attention.window = 0"),
    ({ATTENTION + "softcap": -1.0}, "attention.softcap = -1.0"), ({ATTENTION + "head_width": 0}, "head_width = 0"),
    ({ATTENTION + "head_width": -4, "model.rope.theta": None}, "head_width = -4"),
    ({ATTENTION + "head_width": 5}, "rope.fraction"), ({"model.rope.fraction": 0.3}, "rope.fraction = 0.3"),
    ({"model.rope.fraction": 0.0}, "rope.fraction = 0.0"), ({"model.rope.fraction": 1.5}, "rope.fraction = 1.5"),
    ({"model.rope.theta": 0.0}, "rope.theta = 0.0"), ({"model.rope.theta": 1.0}, "rope.theta = 1.0"),
    ({SCALING + "factor": 0.5}, "rope.scaling.factor = 0.5"), ({SCALING + "kind": "yarm"}, "'yarn'"),
    *(({SCALING + "kind": kind, SCALING + "original": original}, f"rope.scaling.original = {original}: kind {kind!r}")
      for kind in ("dynamic", "yarn", "llama3", "longrope") for original in (None, 0, 1)),
    ({SCALING + "attention_factor": 0.0}, "rope.scaling.attention_factor = 0.0"),
    ({SCALING + "mscale": 1.0}, "rope.scaling.mscale = 1.0"), ({SCALING + "mscale_all_dim": 1.0}, "mscale_all_dim = 1.0"),
    (YARN | {SCALING + "beta_slow": 32.0}, "rope.scaling.beta_slow = 32.0"), (YARN | {SCALING + "beta_slow": 0.0}, "beta_slow = 0.0"),
    (YARN | {SCALING + "beta_fast": 0.5}, "beta_fast = 0.5"),
    (LLAMA3 | {SCALING + "low_frequency": 4.0}, "rope.scaling.low_frequency = 4.0"),
    (LLAMA3 | {SCALING + "high_frequency": 1.0}, "high_frequency = 1.0"),
    (LONGROPE, "0 and 0 factors"), (LONGROPE | {SCALING + "short": (1.0,) * 12}, "12 and 0 factors"),
    (LONGROPE | {SCALING + "short": (1.0,) * 12, SCALING + "long": (2.0,) * 11}, "12 and 11 factors"),
    (LONGROPE | {SCALING + "short": (1.0,) * 11, SCALING + "long": (2.0,) * 11}, "11 factors for 12 frequencies"),
    ({SCALING + "short": (1.0, 0.0)}, "rope.scaling.short = (1.0, 0.0)"), ({SCALING + "long": (-1.0,)}, "rope.scaling.long = (-1.0,)"),
    ({ATTENTION + "clip": 0.0}, "attention.clip = 0.0"), ({ATTENTION + "clip": -8.0}, "attention.clip = -8.0"),
    ({"model.mlp.limit": 0.0, "model.mlp.gated": True}, "mlp.limit = 0.0"), ({"model.mlp.limit": 7.0}, "mlp.gated"),
    ({"model.mlp.up_offset": 1.0}, "mlp.gated"), ({"model.mlp.kind": "gelu_fast"}, "model.mlp.kind = 'gelu_fast'"),
    ({"model.context": 0}, "model.context = 0"), ({"model.learned_positions": True}, "model.context"),
    ({QK + "kind": "l2", ATTENTION + "scale": 1.0}, "attention.scale = 1.0"), ({QK + "values": True}, "qk_norm.values"),
    ({QK + "kind": "l2", QK + "values": True}, "qk_norm.values"), ({QK + "kind": "head", QK + "norm.kind": "none"}, "qk_norm.norm.kind"),
    ({NORM + "placement": "hybrid"}, "qk_norm"), ({NORM + "placement": "hybrid", QK + "kind": "head"}, "qk_norm.values"),
    ({NORM + "placement": "parallel", NORM + "mlp_slots": ("in",)}, "norm.mlp_slots"),
    ({"model.init.kind": "deepnorm"}, "model.init.kind"), ({"model.init.kind": "deepnorm", NORM + "placement": "post"}, "'post'"),
    ({"model.pattern": ("attention.heads=7",)}, "layer 0"), ({"model.pattern": ("", "norm.knd=rms")}, "norm.kind"),
    ({"model.pattern": ("norm.kind",)}, "knob=value"), ({"model.pattern": ("norm.kind=rsm",)}, "'rms'"),
    ({"model.overrides": ("norm.kind=rms",)}, "layer: knob=value"), ({"model.overrides": ("4: mlp.width=8",)}, "0 to 3"),
    ({"model.overrides": ("2-1: mlp.width=8",)}, "2-1"), ({"model.overrides": ("0: width=8",)}, "'width'"),
    ({"model.overrides": ("1: norm.placement=hybrid",)}, "layer 1"), ({"model.overrides": ("0: mlp.width=wide",)}, "mlp.width = 'wide'"),
    ({NORM + "placement": "deepnorm", "model.init.kind": "deepnorm", "model.overrides": ("0: norm.placement=pre",)}, "model.init.kind"),
]


@pytest.mark.parametrize(("changes", "named"), IMPOSSIBLE, ids=lambda value: str(value).replace("model.", ""))
def test_impossible_models(changes, named):
    """A model that cannot be is refused in one line that names the knob and its value, or what it clashes with."""
    assert named in refusal(changes)
