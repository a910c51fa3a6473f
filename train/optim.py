"""The optimiser as an optax chain, and its schedules."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float

from configs.schema import Optim
from models.parameters import Row

NUMBERS = ("learning_rate", "betas", "eps", "weight_decay", "warmup", "floor", "cooldown", "clip")
"""Knobs that enter the compiled step as arrays: runs that differ in nothing else share one program."""

Numbers = dict[str, Float[Array, "..."]]


def numbers(optim: Optim) -> Numbers:
    """The values of NUMBERS that are set."""
    return {knob: jnp.asarray(getattr(optim, knob), jnp.float32) for knob in NUMBERS if getattr(optim, knob) is not None}


SCHEDULES: dict[str, Callable[[Array, Numbers], Array]] = {
    "cosine": lambda progress, of: of["floor"] + (1 - of["floor"]) * (1 + jnp.cos(jnp.pi * progress)) / 2,
    "linear": lambda progress, of: 1 - (1 - of["floor"]) * progress,
    "constant": lambda progress, of: jnp.ones_like(progress),
    "wsd": lambda progress, of: 1 - (1 - of["floor"]) * jnp.clip((progress - 1) / of["cooldown"] + 1, 0, 1),
}
"""Share of the peak learning rate by the share of the steps after warmup; wsd: warmup-stable-decay, arXiv 2404.06395."""


def share_of_peak(optim: Optim, steps: int, of: Numbers) -> Callable[[Array], Array]:
    """The schedule by updates done (from 0): warmup in equal parts 1/w, 2/w, …, 1, then the row of SCHEDULES."""

    def share(count):
        done = jnp.asarray(count, jnp.float32)
        progress = jnp.clip((done - of["warmup"]) / jnp.maximum(steps - of["warmup"], 1), 0, 1)
        return jnp.where(done < of["warmup"], (done + 1) / jnp.maximum(of["warmup"], 1), SCHEDULES[optim.schedule](progress, of))

    return share


def make_optimizer(optim: Optim, steps: int, rows: list[Row], of: Numbers) -> optax.GradientTransformation:
    """AdamW with clipping to a global norm, and decay masked by parameter role (never by rank: stacking layers changes rank).

        u = -s(t) (lr m / (sqrt(v) + eps) + lr wd w)      coupled
        u = -s(t) (lr m / (sqrt(v) + eps) +    wd w)      independent

    Source: Loshchilov and Hutter 2019, arXiv 1711.05101; independent as in Wortsman et al. 2023, arXiv 2309.14322.
    """
    share = share_of_peak(optim, steps, of)
    decay = optax.add_decayed_weights(of["weight_decay"], mask={row.path: row.group in optim.decay for row in rows})
    rate = optax.scale(of["learning_rate"])
    return optax.chain(
        optax.identity() if optim.clip is None else optax.clip_by_global_norm(of["clip"]),
        optax.scale_by_adam(of["betas"][0], of["betas"][1], of["eps"]),
        *((rate, decay) if optim.independent_decay else (decay, rate)),
        optax.scale_by_schedule(lambda count: -share(count)),
    )


def state_shardings(optimizer: optax.GradientTransformation, parameters, shardings, replicated):
    """The sharding of the optimiser's state: moments as their parameters, the rest on every device."""
    shapes = jax.eval_shape(optimizer.init, parameters)

    def of(path, leaf):
        key = getattr(path[-1], "key", None) if path else None
        return shardings.get(key, replicated)

    return jax.tree_util.tree_map_with_path(of, shapes)
