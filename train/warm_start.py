"""The state before the first step: drawn at random, or with the parameters of `init.from`, to which a QK-norm may be added."""

import dataclasses
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from configs.load import UserError
from models import parameters
from models.huggingface.canonical import differences
from models.parameters import Row, table
from models.rope import inverse_frequencies
from models.taps import Taps
from models.transformer import Transformer
from train.source import transformer_in
from train.state import Plan, State


def start(plan: Plan, batch: Int[Array, "b t"], report) -> State:
    """The state before the first step.

    Raises UserError where the source lacks a parameter other than those of a QK-norm, has one that the model has no place for, or one of
    another shape. Knobs in which its model differs are told through `report`.
    """
    state, source = plan.fresh(), plan.config.init.from_
    if source is None:
        return state
    theirs = transformer_in(Path(source).expanduser(), plan.mesh, report)
    changed = differences(plan.config.model, theirs.config)
    if changed:
        told = "; ".join(f"{knob} = {before!r} there, {here!r} here" for knob, (here, before) in list(changed.items())[:8])
        report(f"the model of init.from = {source} differs in {len(changed)} knobs: {told}")
    values = fitted(plan, theirs, batch, source)
    place = lambda path: jax.device_put(values[path], plan.shardings.parameters[path])
    return dataclasses.replace(state, parameters={path: place(path) for path in state.parameters})


def fitted(plan: Plan, theirs: Transformer, batch: Int[Array, "b t"], source: str) -> dict[str, Array]:
    """Their values in the place of ours, whatever segments the layers are in, and gains for a QK-norm that they lack."""
    values = parameters.values(theirs)
    held = {(row.local_path, layer): values[row.path] if layer is None else values[row.path][index]
            for row in table(theirs) for index, layer in enumerate((None,) if row.layers is None else row.layers)}
    wanted = {(row.local_path, layer): row for row in plan.rows for layer in ((None,) if row.layers is None else row.layers)}
    if left := held.keys() - wanted.keys():
        raise UserError(f"init.from = {source}: has {min(path for path, _ in left)}, for which this model has no place")
    lacking = [row for key, row in wanted.items() if key not in held]
    if stray := [row for row in lacking if row.group != "qk_norm"]:
        raise UserError(f"init.from = {source}: lacks {stray[0].local_path}, which this model has; only a QK-norm can be added")
    gains = added_gains(plan, theirs, batch) if lacking else None
    found = {}
    for row in plan.rows:
        shape = row.shape if row.layers is None else row.shape[1:]
        of = lambda layer, row=row: held[row.local_path, layer] if (row.local_path, layer) in held else gains(row, layer)
        parts = [of(layer) for layer in ((None,) if row.layers is None else row.layers)]
        if wrong := [part.shape for part in parts if part.shape != shape]:
            raise UserError(f"init.from = {source}: {row.local_path} has shape {wrong[0]} there, {shape} in this model")
        found[row.path] = parts[0] if row.layers is None else jnp.stack(parts)
    return found


def added_gains(plan: Plan, theirs: Transformer, batch: Int[Array, "b t"]):
    """(row, layer) to the values of a QK-norm that is added to a trained model: those that change its queries and keys least.

    The gain g that minimises the mean of |g q / rms(q) - q|^2 over a batch is the mean of rms(q) (over the axes that share a gain); the
    temperature of kind l2 is scale mean|q| mean|k|. Biases are zero. RoPE keeps the length of queries and keys up to its attention factor.
    """
    length = lambda x: jnp.linalg.norm(x.astype(jnp.float32), axis=-1).mean((0, 1))
    whole = lambda x: jnp.sqrt(jnp.mean(jnp.square(x.astype(jnp.float32)), axis=(2, 3))).mean()
    taps = Taps(record={site: lambda x: {"length": length(x), "whole": whole(x)} for site in ("attn.q", "attn.k")})
    records = jax.jit(lambda model, tokens: model(tokens, taps=taps).records)(theirs, batch[:, :-1])

    def gain(row: Row, layer: int) -> Float[Array, "..."]:
        shape, config = row.shape[1:], plan.config.model.layers[layer]
        attention, k = config.attention, config.attention.head_width or plan.config.model.width // config.attention.heads
        if row.constant == 0.0 and row.role.endswith(".bias"):
            return jnp.zeros(shape)
        factor = inverse_frequencies(config.rope, k)[1] if config.rope.theta is not None else 1.0
        q, g = (jax.tree.map(lambda x: x / factor, records[site][layer]) for site in ("attn.q", "attn.k"))
        if row.role == "qk_norm.temperature":
            scale = k**-0.5 if attention.scale is None else attention.scale
            return scale * q["length"] * jnp.repeat(g["length"], q["length"].shape[0] // g["length"].shape[0])
        if row.role.startswith("qk_norm.v"):
            raise UserError("attention.qk_norm.values = True cannot be added to a trained model; queries and keys alone can")
        of = q if row.role.startswith("qk_norm.q") else g
        rms = {"head": of["length"].mean() / np.sqrt(k), "head_each": (of["length"] / np.sqrt(k))[:, None], "whole": of["whole"]}
        value = jnp.broadcast_to(rms[attention.qk_norm.kind], shape)
        return value - 1 if attention.qk_norm.norm.scale == "1+w" else value

    return gain
