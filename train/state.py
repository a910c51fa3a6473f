"""The state of a run: what a step changes and a checkpoint holds."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array, Int

from configs.schema import Experiment
from models.init import initialise
from models.parameters import Row, table
from models.sharding import parameter_shardings
from models.transformer import Transformer
from train.optim import make_optimizer, state_shardings


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class State:
    """Updates done, parameters by path, optimiser state, and updates skipped for not being finite."""

    step: Int[Array, ""]
    parameters: dict[str, Array]
    optimizer: Any
    skipped: Int[Array, ""]


@dataclass(frozen=True)
class Plan:
    """What is known of a run before it has values: model, parameter table, optimiser, mesh, and the layout of the state."""

    config: Experiment
    model: Transformer
    rows: list[Row]
    optimizer: optax.GradientTransformation
    mesh: jax.sharding.Mesh
    shardings: State

    def fresh(self) -> State:
        """The state before the first step, made where it belongs."""
        return jax.jit(self.make, out_shardings=self.shardings)()

    def shapes(self) -> State:
        """The state as shapes with their shardings."""
        laid_out = lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)
        return jax.tree.map(laid_out, jax.eval_shape(self.make), self.shardings)

    def make(self) -> State:
        parameters = initialise(self.rows, self.config.model, self.config.train.seed)
        return State(jnp.int32(0), parameters, self.optimizer.init(parameters), jnp.int32(0))


def make_plan(config: Experiment, mesh: jax.sharding.Mesh) -> Plan:
    """The plan of a run on a mesh."""
    model = Transformer(config.model, operands=config.train.dtype, rows=config.instruments.rows)
    rows = table(model)
    optimizer = make_optimizer(config.optim, config.train.steps, rows)
    replicated, of_parameters = NamedSharding(mesh, PartitionSpec()), parameter_shardings(rows, mesh)
    shapes = {row.path: jax.ShapeDtypeStruct(row.shape, jnp.float32) for row in rows}
    shardings = State(replicated, of_parameters, state_shardings(optimizer, shapes, of_parameters, replicated), replicated)
    return Plan(config, model, rows, optimizer, mesh, shardings)
