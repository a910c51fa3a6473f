"""The functions that a run compiles: the training step, quiet or loud, the probe, and the evaluation."""

import functools
import zlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array, Int

from models.moe.balance import Routing, bias_update
from models.parameters import bind
from models.transformer import NOTHING
from train import instruments
from train.data.batches import BATCH
from train.data.corpus import SEPARATOR
from train.detector import judge
from train.instruments import PANEL, PROBE_PANEL, Instrument, Published
from train.loss import Loss, loss_in_parts, routing_loss
from train.metrics import collapse
from train.optim import share_of_peak
from train.state import Plan, State


def gradients(
    plan: Plan, panel: tuple[Instrument, ...], parameters, tokens: Int[Array, "b t"], accumulate: int = 1, key: Array | None = None
):
    """Loss, gradient by path, what the panel published, and the routing of each layer, of a batch cut into `accumulate` parts taken one
    after the other, each with its own noise where there is a key. The byte between two documents does not count in the routing."""
    config = plan.config
    carriers = instruments.carriers(panel, config.model.depth)

    def loss_of(parameters, carriers, tokens, key):
        taps, inputs, model = instruments.request(panel, carriers), tokens[:, :-1], bind(plan.model, parameters)
        stream = model.stream(inputs, taps=taps, counted=inputs != SEPARATOR[0], key=key, remat=config.train.remat)
        loss, of_logits = loss_in_parts(model, stream.final, tokens[:, 1:], config.train.z_loss, taps)
        loss = loss._replace(total=loss.total + routing_loss(config.model.layers, stream.routing))
        return loss.total / accumulate, (loss, stream.records | of_logits, stream.routing)

    differentiate = jax.grad(loss_of, argnums=(0, 1), has_aux=True)
    if accumulate == 1:
        found, (loss, records, routing) = differentiate(parameters, carriers, tokens, key)
    else:

        def part(total, of_part):
            found, aux = differentiate(parameters, carriers, *of_part)
            return jax.tree.map(jnp.add, total, found), aux

        parts = tokens.reshape(-1, accumulate, tokens.shape[1]).swapaxes(0, 1)
        keys = None if key is None else jax.random.split(key, accumulate)
        found, (losses, records, routing) = jax.lax.scan(part, jax.tree.map(jnp.zeros_like, (parameters, carriers)), (parts, keys))
        loss, records = Loss(*(x.mean() for x in losses)), collapse(records)
        routing = [None if of is None else Routing(of.balance.mean(), of.squared_lse.mean(), of.load.sum(0)) for of in routing]
    of_parameters, square_sums = found
    activations = tokens.shape[0] * (tokens.shape[1] - 1) * config.model.width
    return loss, of_parameters, instruments.publish(panel, records, square_sums, activations), routing


def noise_key(seed: Int[Array, ""], step: Int[Array, ""]) -> Array:
    """The key of a step's noise: a function of the seed and the step alone, so that a resumed run draws what it would have drawn."""
    return jax.random.fold_in(jax.random.fold_in(jax.random.key(seed), zlib.crc32(b"noise")), step)


def bias_updates(plan: Plan, routing: list[Routing | None]) -> dict[str, Array]:
    """The updates of the selection biases, by path: `models.moe.balance.bias_update` of the whole batch's load, or zero without a rate.

    They take the place of the optimiser's, whose gradient is zero: a selection bias is neither trained nor decayed.
    """
    layers = plan.config.model.layers
    of_layer = lambda layer: bias_update(routing[layer].load, layers[layer].moe.bias_rate or 0.0)
    return {row.path: jnp.stack([of_layer(layer) for layer in row.layers]) for row in plan.rows if row.role == "moe.selection.bias"}


def updates_of(plan: Plan, state: State, gradient: dict[str, Array], routing: list[Routing | None]) -> tuple[dict[str, Array], Any]:
    """The update of each parameter by path, and the optimiser's state after it."""
    updates, optimizer = plan.optimizer(state.numbers).update(gradient, state.optimizer, state.parameters)
    return updates | bias_updates(plan, routing), optimizer


