"""The knobs of the model: norms, attention, rotary embedding, MLP, and the list of layers they make up."""

import dataclasses
import re
from dataclasses import dataclass
from typing import Literal

from configs.knobs import parse_changes, replace, require

NormKind = Literal["layer", "rms", "l2", "dyt", "none"]
PlacementName = Literal[
    "none", "pre", "post", "sandwich", "reordered", "deepnorm", "layernorm_scaling", "hybrid", "mix", "parallel"
]
Slot = Literal["in", "branch", "out"]
QKNormKind = Literal["none", "head", "head_each", "whole", "l2"]
Kernel = Literal["dense"]
Activation = Literal["gelu", "gelu_tanh", "relu", "relu2", "silu"]
InitKind = Literal["auto", "normal", "scaled", "fan_in", "deepnorm"]


@dataclass(frozen=True)
class NormContract:
    """What a norm computes, in full: two norms with equal contracts give equal numbers."""

    kind: NormKind = "rms"
    """layer: centred, root mean square; rms: root mean square; l2: Euclidean length; dyt: tanh; none: identity."""
    eps: float = 1e-6
    """Guards the division, at the place that eps_position names."""
    eps_position: Literal["inside", "outside", "floor"] = "inside"
    """inside: sqrt(m + eps); outside: sqrt(m) + eps; floor: max(sqrt(m), eps)."""
    centring: Literal["kind", "yes", "no"] = "kind"
    """Subtract the mean first; kind: as the norm's own kind does (layer: yes, the others: no)."""
    scale: Literal["w", "1+w"] | None = "w"
    """How the learned gain is stored: as the factor, as its offset from one, or None: no gain."""
    bias: bool = False
    """Add a learned bias."""
    statistics: Literal["float32", "input"] = "float32"
    """Precision of the statistics: at least float32, or that of the input."""
    scale_cast: Literal["before", "after"] = "before"
    """Multiply by the gain before the cast back to the input's precision (Gemma), or after it (Llama)."""

    def __post_init__(self):
        require(self.eps >= 0, f"norm eps = {self.eps}: must not be negative, such as 1e-6")

    def words(self, over: int = 1) -> str:
        """The contract as one line; `over`: trailing axes that share one statistic."""
        if self.kind == "none":
            return "none"
        centred = self.centring == "yes" or (self.centring == "kind" and self.kind == "layer")
        eps = {"inside": f"sqrt(m + {self.eps:g})", "outside": f"sqrt(m) + {self.eps:g}", "floor": f"max(sqrt(m), {self.eps:g})"}
        parts = [self.kind, "centred" if centred else "not centred", *([] if self.kind == "dyt" else [eps[self.eps_position]])]
        parts += [f"scale {self.scale} {self.scale_cast} the cast" if self.scale else "no scale", "bias" if self.bias else "no bias"]
        return ", ".join([*parts, f"statistics {self.statistics}", *(["over all heads"] if over > 1 else [])])


@dataclass(frozen=True)
class Norm(NormContract):
    """The norms around the residual branches: their contract and their place."""

    placement: PlacementName = "pre"
    """Which slots of x <- out(alpha x + beta branch(f(gain in(x)))) hold a norm, and the three factors."""
    attention_slots: tuple[Slot, ...] | None = None
    """By hand: the slots of the attention branch. None: as the placement says."""
    mlp_slots: tuple[Slot, ...] | None = None
    """By hand: the slots of the MLP branch. None: as the placement says."""
    gain: float | None = None
    """By hand: factor on the branch's input. None: as the placement says."""
    alpha: float | None = None
    """By hand: factor on the residual stream. None: as the placement says."""
    beta: float | None = None
    """By hand: factor on the branch's output. None: as the placement says."""
    final: bool | None = None
    """Norm before the output head. None: as the placement says."""


@dataclass(frozen=True)
class QKNorm:
    """Norm of queries and keys."""

    kind: QKNormKind = "none"
    """head: one [k] gain for all heads; head_each: a [k] gain for each head; whole: over the concatenated heads;
    l2: unit length and a learned temperature per head in place of attention.scale."""
    position: Literal["before", "after"] = "before"
    """Before or after RoPE."""
    values: bool = False
    """Normalise the values too (HybridNorm's QKV-norm)."""
    temperature: float = 10.0
    """Initial temperature of kind l2."""
    norm: NormContract = NormContract()
    """The contract of kinds head, head_each and whole."""

    def __post_init__(self):
        require(not (self.values and self.kind in ("none", "l2")),
                f"attention.qk_norm.values = True with kind {self.kind!r}: values take the norm of kind head, head_each or whole")
        require(self.kind not in ("head", "head_each", "whole") or self.norm.kind != "none",
                f"attention.qk_norm.norm.kind = 'none' with qk_norm.kind {self.kind!r}: nothing would be normalised; set kind to none")


