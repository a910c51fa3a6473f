"""What of a config reaches the numbers of the forward pass, spelled in one way: to tell whether two configs mean the same model."""

import dataclasses
from typing import Any

from configs.attention import QKNorm, Rope, RopeScaling
from configs.knobs import flatten
from configs.model import Layer, Model, Moe
from models.norms import PLACEMENTS, factors, slots

BY_HAND = ("placement", "attention_slots", "mlp_slots", "gain", "alpha", "beta", "final")
UNSEEN = ("attention.kernel", "norm.scale_cast", "attention.qk_norm.norm.scale_cast")
"""Knobs without a part in the numbers in float32."""


def canonical(model: Model) -> dict[str, Any]:
    """Knobs of the frame and of each layer ("layer 3.attention.window"), with defaults and placements resolved."""
    final = PLACEMENTS[model.norm.placement].final if model.norm.final is None else model.norm.final
    found = {name: getattr(model, name) for name in ("width", "depth", "vocab", "tied", "embedding_scale", "softcap", "learned_positions",
                                                     "context")}
    found["norm.final"] = final
    for index, layer in enumerate(model.layers):
        found |= {f"layer {index}.{knob}": value for knob, value in canonical_layer(layer, model.width, index, model.depth).items()}
    return found


def canonical_layer(layer: Layer, width: int, index: int, depth: int) -> dict[str, Any]:
    attention, mlp, moe, rope = layer.attention, layer.mlp, layer.moe, layer.rope
    k = attention.head_width or width // attention.heads
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
    in_attention, in_mlp = slots(layer.norm)
    return flat | {"norm slots of attention": tuple(sorted(in_attention)), "norm slots of the MLP": tuple(sorted(in_mlp)),
                   "norm.parallel": PLACEMENTS[layer.norm.placement].parallel, **{
                       f"norm.{name}": value for name, value in factors(layer.norm, index, depth)._asdict().items()}}


def differences(ours: Model, theirs: Model) -> dict[str, tuple[Any, Any]]:
    """Knobs in which two models differ: {knob: (ours, theirs)}; a context that ours leaves open fits any."""
    first, second = canonical(ours), canonical(theirs)
    if ours.context is None:
        first.pop("context"), second.pop("context")
    return {knob: (first.get(knob), second.get(knob)) for knob in {**first, **second} if first.get(knob) != second.get(knob)}
