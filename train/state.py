"""The state of a run: what a step changes and a checkpoint holds."""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import NamedSharding, PartitionSpec

from configs.schema import Experiment
from models.init import initialise
from models.parameters import Row, table
from models.sharding import parameter_shardings
from models.transformer import Transformer
from train.data.batches import BATCH
from train.detector import no_values
from train.kernels import resolved
from train.optim import Numbers, make_optimizer, numbers, state_shardings


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class State:
    """Arrays, or in their place shapes or shardings: updates tried, parameters by path, optimiser state, the optimiser's numbers (which no
    step changes), how many updates were skipped, the seed (which no step changes), the values that a spike is judged by, and the
    assignments to each expert of each mixture since the last panel."""

    step: Any
    parameters: dict[str, Any]
    optimizer: Any
    numbers: dict[str, Any]
    skipped: Any
    seed: Any
    recent: dict[str, Any]
    load: list[Any]


@dataclass(frozen=True)
class Plan:
    """What is known of a run before it has values: model, parameter table, mesh, and the layout of the state."""

    config: Experiment
    model: Transformer
    rows: list[Row]
    mesh: jax.sharding.Mesh
    shardings: State

    def optimizer(self, of: Numbers) -> optax.GradientTransformation:
        return make_optimizer(self.config.optim, self.config.train.steps, self.rows, of)

    @functools.cached_property
    def maker(self) -> Callable[..., State]:
        """The program that makes the state before the first step, where it belongs, from a seed and the optimiser's numbers."""
        return jax.jit(self.make, out_shardings=self.shardings)

    def fresh(self) -> State:
        """The state before the first step."""
        return self.maker(self.config.train.seed, numbers(self.config.optim))

    def tokens(self, rows: int) -> jax.ShapeDtypeStruct:
        """The shape of a batch of so many sequences, with the token that each predicts last."""
        return jax.ShapeDtypeStruct((rows, self.config.data.sequence + 1), jnp.int32, sharding=NamedSharding(self.mesh, BATCH))

    def shapes(self) -> State:
        """The state as shapes with their shardings."""
        laid_out = lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)
        return jax.tree.map(laid_out, jax.eval_shape(self.make, 0, numbers(self.config.optim)), self.shardings)

    def make(self, seed, of: Numbers) -> State:
        parameters = initialise(self.rows, self.config.model, seed)
        return State(jnp.int32(0), parameters, self.optimizer(of).init(parameters), of, jnp.int32(0), jnp.asarray(seed, jnp.int32),
                     no_values(self.config.spikes), no_load(self.config))


def no_load(config: Experiment) -> list[jax.Array | None]:
    """The assignments to each expert, by layer, before the first step; None for a layer that is no mixture."""
    return [None if layer.moe.experts is None else jnp.zeros(layer.moe.experts) for layer in config.model.layers]


def make_plan(config: Experiment, mesh: jax.sharding.Mesh) -> Plan:
    """The plan of a run on a mesh."""
    model = Transformer(resolved(config), operands=config.train.dtype, rows=config.instruments.rows)
    rows = table(model)
    replicated, of_parameters = NamedSharding(mesh, PartitionSpec()), parameter_shardings(rows, mesh)
    shapes, of = {row.path: jax.ShapeDtypeStruct(row.shape, jnp.float32) for row in rows}, numbers(config.optim)
    of_optimizer = state_shardings(make_optimizer(config.optim, config.train.steps, rows, of), shapes, of_parameters, replicated)
    everywhere = lambda make: jax.tree.map(lambda _: replicated, jax.eval_shape(make))
    layout = State(replicated, of_parameters, of_optimizer, dict.fromkeys(of, replicated), replicated, replicated,
                   everywhere(lambda: no_values(config.spikes)), everywhere(lambda: no_load(config)))
    return Plan(config, model, rows, mesh, layout)
