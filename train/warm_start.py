"""The state before the first step: drawn at random, or with the parameters of `init.from`, to which a QK-norm may be added."""

import dataclasses
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from configs.attention import Rope
from configs.load import UserError, path_of
from models import parameters
from models.huggingface.canonical import differences, shortened, told
from models.parameters import Row, table
from models.rope import inverse_frequencies
from models.taps import Taps
from models.transformer import Transformer
from train.source import transformer_in
from train.state import Plan, State


def start(plan: Plan, fresh: State, batch: Int[Array, "b t"] | None, report) -> State:
    """The state before the first step: the fresh one, or with the parameters of init.from in it.

    Raises UserError where the source lacks a parameter other than those of a QK-norm, has one that the model has no place for, or one of
    another shape. Knobs in which its model differs are told through `report`.
    """
    source = plan.config.init.from_
    if source is None:
        return fresh
    theirs = transformer_in(path_of(source), plan.mesh, report)
    changed = differences(plan.config.model, theirs.config)
    if changed:
        report(f"the model of init.from = {source} is another: {shortened(told(changed))}")
    values = fitted(plan, theirs, batch, source)
    place = lambda path: jax.device_put(values[path], plan.shardings.parameters[path])
    return dataclasses.replace(fresh, parameters={path: place(path) for path in fresh.parameters})


def fitted(plan: Plan, theirs: Transformer, batch: Int[Array, "b t"] | None, source: str) -> dict[str, Array]:
    """Their values in the place of ours, whatever segments the layers are in, and gains for a QK-norm that they lack: what the batch is
    for."""
    values = parameters.values(theirs)
    held = {(row.local_path, layer): values[row.path][at] for row in table(theirs) for layer, at in row.places}
    wanted = {(row.local_path, layer): row for row in plan.rows for layer, _ in row.places}
    place = lambda path, layer: path if layer is None else f"{path} of layer {layer}"
    if left := held.keys() - wanted.keys():
        raise UserError(f"init.from = {source}: has {place(*min(left, key=str))}, for which this model has no place")
    lacking = {key: row for key, row in wanted.items() if key not in held}
    if stray := [place(*key) for key, row in lacking.items() if row.group != "qk_norm"]:
        raise UserError(f"init.from = {source}: lacks {stray[0]}, which this model has; only a QK-norm can be added")
    for key, value in held.items():
        if value.shape != wanted[key].part_shape:
            raise UserError(f"init.from = {source}: {place(*key)} has shape {value.shape} there, {wanted[key].part_shape} in this model")
    gains = added_gains(plan, theirs, batch) if lacking else None
    found = {}
    for row in plan.rows:
        parts = [held[row.local_path, layer] if (row.local_path, layer) in held else gains(row, layer) for layer, _ in row.places]
        found[row.path] = parts[0] if row.layers is None else jnp.stack(parts)
    return found


def added_gains(plan: Plan, theirs: Transformer, batch: Int[Array, "b t"]) -> Callable[[Row, int], Float[Array, "..."]]:
    """(row, layer) to the values of a QK-norm that is added to a trained model: those that change its queries and keys least.

    The gain g that minimises the mean of |g q / rms(q) - q|^2 over a batch is the mean of rms(q), over the axes that share a gain (of a
    norm of kind l2, the mean length); the temperature of kind l2 is scale mean|q| mean|k|. Biases are zero. Raises UserError for a norm
    that cannot be added: of the values, or of kind dyt.
    """
    model = plan.config.model
    width = lambda layer: layer.attention.width_of_head(model.width)
    turns = [turning(layer.rope, width(layer), ours.attention.qk_norm.position)
             for layer, ours in zip(theirs.config.layers, model.layers, strict=True)]
    taps = Taps(record={site: lambda x: {turn: lengths(unturned(x, *turn)) for turn in set(turns)} for site in ("attn.q", "attn.k")})
    records = jax.jit(lambda model, tokens: model(tokens, taps=taps).records)(theirs, batch[:, :-1])

    def gain(row: Row, layer: int) -> Float[Array, "..."]:
        contract, kind = model.layers[layer].attention.qk_norm.norm, model.layers[layer].attention.qk_norm.kind
        q, k = (in_layer(records[site], layer)[turns[layer]] for site in ("attn.q", "attn.k"))
        if row.role == "qk_norm.temperature":
            scale = theirs.config.layers[layer].attention.scale or width(model.layers[layer]) ** -0.5
            return scale * q.each * jnp.repeat(k.each, q.each.shape[0] // k.each.shape[0])
        if row.role.startswith("qk_norm.v"):
            raise UserError("attention.qk_norm.values = True cannot be added to a trained model; queries and keys alone can")
        if contract.kind == "dyt":
            raise UserError("attention.qk_norm.norm.kind = 'dyt' cannot be added to a trained model; rms, layer and l2 can")
        if row.role.endswith(".bias"):
            return jnp.zeros(row.part_shape)
        of = q if row.role.startswith("qk_norm.q") else k
        length = {"head": of.each.mean(), "head_each": of.each[:, None], "whole": of.whole}[kind]
        share = width(model.layers[layer]) * (of.each.shape[0] if kind == "whole" else 1)
        value = jnp.broadcast_to(length if contract.kind == "l2" else length / np.sqrt(share), row.part_shape)
        return value - 1 if contract.scale == "1+w" else value

    return gain


def in_layer(records, layer: int):
    """The records of one layer, whether those of all are stacked or, where their shapes differ, a list."""
    return records[layer] if isinstance(records, list) else jax.tree.map(lambda x: x[layer], records)


class Lengths(NamedTuple):
    """Means over tokens of the length of a head's queries (or keys), and of those of all heads as one vector."""

    each: Float[Array, "h"]
    whole: Float[Array, ""]


def lengths(x: Float[Array, "b t h k"]) -> Lengths:
    squares = jnp.square(x.astype(jnp.float32)).sum(-1)
    return Lengths(jnp.sqrt(squares).mean((0, 1)), jnp.sqrt(squares.sum(-1)).mean())


def turning(rope: Rope, k: int, position: str) -> tuple[int, float]:
    """The dimensions that RoPE turns between a norm and where queries meet keys, and the attention factor by which it stretches them."""
    if position == "after" or rope.theta is None:
        return 0, 1.0
    return int(rope.turning(k)), float(inverse_frequencies(rope, k)[1])


def unturned(x: Float[Array, "b t h k"], n: int, factor: float) -> Float[Array, "b t h k"]:
    """Vectors of the length that x had before RoPE."""
    return jnp.concatenate((x[..., :n] / factor, x[..., n:]), axis=-1)
