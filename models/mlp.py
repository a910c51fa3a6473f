"""The feed-forward branch."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from configs.model import Mlp as MlpConfig
from models.precision import Operands
from models.projection import Projection
from models.taps import Tap

ACTIVATIONS: dict[str, Callable] = {
    "gelu": lambda x: jax.nn.gelu(x, approximate=False),  # Hendrycks and Gimpel 2016, arXiv 1606.08415
    "gelu_tanh": lambda x: jax.nn.gelu(x, approximate=True),
    "gelu_quick": lambda x: x * jax.nn.sigmoid(1.702 * x),
    "relu": jax.nn.relu,
    "relu2": lambda x: jnp.square(jax.nn.relu(x)),  # So et al. 2021, arXiv 2109.08668
    "silu": jax.nn.silu,  # Shazeer 2020, arXiv 2002.05202, where gated
}


class Mlp(nnx.Module):
    """down(activation(up x)), or down(activation(gate x) * (up x + offset)) where gated."""

    def __init__(self, config: MlpConfig, width: int, operands: Operands):
        self.config = config
        wide = lambda role: Projection("btd,df->btf", (width, config.width), role, ("embed", "mlp"), bias=config.bias, operands=operands)
        self.up = wide("mlp.up")
        self.gate = wide("mlp.gate") if config.gated else None
        self.down = Projection("btf,fd->btd", (config.width, width), "mlp.down", ("mlp", "embed"), bias=config.bias, operands=operands)

    def __call__(self, x: Float[Array, "b t d"], tap: Tap) -> Float[Array, "b t d"]:
        return self.down(tap("mlp.hidden", activate(self.config, self.up(x), None if self.gate is None else self.gate(x))))


def activate(config: MlpConfig, up: Float[Array, "..."], gate: Float[Array, "..."] | None) -> Float[Array, "..."]:
    """The hidden units of an MLP from what its projections give, by the kind, gate, limit and offset of its config."""
    activation = ACTIVATIONS[config.kind]
    if gate is None:
        return activation(up)
    if config.limit is not None:
        gate, up = jnp.minimum(gate, config.limit), jnp.clip(up, -config.limit, config.limit)
    return activation(gate) * (up + config.up_offset)
