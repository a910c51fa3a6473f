"""The knobs of the model: MLP, initial values, and the list of layers they make up with norms and attention."""

import dataclasses
import re
from dataclasses import dataclass
from typing import Literal

from configs.attention import Attention, Rope
from configs.knobs import check_values, flatten, parse_changes, replace, require
from configs.moe import Moe
from configs.norm import Norm

Activation = Literal["gelu", "gelu_tanh", "gelu_quick", "relu", "relu2", "silu"]
InitKind = Literal["auto", "normal", "scaled", "fan_in", "deepnorm"]

DEEPEST = 4096
"""Layers: above it a number is a slip."""


@dataclass(frozen=True)
class Mlp:
    """The feed-forward branch."""

    kind: Activation = "gelu"
    """Activation: gelu is the exact one, relu2 the squared."""
    width: int = 384
    """Hidden width f."""
    gated: bool = False
    """activation(gate x) * (up x) in place of activation(up x); silu and gated is SwiGLU."""
    bias: bool = False
    """Biases on its projections."""
    limit: float | None = None
    """Gated: the gate is limited from above, up on both sides, before the activation (gpt-oss)."""
    up_offset: float = 0.0
    """Gated: added to up (gpt-oss: 1)."""

    def __post_init__(self):
        require(self.width > 0, f"mlp.width = {self.width}: must be positive")
        require(self.limit is None or self.limit > 0, f"mlp.limit = {self.limit}: must be positive, or None for no limit")
        require(self.gated or (self.limit is None and self.up_offset == 0),
                "mlp.limit and mlp.up_offset change the gate: set mlp.gated to True")


@dataclass(frozen=True)
class Init:
    """Initial values."""

    kind: InitKind = "auto"
    """auto: by placement; normal: N(0, std); scaled: branch outputs / sqrt(2 depth); fan_in: 1 / sqrt(fan in); deepnorm: Xavier, branches
    times (8 depth)^(-1/4)."""
    std: float = 0.02
    """Standard deviation of kinds normal and scaled, and of the embedding."""

    def __post_init__(self):
        require(self.std >= 0, f"init.std = {self.std}: must not be negative")


@dataclass(frozen=True)
class Layer:
    """What one layer is made of: what `model.pattern` and `model.overrides` change."""

    norm: Norm = Norm()
    """Norms around the residual branches."""
    attention: Attention = Attention()
    """Attention."""
    rope: Rope = Rope()
    """Rotary position embedding."""
    mlp: Mlp = Mlp()
    """Feed-forward branch."""
    moe: Moe = Moe()
    """Mixture of experts in its place."""