@dataclass(frozen=True)
class Attention:
    """Causal self-attention with grouped queries."""

    heads: int = 4
    """Query heads."""
    kv_heads: int | None = None
    """Key and value heads (1: multi-query). None: as many as query heads."""
    head_width: int | None = None
    """Width of a head. None: model.width / heads."""
    scale: float | None = None
    """Factor on q.k. None: 1 / sqrt(head width)."""
    softcap: float | None = None
    """Soft cap c on the logits: c tanh(z / c)."""
    window: int | None = None
    """Keys a query sees, itself included: 0 <= t - s < window."""
    sinks: bool = False
    """One learned logit per head that takes part in the softmax and carries no value."""
    bias: tuple[Literal["q", "k", "v", "out"], ...] = ()
    """Projections with a bias."""
    qk_norm: QKNorm = QKNorm()
    """Norm of queries and keys."""
    kernel: Kernel = "dense"
    """How attention is computed; each kernel gives the same numbers."""

    def __post_init__(self):
        require(self.heads > 0, f"attention.heads = {self.heads}: must be positive")
        require(self.head_width is None or self.head_width > 0,
                f"attention.head_width = {self.head_width}: must be positive, or None for model.width / heads")
        groups = self.kv_heads or self.heads
        require(self.kv_heads is None or self.kv_heads > 0, f"attention.kv_heads = {self.kv_heads}: must be positive")
        divisors = [n for n in range(1, self.heads + 1) if self.heads % n == 0]
        require(self.heads % groups == 0,
                f"attention.kv_heads = {groups}: must divide attention.heads = {self.heads}; "
                f"the nearest is {min(divisors, key=lambda n: abs(n - groups))}")
        require(self.window is None or self.window > 0, f"attention.window = {self.window}: must be positive, or None for no window")
        require(self.softcap is None or self.softcap > 0, f"attention.softcap = {self.softcap}: must be positive, or None for no cap")
        require(self.qk_norm.kind != "l2" or self.scale is None,
                f"attention.scale = {self.scale} with qk_norm.kind 'l2': the learned temperature is the scale; leave it None")


@dataclass(frozen=True)
class RopeScaling:
    """How rotary frequencies are stretched for longer contexts."""

    kind: Literal["none", "linear"] = "none"
    """none: as trained; linear: positions divided by the factor (position interpolation)."""
    factor: float = 1.0
    """The stretch."""

    def __post_init__(self):
        require(self.factor >= 1, f"rope.scaling.factor = {self.factor}: must be at least 1")


@dataclass(frozen=True)
class Rope:
    """Rotary position embedding."""

    theta: float | None = 10_000.0
    """Base of the wavelengths. None: no rotary embedding."""
    fraction: float = 1.0
    """Share of a head's width that rotates, its first dimensions."""
    layout: Literal["half", "interleaved"] = "half"
    """Which two dimensions form a pair: i and i + n/2, or 2i and 2i + 1."""
    scaling: RopeScaling = RopeScaling()
    """Stretching for longer contexts."""

    def __post_init__(self):
        require(self.theta is None or self.theta > 0, f"rope.theta = {self.theta}: must be positive, or None for no rotary embedding")
        require(0 < self.fraction <= 1, f"rope.fraction = {self.fraction}: must lie in (0, 1]; for none set rope.theta to None")


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

    def __post_init__(self):
        require(self.width > 0, f"mlp.width = {self.width}: must be positive")


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
    init: Init = Init()
    """Initial values."""
    stack: Literal["auto", "scan", "unroll"] = "auto"
    """How repeated layers run; auto: unrolled up to 8 repeats, scanned above. The numbers are the same."""

    def __post_init__(self):
        for knob in ("width", "depth", "vocab"):
            require(getattr(self, knob) > 0, f"model.{knob} = {getattr(self, knob)}: must be positive")
        require(self.softcap is None or self.softcap > 0, f"model.softcap = {self.softcap}: must be positive, or None for no cap")
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


def check_layer(name: str, layer: Layer, width: int) -> None:
    """The rules between the sections of one layer."""
    attention, rope = layer.attention, layer.rope
    require(attention.head_width is not None or width % attention.heads == 0,
            f"{name}: model.attention.heads = {attention.heads} must divide model.width = {width}, or set model.attention.head_width")
    k = attention.head_width or width // attention.heads
    if rope.theta is not None:
        rotary = k * rope.fraction
        require(rotary == int(rotary) and int(rotary) % 2 == 0 and rotary >= 2,
                f"{name}: rope.fraction = {rope.fraction} of head width {k} is {rotary:g} dimensions: must be a positive even number")
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
