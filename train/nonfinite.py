"""Where a value first was not finite: the step is repeated with taps that look for it, so that no other step is slowed."""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import NamedSharding
from jaxtyping import Array, Float, Int

from configs.load import UserError
from models.parameters import Row
from models.taps import SITES
from train.data.batches import BATCH
from train.instruments import GRADIENT_SITES, PLAIN, Instrument, row_squares
from train.metrics import Max
from train.replay import Replay
from train.state import Plan, State
from train.step import compile_on, gradients, noise_key, updates_of

LONGEST = 1000
"""Steps that a run repeats by itself, where its checkpoints do not lie further apart than that."""

STAGES = ("parameters", "batch", "forward", "loss", "backward", "gradient", "update")
"""What is looked at, in the order in which a step computes it."""


class Place(NamedTuple):
    """Where a value is not finite: in the parameters, the batch, the forward pass, the loss, the backward pass (the gradient of a site),
    the gradient of a parameter, or a parameter after the update; the layer (None: of the frame); and the site or parameter."""

    stage: str
    layer: int | None
    site: str

    def __str__(self) -> str:
        return f"{self.stage}: " + (self.site if self.layer is None else f"layer {self.layer:02} {self.site}")


def not_finite(x: Array) -> Float[Array, ""]:
    """1 where any element is not finite, else 0."""
    return jnp.any(~jnp.isfinite(x)).astype(jnp.float32)


@jax.jit
def any_not_finite(arrays: dict[str, Array]) -> Float[Array, ""]:
    return jnp.stack([not_finite(x) for x in arrays.values()]).max()


def all_finite(arrays: dict[str, Array]) -> bool:
    """Whether every element of every array is finite."""
    return not jax.device_get(any_not_finite(arrays))


FLAGS = tuple(Instrument(site, site, lambda x: Max.of(not_finite(x)), PLAIN) for site, row in SITES.items() if not row.statistic)
"""The panel that looks for values that are not finite at every site."""


def make_diagnosis(plan: Plan) -> Callable[[State, Int[Array, "b t"]], dict[str, Any]]:
    """A step that changes nothing: by stage, and there by site or parameter, whether (per layer) a value is not finite.

    Gradients at sites are seen as their sums of squares: what overflows these makes the gradient norm infinite, too.
    """
    config = plan.config

    def diagnose(state: State, tokens: Int[Array, "b t"]) -> dict[str, Any]:
        key = noise_key(state.seed, state.step)
        loss, of_parameters, seen, routing = gradients(plan, FLAGS, state.parameters, tokens, config.train.accumulate, key)
        updates, _ = updates_of(plan, state, of_parameters, routing)
        by_row = lambda tree: {row.path: ~jnp.isfinite(row_squares(row, tree[row.path])) for row in plan.rows}
        by_element = lambda tree: {row.path: parts_not_finite(row, tree[row.path]) for row in plan.rows}
        return {
            "parameters": by_element(state.parameters),
            "batch": jnp.any((tokens < 0) | (tokens >= config.model.vocab), axis=1),
            "forward": {row.site: seen[row.site] for row in FLAGS if row.site in seen},
            "loss": not_finite(loss.total),
            "backward": {site: ~jnp.isfinite(seen[f"activation_grad_rms.{site}"]) for site in GRADIENT_SITES},
            "gradient": by_row(of_parameters),
            "update": by_element(optax.apply_updates(state.parameters, updates)),
        }

    return compile_on(plan, diagnose, (plan.shardings, NamedSharding(plan.mesh, BATCH)), None)


def parts_not_finite(row: Row, x: Array) -> Array:
    """Whether a parameter, per layer where it holds layers, has an element that is not finite."""
    return jnp.any(~jnp.isfinite(x), axis=None if row.layers is None else tuple(range(1, x.ndim)))


def places(plan: Plan, found: dict[str, Any]) -> list[Place]:
    """The first place of each stage at which a value is not finite, in the order in which a step computes them."""
    return [first for stage in STAGES if (first := next(of_stage(plan, stage, jax.device_get(found[stage])), None))]


def of_stage(plan: Plan, stage: str, found) -> Iterator[Place]:
    """The places of a stage, in the order of computation: backwards from the last layer for gradients."""
    layers = range(plan.config.model.depth)
    if stage == "batch":
        yield from (Place(stage, None, f"row {row} has a token outside the vocabulary") for row in np.flatnonzero(found))
    elif stage == "loss":
        yield from [Place(stage, None, "cross entropy, z-loss and routing losses")] * bool(found)
    elif stage in ("forward", "backward"):
        sites = [site for site in SITES if site in found]
        frame = [site for site in sites if not SITES[site].layered]
        before = [Place(stage, None, site) for site in frame if site == "embed"]
        inside = [Place(stage, layer, site) for layer in layers for site in sites if SITES[site].layered]
        order = before + inside + [Place(stage, None, site) for site in frame if site != "embed"]
        at = lambda place: found[place.site] if place.layer is None else found[place.site][place.layer]
        yield from (place for place in (reversed(order) if stage == "backward" else order) if at(place))
    else:
        parts = [(row, layer, index) for row in plan.rows for layer, index in row.places]
        depth = lambda part: part[1] if part[1] is not None else -1 if part[0].group in ("embed", "positions") else len(layers)
        parts.sort(key=lambda part: -depth(part) if stage == "gradient" else depth(part))
        yield from (Place(stage, layer, row.local_path) for row, layer, index in parts if found[row.path][index])


def diagnose(replay: Replay, state: State, tokens: Int[Array, "b t"]) -> list[Place]:
    """The first place of each stage of a step at which a value is not finite; the state is left as it is."""
    return places(replay.plan, make_diagnosis(replay.plan)(state, tokens))


def told(found: list[Place]) -> str:
    """The first place in words; and of a parameter or a batch, which a step is given, where it shows first."""
    return ", then ".join(map(str, found[: 2 if found[0].stage in ("parameters", "batch") else 1]))


def origin(replay: Replay, step: int, held_out: list[Int[Array, "b t"]]) -> str:
    """In a line: where the value that ended a run at a step first was not finite, in that step, in the update before it, or on the held-out
    batches; found by repeating the steps from the newest checkpoint on. Where that is far away it tells how to find it instead."""
    try:
        saved, state = replay.before(step)
        longest = max(replay.plan.config.checkpoint.every or 0, LONGEST)
        if step - saved > longest:
            return f"not finite first: not looked for, {step - saved} steps after the newest checkpoint; scripts.replay --step {step} does"
        first = max(saved, step - 1)
        state, look = replay.advance(state, saved, first), make_diagnosis(replay.plan)
        repeated = f"{first - saved} steps repeated from step {saved}"
        for at in range(first, step + 1):
            state = replay.advance(state, first, at)
            found = places(replay.plan, look(state, replay.batch(at)))
            if found:
                return f"not finite first at step {at}, {told(found)} ({repeated})"
        found = next(filter(None, (places(replay.plan, look(state, tokens)) for tokens in held_out)), None)
        return f"not finite first on held-out text, {told(found)} ({repeated})" if found else f"all is finite when repeated ({repeated})"
    except (UserError, jax.errors.JaxRuntimeError) as error:
        return f"not finite first: not found, {error}"
