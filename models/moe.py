"""Mixture of experts: the router, the choice, and the experts."""

import dataclasses
from collections.abc import Callable

import jax
from flax import nnx
from jaxtyping import Array, Float

from configs.model import Layer
from models.mlp import Mlp, activate
from models.parameters import parameter
from models.precision import Operands, at_least_float32
from models.projection import Projection, contract
from models.taps import Tap

ROUTERS: dict[str, Callable] = {
    "softmax": lambda z: jax.nn.softmax(z, axis=-1),  # Shazeer et al. 2017, arXiv 1701.06538
    "sigmoid": jax.nn.sigmoid,  # DeepSeek-V3, arXiv 2412.19437
}
"""Router logits to scores, over the last axis."""


class Moe(nnx.Module):
    """sum_e w[e] expert_e(x) + shared(x), with w the scores of the top_k experts and zero elsewhere.

    The choice is made by score + selection bias; the weights are the scores alone, divided by their sum where `normalise`.
    """

    def __init__(self, layer: Layer, width: int, operands: Operands):
        config, mlp = layer.moe, layer.mlp
        self.config, self.mlp, self.operands = config, mlp, operands
        e, f = config.experts, config.width or mlp.width
        self.router = Projection("btd,de->bte", (width, e), "moe.router", ("embed", None), bias=config.bias)
        self.selection = parameter((e,), "moe.selection.bias", (None,), constant=0.0) if config.selection_bias else None
        weight = lambda role, shape, axes: parameter((e, *shape), role, ("experts", *axes), fan=shape)
        bias = lambda role, size, axis: parameter((e, size), f"{role}.bias", ("experts", axis), constant=0.0) if mlp.bias else None
        self.up, self.up_bias = weight("moe.up", (width, f), ("embed", "mlp")), bias("moe.up", f, "mlp")
        self.gate = weight("moe.gate", (width, f), ("embed", "mlp")) if mlp.gated else None
        self.gate_bias = bias("moe.gate", f, "mlp") if mlp.gated else None
        self.down, self.down_bias = weight("moe.down", (f, width), ("mlp", "embed")), bias("moe.down", width, "embed")
        self.shared = Mlp(dataclasses.replace(mlp, width=config.shared * f), width, operands) if config.shared else None

    def __call__(self, x: Float[Array, "b t d"], tap: Tap) -> Float[Array, "b t d"]:
        weights = tap("router.weights", self.route(tap("router.logits", self.router(x.astype(at_least_float32(x))))))
        y = self.experts(x, weights)
        return y if self.shared is None else y + self.shared(x, tap)

    def route(self, logits: Float[Array, "b t e"]) -> Float[Array, "b t e"]:
        """The weight of each expert for each token: zero for those not chosen."""
        scores = ROUTERS[self.config.router](logits)
        ranked = scores if self.selection is None else scores + self.selection[...].astype(scores.dtype)
        chosen = jax.nn.one_hot(jax.lax.top_k(ranked, self.config.top_k)[1], scores.shape[-1], dtype=scores.dtype).sum(-2)
        weights = chosen * scores
        return weights / weights.sum(-1, keepdims=True) if self.config.normalise else weights

    def experts(self, x: Float[Array, "b t d"], weights: Float[Array, "b t e"]) -> Float[Array, "b t d"]:
        """The weighted sum of all experts' outputs: every expert sees every token."""

        def wide(weight, bias):
            y = contract("btd,edf->btef", x, weight[...].astype(x.dtype), self.operands).astype(x.dtype)
            return y if bias is None else y + bias[...].astype(y.dtype)

        hidden = activate(self.mlp, wide(self.up, self.up_bias), None if self.gate is None else wide(self.gate, self.gate_bias))
        weights = weights.astype(x.dtype)
        y = contract("btef,efd->btd", hidden * weights[..., None], self.down[...].astype(x.dtype), self.operands).astype(x.dtype)
        return y if self.down_bias is None else y + weights @ self.down_bias[...].astype(x.dtype)
