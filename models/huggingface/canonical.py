"""What of a config reaches the numbers of the forward pass, spelled in one way: to tell whether two configs mean the same model."""

import dataclasses
import re
from typing import Any

from configs.attention import QKNorm, Rope, RopeScaling
from configs.knobs import flatten
from configs.model import Layer, Model, Moe
from configs.norm import NormContract
from models.norms import NORMS, PLACEMENTS, factors, slots

BY_HAND = ("placement", "attention_slots", "mlp_slots", "gain", "alpha", "beta", "final")
UNSEEN = ("attention.kernel", *(f"{of}norm.{knob}" for of in ("", "attention.qk_norm.") for knob in ("scale_cast", "statistics")),
          "moe.jitter", "moe.bias_rate", "moe.balance", "moe.balance_over", "moe.z_loss", "moe.dispatch", "moe.capacity")
"""Knobs without a part in what a trained model computes in float32 (of a mixture with slots: where nothing is dropped)."""


def canonical(model: Model) -> dict[str, Any]:
    """Knobs of the frame and of each layer ("layer 3.attention.window"), with defaults and placements resolved."""
    final = PLACEMENTS[model.norm.placement].final if model.norm.final is None else model.norm.final
    found = {name: getattr(model, name) for name in ("width", "depth", "vocab", "tied", "embedding_scale", "softcap", "learned_positions",
                                                     "context")}
    found |= {"norm.final": final} | (contract("norm", model.norm) if final else {})
    for index, layer in enumerate(model.layers):
        found |= {f"layer {index}.{knob}": value for knob, value in canonical_layer(layer, model.width, index, model.depth).items()}
    return found


def canonical_layer(layer: Layer, width: int, index: int, depth: int) -> dict[str, Any]:
    attention, mlp, moe, rope = layer.attention, layer.mlp, layer.moe, layer.rope
    k = attention.width_of_head(width)
    qk_norm = QKNorm() if attention.qk_norm.kind == "none" else attention.qk_norm
    scale = k**-0.5 if attention.scale is None and qk_norm.kind != "l2" else attention.scale
    attention = dataclasses.replace(attention, head_width=k, kv_heads=attention.kv_heads or attention.heads, scale=scale, qk_norm=qk_norm)
    if moe.experts is None:
        moe = Moe()
    else:
        moe = dataclasses.replace(moe, width=moe.width or mlp.width)
        mlp = dataclasses.replace(mlp, width=moe.width)
    if rope.theta is None:
        rope = Rope(theta=None)
    elif rope.scaling.kind == "none":
        rope = dataclasses.replace(rope, scaling=RopeScaling())
    flat = flatten(dataclasses.replace(layer, attention=attention, mlp=mlp, moe=moe, rope=rope))
    flat = {knob: value for knob, value in flat.items() if knob not in UNSEEN and knob.removeprefix("norm.") not in BY_HAND}
    flat |= contract("norm", layer.norm) | contract("attention.qk_norm.norm", qk_norm.norm)
    in_attention, in_mlp = slots(layer.norm)
    return flat | {"norm.attention_slots": tuple(sorted(in_attention)), "norm.mlp_slots": tuple(sorted(in_mlp)),
                   "norm.parallel": PLACEMENTS[layer.norm.placement].parallel, **{
                       f"norm.{name}": value for name, value in factors(layer.norm, index, depth)._asdict().items()}}


def contract(name: str, norm: NormContract) -> dict[str, Any]:
    """What a norm computes, by its knobs under a name."""
    centred = norm.centring == "yes" or (norm.centring == "kind" and NORMS[norm.kind].centred)
    knobs = {knob: getattr(norm, knob) for knob in ("kind", "eps", "eps_position", "scale", "bias")} | {"centring": centred}
    return {f"{name}.{knob}": value for knob, value in knobs.items()}


def differences(ours: Model, theirs: Model) -> dict[str, tuple[Any, Any]]:
    """Knobs in which two models differ: {knob: (ours, theirs)}; a context that ours leaves open fits any. Where norms stand otherwise, the
    names of the placements come first."""
    first, second = canonical(ours), canonical(theirs)
    if ours.context is None:
        first.pop("context"), second.pop("context")
    alone = {f"layer {layer}" for layer in range(min(ours.depth, theirs.depth), max(ours.depth, theirs.depth))}
    found = {knob: (first.get(knob), second.get(knob)) for knob in {**first, **second}
             if first.get(knob) != second.get(knob) and knob.split(".")[0] not in alone}
    placed = {knob.split(".", 1)[-1].removeprefix("norm.") for knob in found} & {*BY_HAND, "parallel"}
    names = ours.norm.placement, theirs.norm.placement
    return ({"norm.placement": names} if placed and names[0] != names[1] else {}) | found


def told(changes: dict[str, tuple[Any, Any]]) -> list[str]:
    """What `differences` found, in words; what is otherwise in the same way in several layers is one item."""
    layers: dict[tuple[str, Any, Any], list[str]] = {}
    for knob, (ours, theirs) in changes.items():
        match = re.fullmatch(r"layer (\d+)\.(.*)", knob)
        layers.setdefault((match[2] if match else knob, ours, theirs), []).extend([match[1]] if match else [])
    return [f"{knob} = {ours!r} here, {theirs!r} there" + (f" (layers {', '.join(of)})" if of else "")
            for (knob, ours, theirs), of in layers.items()]


def shortened(items: list[str]) -> str:
    """The first four, and how many more."""
    return "; ".join(items[:4]) + (f"; and {len(items) - 4} more" if len(items) > 4 else "")
