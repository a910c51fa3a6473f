"""The optimiser as an optax chain, and its schedules."""

from collections.abc import Callable

import jax
import optax

from configs.schema import Optim
from models.parameters import Row


def stable_then_linear(steps: int, optim: Optim) -> optax.Schedule:
    fall = max(round(steps * optim.cooldown), 1)
    return optax.linear_schedule(1.0, optim.floor, fall, steps - fall)


SCHEDULES: dict[str, Callable[[int, Optim], optax.Schedule]] = {
    "cosine": lambda steps, optim: optax.cosine_decay_schedule(1.0, steps, optim.floor),
    "linear": lambda steps, optim: optax.linear_schedule(1.0, optim.floor, steps),
    "constant": lambda steps, optim: optax.constant_schedule(1.0),
    "wsd": stable_then_linear,
}
"""Share of the peak learning rate over the `steps` after warmup; wsd: warmup-stable-decay, arXiv 2404.06395."""


def share_of_peak(optim: Optim, steps: int) -> optax.Schedule:
    """The schedule by updates done (from 0): warmup in equal parts 1/w, 2/w, …, 1, then the row of SCHEDULES."""
    after = SCHEDULES[optim.schedule](max(steps - optim.warmup, 1), optim)
    if optim.warmup == 0:
        return after
    return optax.join_schedules([optax.linear_schedule(1 / optim.warmup, 1.0, max(optim.warmup - 1, 1)), after], [optim.warmup])


def make_optimizer(optim: Optim, steps: int, rows: list[Row]) -> optax.GradientTransformation:
    """AdamW with clipping to a global norm, and decay masked by parameter role (never by rank: stacking layers changes rank).

        u = -s(t) (lr m / (sqrt(v) + eps) + lr wd w)      coupled
        u = -s(t) (lr m / (sqrt(v) + eps) +    wd w)      independent

    Source: Loshchilov and Hutter 2019, arXiv 1711.05101; independent as in Wortsman et al. 2023, arXiv 2309.14322.
    """
    schedule = share_of_peak(optim, steps)
    decay = optax.add_decayed_weights(optim.weight_decay, mask={row.path: row.group in optim.decay for row in rows})
    rate = optax.scale(optim.learning_rate)
    return optax.chain(
        optax.identity() if optim.clip is None else optax.clip_by_global_norm(optim.clip),
        optax.scale_by_adam(*optim.betas, optim.eps),
        *((rate, decay) if optim.independent_decay else (decay, rate)),
        optax.scale_by_schedule(lambda count: -schedule(count)),
    )


def state_shardings(optimizer: optax.GradientTransformation, parameters, shardings, replicated):
    """The sharding of the optimiser's state: moments as their parameters, the rest on every device."""
    shapes = jax.eval_shape(optimizer.init, parameters)

    def of(path, leaf):
        key = getattr(path[-1], "key", None) if path else None
        return shardings.get(key, replicated)

    return jax.tree_util.tree_map_with_path(of, shapes)
