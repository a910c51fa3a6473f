"""Norms and their places: the NORMS and PLACEMENTS tables and the residual equation that holds every placement."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from configs.norm import Norm as NormConfig
from configs.norm import NormContract
from models.parameters import parameter
from models.precision import at_least_float32


@dataclass(frozen=True)
class Kind:
    """A row of NORMS: whether it centres, and what it divides by: "mean" or "sum" of squares, or nothing (None)."""

    centred: bool
    squares: str | None
    source: str


NORMS: dict[str, Kind] = {
    "layer": Kind(True, "mean", "Ba, Kiros and Hinton 2016, arXiv 1607.06450"),
    "rms": Kind(False, "mean", "Zhang and Sennrich 2019, arXiv 1910.07467"),
    "l2": Kind(False, "sum", "Euclidean length"),
    "dyt": Kind(False, None, "Zhu et al. 2025, arXiv 2503.10622"),
    "none": Kind(False, None, "identity"),
}


class Norm(nnx.Module):
    """Normalises the last axis (or the last axes that `shape` spans) by a contract.

        y = gain * (x - mean) / sqrt(mean((x - mean)^2) + eps) + bias        layer, rms without the mean, l2 with a sum
        y = gain * tanh(a x) + bias                                          dyt

    `shape` is that of the gain; `over` counts the trailing axes that share one statistic (2: the whole of "h k"). The type of the
    result is that of x. Sources: the rows of NORMS.
    """

    def __init__(self, contract: NormContract, shape: tuple[int, ...], role: str = "norm", axes=None, over: int = 1):
        self.contract, self.over = contract, over
        axes = axes or (None,) * len(shape)
        kind = contract.kind
        has_gain, has_bias = kind != "none" and contract.scale is not None, kind != "none" and contract.bias
        self.scale = parameter(shape, f"{role}.scale", axes, constant=1.0 if contract.scale == "w" else 0.0) if has_gain else None
        self.bias = parameter(shape, f"{role}.bias", axes, constant=0.0) if has_bias else None
        self.alpha = parameter((), f"{role}.alpha", (), constant=0.5) if kind == "dyt" else None

    def __call__(self, x: Float[Array, "..."]) -> Float[Array, "..."]:
        contract = self.contract
        if contract.kind == "none":
            return x
        y = x if contract.statistics == "input" else x.astype(at_least_float32(x))
        y = normalise(y, contract, self.over)
        y = y if self.alpha is None else jnp.tanh(self.alpha[...].astype(y.dtype) * y)
        if contract.scale_cast == "after":
            y = y.astype(x.dtype)
        if self.scale is not None:
            scale = self.scale[...].astype(y.dtype)
            y = y * (scale if contract.scale == "w" else 1 + scale)
        if self.bias is not None:
            y = y + self.bias[...].astype(y.dtype)
        return y.astype(x.dtype)


def normalise(x: Float[Array, "..."], contract: NormContract, over: int = 1) -> Float[Array, "..."]:
    """(x - mean) / root(squares), by the contract and without gain and bias; `over` trailing axes share one statistic."""
    kind, axes = NORMS[contract.kind], tuple(range(-over, 0))
    if contract.centring == "yes" or (contract.centring == "kind" and kind.centred):
        x = x - jnp.mean(x, axes, keepdims=True)
    if kind.squares is None:
        return x
    squares = (jnp.mean if kind.squares == "mean" else jnp.sum)(jnp.square(x), axes, keepdims=True)
    return x / EPS_POSITIONS[contract.eps_position](squares, contract.eps)


EPS_POSITIONS: dict[str, Callable] = {
    "inside": lambda squares, eps: jnp.sqrt(squares + eps),
    "outside": lambda squares, eps: jnp.sqrt(jnp.maximum(squares, jnp.finfo(squares.dtype).tiny)) + eps,  # no NaN in the gradient at 0
    "floor": lambda squares, eps: jnp.sqrt(jnp.maximum(squares, eps**2)),
}


def one(layer: int, depth: int) -> float:
    return 1.0


@dataclass(frozen=True)
class Placement:
    """A row of PLACEMENTS: the slots of both branches, the factors by (layer from 0, depth), and what goes with them.

    `final`: a norm before the head; `init`: the row of INITS that `auto` means; `parallel`: one input norm feeds attention and
    MLP; `fights`: a row of INITS that cancels what the placement does.
    """

    attention: tuple[str, ...]
    mlp: tuple[str, ...]
    source: str
    gain: Callable[[int, int], float] = one
    alpha: Callable[[int, int], float] = one
    beta: Callable[[int, int], float] = one
    final: bool = True
    init: str = "normal"
    parallel: bool = False
    fights: str | None = None


PLACEMENTS: dict[str, Placement] = {
    "none": Placement((), (), "no norm at all", final=False, init="scaled"),
    "pre": Placement(("in",), ("in",), "Xiong et al. 2020, arXiv 2002.04745", init="scaled"),
    "post": Placement(("out",), ("out",), "Vaswani et al. 2017, arXiv 1706.03762", final=False),
    "sandwich": Placement(("in", "branch"), ("in", "branch"), "Gemma 2, arXiv 2408.00118; Peri-LN, arXiv 2502.02732"),
    "reordered": Placement(("branch",), ("branch",), "OLMo 2, arXiv 2501.00656"),
    "deepnorm": Placement(("out",), ("out",), "Wang et al. 2022, arXiv 2203.00555",
                          alpha=lambda layer, depth: (2 * depth) ** 0.25, final=False, init="deepnorm"),
    "layernorm_scaling": Placement(("in",), ("in",), "Sun et al. 2025, arXiv 2502.05795",
                                   gain=lambda layer, depth: (layer + 1) ** -0.5, fights="scaled"),
    "hybrid": Placement(("out",), (), "HybridNorm, arXiv 2503.04598: QKV-norm in attention; Norm(Y) feeds the MLP and its residual"),
    "mix": Placement((), (), "Mix-LN, arXiv 2412.13795: each layer is post or pre, see configs.model.without_mix", init="scaled"),
    "parallel": Placement(("in",), (), "GPT-J; PaLM, arXiv 2204.02311", init="scaled", parallel=True),
}


class Factors(NamedTuple):
    """The three numbers of the residual equation, of one layer or stacked over layers."""

    gain: float | Float[Array, "..."]
    alpha: float | Float[Array, "..."]
    beta: float | Float[Array, "..."]


def factors(config: NormConfig, layer: int, depth: int) -> Factors:
    """The factors of a layer: those given by hand, else those of its placement."""
    row = PLACEMENTS[config.placement]
    by_hand = Factors(config.gain, config.alpha, config.beta)
    by_row = Factors(row.gain(layer, depth), row.alpha(layer, depth), row.beta(layer, depth))
    return Factors(*(row_value if hand is None else hand for hand, row_value in zip(by_hand, by_row, strict=True)))


class Residual(nnx.Module):
    """One residual branch f:  x <- out(alpha x + beta branch(f(gain in(x)))), with the norms that its slots name."""

    def __init__(self, config: NormConfig, slots: tuple[str, ...], width: int):
        build = lambda slot: Norm(config, (width,), axes=("embed",)) if slot in slots else None
        self.norm_in, self.norm_branch, self.norm_out = build("in"), build("branch"), build("out")

    def enter(self, x: Float[Array, "b t d"], scale: Factors) -> Float[Array, "b t d"]:
        """gain in(x): what the branch reads."""
        x = x if self.norm_in is None else self.norm_in(x)
        return x * jnp.asarray(scale.gain, x.dtype)

    def leave(self, x: Float[Array, "b t d"], y: Float[Array, "b t d"], scale: Factors) -> Float[Array, "b t d"]:
        """out(alpha x + beta branch(y)): the stream after the branch gave y."""
        y = y if self.norm_branch is None else self.norm_branch(y)
        x = x * jnp.asarray(scale.alpha, x.dtype) + y * jnp.asarray(scale.beta, x.dtype)
        return x if self.norm_out is None else self.norm_out(x)


def slots(config: NormConfig) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The slots of attention and MLP: those given by hand, else those of the placement."""
    row = PLACEMENTS[config.placement]
    return (
        row.attention if config.attention_slots is None else config.attention_slots,
        row.mlp if config.mlp_slots is None else config.mlp_slots,
    )


def contracts(model: nnx.Module) -> list[tuple[str, str, str]]:
    """Each norm of a transformer: its place in the layer (or the frame), its contract in words, and the layers that have it."""
    found: dict[tuple[str, str], list[int]] = {}
    for path, module in nnx.iter_graph(model):
        if isinstance(module, Norm):
            layers = []
            if path[:2] == ("stack", "segments"):
                segment = model.stack.segments[path[2]]
                layers, path = segment.layers[path[4] :: len(segment.unit)], path[5:]
            found.setdefault((".".join(map(str, path)), module.contract.words(module.over)), []).extend(layers)
    return [(place, words, ", ".join(map(str, sorted(layers))) or "frame") for (place, words), layers in found.items()]
