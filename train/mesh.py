"""Processes and the mesh of devices."""

import dataclasses
import math
import os

import jax
from jax.sharding import AxisType

from configs.load import UserError
from configs.schema import Mesh


def join_processes() -> None:
    """Joins the other processes of a Slurm, TPU pod or hand-made cluster run; does nothing where there is but one."""
    several = int(os.environ.get("SLURM_NTASKS", "1")) > 1 or "," in os.environ.get("TPU_WORKER_HOSTNAMES", "")
    if (several or "JAX_COORDINATOR_ADDRESS" in os.environ) and not jax.distributed.is_initialized():
        jax.distributed.initialize()


def make_mesh(config: Mesh) -> jax.sharding.Mesh:
    """The mesh (data, fsdp, tensor, expert) on the first devices. Raises UserError where there are fewer devices than it needs."""
    axes = dataclasses.asdict(config)
    devices, size = jax.devices(), math.prod(axes.values())
    if size > len(devices):
        here = f"{len(devices)} {devices[0].platform} device(s)"
        raise UserError(f"{' x '.join(f'mesh.{axis}' for axis in axes)} = {size}: larger than the {here} here")
    return jax.make_mesh(tuple(axes.values()), tuple(axes), axis_types=(AxisType.Auto,) * len(axes), devices=devices[:size])