def make_step(plan: Plan, loud: bool) -> Callable[[State, Int[Array, "b t"]], tuple[State, Published]]:
    """The training step, compiled with the plan's layout; the state is donated. A loud one also publishes the panel.

    Both publish train/loss (cross entropy, nats per token), train/z_loss, train/router_loss (of mixtures, weighted; the three together
    are what is minimised), train/grad_norm (before clipping), train/update_rms (over all parameters), train/learning_rate and
    train/skipped. A step whose loss, gradient or update is not finite, where train.on_nonfinite is "skip", or one that spikes, where
    spikes.action is, leaves parameters and optimiser as they are and counts as skipped.
    """
    config, panel = plan.config, PANEL if loud else ()

    def step(state: State, tokens: Int[Array, "b t"]) -> tuple[State, Published]:
        key = noise_key(state.seed, state.step)
        loss, of_parameters, published, routing = gradients(plan, panel, state.parameters, tokens, config.train.accumulate, key)
        updates, optimizer = updates_of(plan, state, of_parameters, routing)
        update_rms = optax.tree.norm(updates) / sum(row.size for row in plan.rows) ** 0.5
        grad_norm, share = optax.tree.norm(of_parameters), share_of_peak(config.optim, config.train.steps, state.numbers)
        values = {"train/loss": loss.cross_entropy, "train/grad_norm": grad_norm, "train/update_rms": update_rms}
        spikes, recent = judge(config.spikes, state.recent, values)
        finite = jnp.isfinite(loss.total) & jnp.isfinite(grad_norm) & jnp.isfinite(update_rms) | (config.train.on_nonfinite == "stop")
        taken = finite & ~spikes
        new = optax.apply_updates(state.parameters, updates), optimizer
        new = jax.tree.map(lambda ours, old: jnp.where(taken, ours, old), new, (state.parameters, state.optimizer))
        skipped = state.skipped + ~taken
        load = [None if of is None else before + of.load for before, of in zip(state.load, routing, strict=True)]
        published |= values | {
            "train/z_loss": config.train.z_loss * loss.squared_log_z,
            "train/learning_rate": state.numbers["learning_rate"] * share(state.step - state.skipped),
            "train/skipped": skipped,
        }
        if config.model.mixture:
            published["train/router_loss"] = routing_loss(config.model.layers, routing)
        if loud:
            trees = {"grad": of_parameters, "param": state.parameters, "update": updates}
            published |= instruments.parameter_statistics(plan.rows, config.model.depth, trees) | instruments.unused(load)
            written = state.step % (config.instruments.every or 1) == 0  # a panel may also be for spikes.ring alone
            load = jax.tree.map(lambda of: jnp.where(written, 0, of), load)
        return State(state.step + 1, *new, state.numbers, skipped, state.seed, recent, load), published

    return compile_on(plan, step, (plan.shardings, NamedSharding(plan.mesh, BATCH)), (plan.shardings, None), donate=(0,))


def make_probe(plan: Plan) -> Callable[[State, Int[Array, "b t"]], Published]:
    """The panel of a batch at the present parameters, gradients and logit quantiles with it, keys prefixed with "probe."."""

    def probe(parameters, tokens: Int[Array, "b t"]) -> Published:
        loss, of_parameters, published, _ = gradients(plan, PROBE_PANEL, parameters, tokens)
        published |= instruments.parameter_statistics(plan.rows, plan.config.model.depth, {"grad": of_parameters})
        return {f"probe.{key}": value for key, value in (published | {"train/loss": loss.cross_entropy}).items()}

    return compile_on(plan, probe, (plan.shardings.parameters, NamedSharding(plan.mesh, BATCH)), None)


def make_evaluation(plan: Plan) -> Callable[[Any, Int[Array, "b t"]], Array]:
    """Mean cross entropy of a batch at the present parameters, nats per token."""

    def evaluate(parameters, tokens: Int[Array, "b t"]):
        model = bind(plan.model, parameters)
        return loss_in_parts(model, model.stream(tokens[:, :-1]).final, tokens[:, 1:], 0.0, NOTHING)[0].cross_entropy

    return compile_on(plan, evaluate, (plan.shardings.parameters, NamedSharding(plan.mesh, BATCH)), None)


def compile_on(plan: Plan, function, inputs, outputs, donate=()):
    """`function` under jit with explicit shardings, traced with the plan's mesh as context; None: replicated."""
    replicated = NamedSharding(plan.mesh, PartitionSpec())

    @functools.wraps(function)
    def on_mesh(*arguments):
        with jax.sharding.use_abstract_mesh(plan.mesh.abstract_mesh):
            return function(*arguments)

    outputs = jax.tree.map(lambda x: replicated if x is None else x, outputs, is_leaf=lambda x: x is None)
    return jax.jit(on_mesh, in_shardings=inputs, out_shardings=outputs, donate_argnums=donate)
