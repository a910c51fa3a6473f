"""Initial values, as one table."""

import zlib
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array

from configs.model import Model
from models.norms import PLACEMENTS
from models.parameters import Row

OUTPUTS = ("attention.out", "mlp.down", "moe.down")
SHRUNK = ("attention.v", "attention.out", "mlp.up", "mlp.gate", "mlp.down", "moe.up", "moe.gate", "moe.down")

INITS: dict[str, Callable[[str, tuple[int, int], Model], float]] = {
    "normal": lambda role, fan, model: model.init.std,  # OLMo 2, arXiv 2501.00656
    "scaled": lambda role, fan, model: model.init.std / ((2 * model.depth) ** 0.5 if role in OUTPUTS else 1),  # GPT-2
    "fan_in": lambda role, fan, model: fan[0] ** -0.5,  # LeCun
    "deepnorm": lambda role, fan, model: (2 / sum(fan)) ** 0.5 * ((8 * model.depth) ** -0.25 if role in SHRUNK else 1),  # 2203.00555
}
"""Standard deviation of a weight by its role, fan (inputs, outputs) and model. Norms and biases start at their row's constant."""


def kind(model: Model) -> str:
    """The row of INITS in force: `model.init.kind`, or the one that the placement goes with."""
    return PLACEMENTS[model.norm.placement].init if model.init.kind == "auto" else model.init.kind


def warning(model: Model) -> str | None:
    """A line about a placement and an init that cancel each other, if these do."""
    fighting = [layer.norm.placement for layer in model.layers if PLACEMENTS[layer.norm.placement].fights == kind(model)]
    if not fighting:
        return None
    return (f"model.norm.placement = {fighting[0]!r} shrinks deep branches and so does model.init.kind = {kind(model)!r}: "
            "the second cancels what the first is for; use init 'normal'")


def initialise(rows: list[Row], model: Model, seed: int | Array) -> dict[str, Array]:
    """Initial values of all parameters, float32.

    Each weight is N(0, std^2) with std from INITS, drawn from a key made of the seed, its path inside its layer and the layer's
    number: two models share the values of every weight that has the same name and shape in both, however layers are grouped.
    """
    key = jax.random.key(seed)
    return {row.path: draw(row, model, key) for row in rows}


def scale(row: Row, model: Model) -> float:
    """The standard deviation of a weight, or the constant at which a norm or bias starts."""
    if row.constant is not None:
        return row.constant
    return model.init.std if row.role in ("embed", "positions") else INITS[kind(model)](row.role, row.fan, model)


def draw(row: Row, model: Model, key: Array) -> Array:
    if row.constant is not None:
        return jnp.full(row.shape, row.constant, jnp.float32)
    std = scale(row, model)
    key = jax.random.fold_in(key, zlib.crc32(row.local_path.encode()))
    if row.layers is None:
        return std * jax.random.normal(key, row.shape, jnp.float32)
    of_layer = lambda layer: std * jax.random.normal(jax.random.fold_in(key, layer), row.shape[1:], jnp.float32)
    return jax.vmap(of_layer)(jnp.asarray(row.layers))