@dataclass(frozen=True)
class Model(Layer):
    """A decoder-only transformer: what every layer holds unless changed, and the frame around the layers."""

    width: int = 96
    """Width d of the residual stream."""
    depth: int = 4
    """Number of layers."""
    vocab: int = 256
    """Number of token kinds."""
    pattern: tuple[str, ...] = ()
    """Repeating pattern of changes, one text per layer: 'attention.window=512 rope.theta=1e4', or '' for none."""
    overrides: tuple[str, ...] = ()
    """Changes to single layers or ranges, after the pattern: '0: mlp.width=512', '0-2: norm.placement=post'."""
    tied: bool = True
    """The output head is the embedding."""
    embedding_scale: float | None = None
    """Factor on the embedding (Gemma: sqrt(width))."""
    softcap: float | None = None
    """Soft cap on the output logits."""
    context: int | None = None
    """Positions the model is made for: with learned positions the longest sequence, else what an exported checkpoint states."""
    learned_positions: bool = False
    """Add a learned vector for each of the `context` positions to the embedding (GPT-2)."""
    init: Init = Init()
    """Initial values."""
    stack: Literal["auto", "scan", "unroll"] = "auto"
    """How repeated layers run; auto: unrolled up to 8 repeats, scanned above. The numbers are the same."""

    def __post_init__(self):
        check_values(flatten(self), "model.")
        require(self.depth <= DEEPEST, f"model.depth = {self.depth}: must be at most {DEEPEST}")
        for knob in ("width", "depth", "vocab"):
            require(getattr(self, knob) > 0, f"model.{knob} = {getattr(self, knob)}: must be positive")
        require(self.softcap is None or self.softcap > 0, f"model.softcap = {self.softcap}: must be positive, or None for no cap")
        require(self.context is None or self.context > 0, f"model.context = {self.context}: must be positive, or None for no limit")
        require(not self.learned_positions or self.context is not None,
                "model.learned_positions = True: needs a vector for each position; set model.context to their number")
        for index, layer in enumerate(self.layers):
            check_layer(f"layer {index}", layer, self.width)
        placements = {layer.norm.placement for layer in self.layers}
        require(self.init.kind != "deepnorm" or placements == {"deepnorm"},
                f"model.init.kind = 'deepnorm' with norm.placement {sorted(placements)}: its small branches need the placement "
                "'deepnorm'; use auto, normal, scaled or fan_in")

    @property
    def layers(self) -> tuple[Layer, ...]:
        """The configuration of each layer, in order. Raises ValueError for a change that names no knob of a layer."""
        common = Layer(**{knob.name: getattr(self, knob.name) for knob in dataclasses.fields(Layer)})
        changes: list[dict[str, object]] = [{} for _ in range(self.depth)]
        for index in range(self.depth if self.pattern else 0):
            changes[index] |= parse_changes(self.pattern[index % len(self.pattern)])
        for text in self.overrides:
            match = re.fullmatch(r"\s*(\d+)(?:-(\d+))?\s*:(.*)", text, re.S)
            require(match is not None, f"model.overrides {text!r}: must read 'layer: knob=value' or 'first-last: knob=value'")
            first, last = int(match[1]), int(match[2] or match[1])
            require(first <= last < self.depth, f"model.overrides {text!r}: layers go from 0 to {self.depth - 1}")
            for index in range(first, last + 1):
                changes[index] |= parse_changes(match[3])
        return tuple(without_mix(replace(common, change), index, self.depth) for index, change in enumerate(changes))

    @property
    def mixture(self) -> bool:
        """Whether some layer is a mixture of experts."""
        return any(layer.moe.experts is not None for layer in self.layers)


def check_layer(name: str, layer: Layer, width: int) -> None:
    """The rules between the sections of one layer."""
    check_values(flatten(layer), f"{name}: ")
    attention, rope = layer.attention, layer.rope
    require(attention.head_width is not None or width % attention.heads == 0,
            f"{name}: model.attention.heads = {attention.heads} must divide model.width = {width}, or set model.attention.head_width")
    k = attention.width_of_head(width)
    if rope.theta is not None:
        rotary = rope.turning(k)
        require(rotary == int(rotary) and int(rotary) % 2 == 0 and rotary >= 2,
                f"{name}: rope.fraction = {rope.fraction} of head width {k} is {rotary:g} dimensions: must be a positive even number")
        require(rope.scaling.kind != "longrope" or len(rope.scaling.short) == rotary / 2,
                f"{name}: rope.scaling.short has {len(rope.scaling.short)} factors for {rotary / 2:g} frequencies")
    require(layer.norm.placement != "hybrid" or (attention.qk_norm.kind != "none" and attention.qk_norm.values),
            f"{name}: norm.placement = 'hybrid' normalises q, k and v: set model.attention.qk_norm.kind to head and "
            "model.attention.qk_norm.values to True")
    require(layer.norm.placement != "parallel" or layer.norm.mlp_slots is None,
            f"{name}: norm.mlp_slots = {layer.norm.mlp_slots} with placement 'parallel': its one input norm belongs to attention_slots")


def without_mix(layer: Layer, index: int, depth: int) -> Layer:
    """Mix-LN (Li, Yin and Liu 2024, arXiv 2412.13795): the first quarter of the layers is post-norm, the rest pre-norm."""
    if layer.norm.placement != "mix":
        return layer
    return replace(layer, {"norm.placement": "post" if index < depth / 4 else "pre"})
