"""The knobs of a norm: its contract, and its place around the residual branches."""

from dataclasses import dataclass
from typing import Literal

from configs.knobs import require

NormKind = Literal["layer", "rms", "l2", "dyt", "none"]
PlacementName = Literal[
    "none", "pre", "post", "sandwich", "reordered", "deepnorm", "layernorm_scaling", "hybrid", "mix", "parallel"
]
Slot = Literal["in", "branch", "out"]


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
