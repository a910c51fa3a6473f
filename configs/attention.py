"""The knobs of attention: heads, QK-norm, rotary embedding and how it is stretched."""

from dataclasses import dataclass
from typing import Literal

from configs.knobs import require
from configs.norm import NormContract

QKNormKind = Literal["none", "head", "head_each", "whole", "l2"]
Kernel = Literal["auto", "dense", "chunked", "library", "pallas"]

MOST = 2**16
"""Heads: above it a number is a slip."""


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
    clip: float | None = None
    """Largest absolute entry of queries, keys and values, limited before RoPE (and after a QK-norm that stands there)."""
    bias: tuple[Literal["q", "k", "v", "out"], ...] = ()
    """Projections with a bias."""
    qk_norm: QKNorm = QKNorm()
    """Norm of queries and keys."""
    kernel: Kernel = "auto"
    """How attention is computed; each kernel gives the same numbers. auto: by length and platform, recorded in conditions.json; dense:
    logits held; chunked: in blocks, memory linear in time; library: JAX's own, without max and entropy; pallas: a GPU or TPU program."""

    def __post_init__(self):
        require(0 < self.heads <= MOST, f"attention.heads = {self.heads}: must be positive, and at most {MOST}")
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
        require(self.clip is None or self.clip > 0, f"attention.clip = {self.clip}: must be positive, or None for no limit")
        require(self.kernel != "library" or (self.softcap is None and not self.sinks),
                "attention.kernel = 'library' has neither softcap nor sinks: set it to 'chunked', or softcap to None and sinks to False")
        require(self.qk_norm.kind != "l2" or self.scale is None,
                f"attention.scale = {self.scale} with qk_norm.kind 'l2': the learned temperature is the scale; leave it None")

    def width_of_head(self, width: int) -> int:
        """k, in a model of this width."""
        return self.head_width or width // self.heads


@dataclass(frozen=True)
class RopeScaling:
    """How rotary frequencies are stretched for longer contexts; each kind reads the knobs that its row of ROPE_SCALINGS names."""

    kind: Literal["none", "linear", "ntk", "dynamic", "yarn", "llama3", "longrope"] = "none"
    """none: as trained; linear: positions divided by the factor; ntk: a larger base; dynamic: a base that grows with the sequence; yarn: by
    wavelength, between linear and none; llama3: the same with another ramp; longrope: a factor for each frequency."""
    factor: float = 1.0
    """The stretch."""
    original: int | None = None
    """Positions before the stretch. Needed by dynamic, yarn, llama3 and longrope."""
    attention_factor: float | None = None
    """Factor on queries and keys. None: yarn and longrope as their papers say, from factor and the two mscales; the others 1."""
    beta_fast: float = 32.0
    """yarn: turns within the original length above which a frequency is left as it is."""
    beta_slow: float = 1.0
    """yarn: turns below which it is stretched in full."""
    truncate: bool = True
    """yarn: the ramp starts and ends at whole dimensions."""
    mscale: float | None = None
    """yarn: with mscale_all_dim, attention factor (0.1 mscale ln factor + 1) / (0.1 mscale_all_dim ln factor + 1)."""
    mscale_all_dim: float | None = None
    """yarn: see mscale."""
    low_frequency: float = 1.0
    """llama3: turns within the original length below which a frequency is stretched in full."""
    high_frequency: float = 4.0
    """llama3: turns above which it is left as it is."""
    short: tuple[float, ...] = ()
    """longrope: divisors of the frequencies in calls of at most `original` positions."""
    long: tuple[float, ...] = ()
    """longrope: divisors in longer calls."""

    def __post_init__(self):
        require(self.factor >= 1, f"rope.scaling.factor = {self.factor}: must be at least 1")
        require(self.kind not in ("dynamic", "yarn", "llama3", "longrope") or (self.original or 0) > 1,
                f"rope.scaling.original = {self.original}: kind {self.kind!r} needs the positions before the stretch, such as 4096")
        require(self.attention_factor is None or self.attention_factor > 0,
                f"rope.scaling.attention_factor = {self.attention_factor}: must be positive, or None for what the kind gives")
        require(self.kind != "longrope" or (self.short and len(self.short) == len(self.long)),
                f"rope.scaling.short and long have {len(self.short)} and {len(self.long)} factors: longrope needs one for each frequency")
        for knob in ("short", "long"):
            require(all(divisor > 0 for divisor in getattr(self, knob)),
                    f"rope.scaling.{knob} = {getattr(self, knob)}: must all be positive")
        require(self.kind != "llama3" or self.low_frequency < self.high_frequency,
                f"rope.scaling.low_frequency = {self.low_frequency}: must be below high_frequency = {self.high_frequency}")
        require(self.kind != "yarn" or 0 < self.beta_slow < self.beta_fast,
                f"rope.scaling.beta_slow = {self.beta_slow}: must be positive and below beta_fast = {self.beta_fast}")
        require((self.mscale is None) == (self.mscale_all_dim is None),
                f"rope.scaling.mscale = {self.mscale} and mscale_all_dim = {self.mscale_all_dim}: both or neither must be set")


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
        require(self.theta is None or self.theta > 1, f"rope.theta = {self.theta}: must be above 1, or None for no rotary embedding")
        require(0 < self.fraction <= 1, f"rope.fraction = {self.fraction}: must lie in (0, 1]; for none set rope.theta to None")

    def turning(self, k: int) -> float:
        """How many dimensions of a head of width k rotate: fraction k, free of the rounding of that product."""
        return round(k * self.fraction, 6)
