"""Speed of mixtures of experts: each dispatch against a dense MLP of the same active operations, in alternation."""

import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from configs.knobs import replace
from configs.model import Layer
from configs.schema import Experiment
from models import parameters
from models.mlp import Mlp
from models.moe import Moe
from models.taps import Taps
from train.data.batches import training_batches
from train.data.corpus import Corpus
from train.mesh import make_mesh
from train.state import make_plan
from train.step import make_step

ROUNDS = 30
WAYS: dict[str, dict[str, Any]] = {
    "dropless": {"dispatch": "dropless"},
    "capacity": {"dispatch": "capacity"},
    "capacity 1": {"dispatch": "capacity", "capacity": 1.0},
    "dense": {"dispatch": "dense"},
}
"""What is measured, as knobs of the mixture; "capacity" has the slots that the config gives it, "capacity 1" those of an even load."""


def bench_mixture(config: Experiment, corpus: Corpus) -> dict[str, Any] | None:
    """Seconds of the first mixture layer, forward and backward on a batch's tokens, and of the whole quiet step, for each of WAYS and for
    the dense MLP of the same active operations, with the ratio to it within a round; None where no layer is a mixture."""
    mixtures = [layer for layer in config.model.layers if layer.moe.experts is not None]
    if not mixtures:
        return None
    return {"layer": alternate(of_layer(config, mixtures[0])), "step": alternate(of_step(config, corpus))}


def active_width(layer: Layer) -> int:
    """The hidden width of a dense MLP with the active operations of a mixture, its router aside."""
    return (layer.moe.top_k + layer.moe.shared) * (layer.moe.width or layer.mlp.width)


def of_layer(config: Experiment, layer: Layer) -> dict[str, Callable[[], Any]]:
    """Programs of output, and gradients of parameters and input, by name."""
    key = jax.random.key(config.train.seed)
    x, weight = jax.random.normal(key, (2, config.data.batch, config.data.sequence, config.model.width))

    def program(module, run):
        rows = parameters.table(module)
        values = {row.path: jax.random.normal(key, row.shape) * (row.fan[0] if row.fan else 1) ** -0.5 for row in rows}
        of = jax.jit(jax.value_and_grad(lambda values, x: jnp.vdot(weight, run(parameters.bind(module, values), x)), (0, 1)))
        return lambda: jax.block_until_ready(of(values, x))

    width, operands = config.model.width, config.train.dtype
    tap = Taps().frame()
    dense = program(Mlp(replace(layer.mlp, {"width": active_width(layer)}), width, operands), lambda module, x: module(x, tap))
    mixture = lambda way: Moe(replace(layer, {f"moe.{knob}": value for knob, value in way.items()}), width, operands)
    return {"mlp": dense} | {name: program(mixture(way), lambda module, x: module(x, tap)[0]) for name, way in WAYS.items()}


def of_step(config: Experiment, corpus: Corpus) -> dict[str, Callable[[], Any]]:
    """Quiet training steps by name."""

    def program(changes):
        plan = make_plan(replace(config, changes), make_mesh(config.mesh))
        tokens = training_batches(corpus, config.data, config.train.seed, plan.mesh)(0)
        state, of = [plan.fresh()], make_step(plan, loud=False)

        def run():
            state[0], _ = jax.block_until_ready(of(state[0], tokens))

        return run

    layers = enumerate(config.model.layers)
    dense = tuple(f"{index}: moe.experts=None mlp.width={active_width(layer)}" for index, layer in layers if layer.moe.experts is not None)
    ways = {name: {f"model.moe.{knob}": value for knob, value in way.items()} for name, way in WAYS.items()}
    return {name: program(changes) for name, changes in ({"mlp": {"model.overrides": (*config.model.overrides, *dense)}} | ways).items()}


def alternate(programs: dict[str, Callable[[], Any]]) -> dict[str, Any]:
    """Median seconds of each program, and quartiles of its ratio to "mlp" within a round."""
    seconds: dict[str, list[float]] = {name: [] for name in programs}
    for _ in range(ROUNDS + 1):
        for name, run in programs.items():
            start = time.perf_counter()
            run()
            seconds[name].append(time.perf_counter() - start)
    times = {name: np.asarray(took[1:]) for name, took in seconds.items()}  # the first round compiles
    digits = lambda x: float(f"{x:.4g}")
    quartiles = lambda ratio: {name: digits(np.quantile(ratio, at)) for name, at in (("q25", 0.25), ("median", 0.5), ("q75", 0.75))}
    return {name: {"seconds": digits(np.median(took)), "over_mlp": quartiles(took / times["mlp"])} for name, took in times.items()}
