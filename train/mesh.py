"""The mesh of devices."""

import dataclasses
import math

import jax
from jax.sharding import AxisType

from configs.load import UserError
from configs.schema import Mesh


def make_mesh(config: Mesh) -> jax.sharding.Mesh:
    """The mesh (data, fsdp, tensor, expert) on the first devices; several processes need one on all.

    Raises UserError where there are fewer devices than it needs, or several processes of which some would have no part in it.
    """
    axes = dataclasses.asdict(config)
    devices, size = jax.devices(), math.prod(axes.values())
    product, here = f"{' x '.join(f'mesh.{axis}' for axis in axes)} = {size}", f"{len(devices)} {devices[0].platform} device(s)"
    if size > len(devices):
        raise UserError(f"{product}: larger than the {here} here")
    if size < len(devices) and jax.process_count() > 1:
        raise UserError(f"{product}: {jax.process_count()} processes need a mesh on all of their {here}; give --mesh.data {len(devices)}")
    return jax.make_mesh(tuple(axes.values()), tuple(axes), axis_types=(AxisType.Auto,) * len(axes), devices=devices[:size])
