"""Logical axes to mesh axes: one table for parameters and activations."""

import math

import jax
from jax.sharding import NamedSharding, PartitionSpec

from models.parameters import Row

AXES: dict[str | None, str | tuple[str, ...] | None] = {
    # parameters
    "embed": "fsdp",  # model width
    "vocab": "tensor",
    "heads": "tensor",
    "kv_heads": "tensor",
    "mlp": "tensor",
    "experts": "expert",
    # activations, by their letter
    "b": ("data", "fsdp", "expert"),
    "group": ("data", "fsdp"),  # the sequences of a batch inside a mixture, where the devices of an expert axis have the same tokens
    "h": "tensor",
    "g": "tensor",
    "f": "tensor",
    "v": "tensor",
}
"""What is not named is replicated; so is an axis that its mesh axes do not divide (key heads fewer than `tensor`, an odd vocabulary)."""


def partition(axes, shape, mesh) -> PartitionSpec:
    """The PartitionSpec of an array with these logical axes and shape on a mesh."""

    along = lambda axis, size: AXES.get(axis) if size % shares(axis, mesh) == 0 else None
    return PartitionSpec(*(along(axis, size) for axis, size in zip(axes, shape, strict=True)))


def shares(axis: str | None, mesh) -> int:
    """The number of parts into which a logical axis is cut on a mesh."""
    names = AXES.get(axis) or ()
    return math.prod(mesh.shape[name] for name in ((names,) if isinstance(names, str) else names))


def parameter_shardings(rows: list[Row], mesh) -> dict[str, NamedSharding]:
    """The sharding of each parameter on a mesh."""
    return {row.path: NamedSharding(mesh, partition(row.axes, row.shape, mesh)) for row in rows}


def constrain(x: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    """`x` laid out by its logical axes on the mesh of the context, or `x` itself where there is none."""
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or mesh.size == 1:
        return x
    return jax.lax.with_sharding_constraint(x, partition(axes, x.shape, mesh))
