"""Mixture of experts: a router, a choice, a way to compute the chosen experts, and what balances their load."""

import dataclasses

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float

from configs.model import Layer
from models.mlp import Mlp
from models.moe.balance import Routing, balance_loss, loads, squared_lse
from models.moe.dispatch import dispatch, with_slots
from models.moe.experts import Experts
from models.moe.router import ROUTERS, choose, jittered, weigh
from models.parameters import parameter
from models.precision import Operands, at_least_float32
from models.projection import Projection
from models.taps import Tap


class Moe(nnx.Module):
    """sum_e w[e] expert_e(x) + shared(x), with w the scores of the chosen experts and zero elsewhere.

    The choice is made by score + selection bias; the weights are the scores alone, divided by their sum where `normalise`. The router
    computes in at least float32. Source: Shazeer et al. 2017, arXiv 1701.06538.
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

    def __call__(
        self, x: Float[Array, "b t d"], tap: Tap, *, counted: Bool[Array, "b t"] | None = None, key: Array | None = None
    ) -> tuple[Float[Array, "b t d"], Routing]:
        """The layer's output, and what its router is judged by.

        `counted` masks the tokens that losses and loads are taken over (None: all); the others are routed all the same. `key` is that of
        the jitter noise (None: no noise).
        """
        config, z = self.config, x.astype(at_least_float32(x))
        logits = tap("router.logits", self.router(z if key is None or config.jitter is None else jittered(z, config.jitter, key)))
        scores = ROUTERS[config.router](logits)
        probabilities = tap("router.probabilities", scores / scores.sum(-1, keepdims=True))
        chosen = choose(config, scores, None if self.selection is None else self.selection[...].astype(scores.dtype))
        weights = tap("router.weights", weigh(config, scores, chosen))
        kept = with_slots(config, chosen)
        routing = Routing(balance_loss(config, chosen, probabilities, counted), squared_lse(logits, counted), loads(chosen, counted))
        tap("router.balance", routing.balance)
        tap("router.load", routing.load)
        tap("router.dropped", 1 - kept.sum(dtype=z.dtype) / chosen.sum(dtype=z.dtype))

        value = lambda of: None if of is None else of[...].astype(x.dtype)
        experts = Experts(*map(value, (self.up, self.up_bias, self.gate, self.gate_bias, self.down)))
        gates = weights.astype(x.dtype)
        y = dispatch(config, self.mlp, self.operands, experts, x, gates, kept)
        if self.down_bias is not None:
            y = y + jnp.where(kept, gates, 0) @ value(self.down_bias)
        return (y if self.shared is None else y + self.shared(x, tap)), routing


def warnings(layers: tuple[Layer, ...]) -> list[str]:
    """Lines about mixtures whose numbers do not mean what they seem to."""
    mixtures = [layer.moe for layer in layers if layer.moe.experts is not None]
    found = []
    if any(moe.choice == "expert" for moe in mixtures):
        found.append("model.moe.choice = 'expert' lets the tokens of a sequence compete, later ones included: the model is not causal, and "
                     "its losses are not those of one that predicts")
    if any(moe.normalise and moe.top_k == 1 for moe in mixtures):
        found.append("model.moe.normalise = True with model.moe.top_k = 1 makes every weight 1, so the cross entropy does not train the "
                     "router; set normalise to False")
    return found
