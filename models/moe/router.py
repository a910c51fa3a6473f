"""From router logits to scores, from scores to a choice, from the choice to weights."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from configs.moe import Moe

ROUTERS: dict[str, Callable] = {
    "softmax": lambda z: jax.nn.softmax(z, axis=-1),  # Shazeer et al. 2017, arXiv 1701.06538
    "sigmoid": jax.nn.sigmoid,  # DeepSeek-V3, arXiv 2412.19437
}
"""Router logits to scores, over the last axis."""


def choose(config: Moe, scores: Float[Array, "b t e"], bias: Float[Array, "e"] | None) -> Bool[Array, "b t e"]:
    """Which experts each token is sent to, by a row of CHOICES over score + selection bias; no gradient passes."""
    ranked = jax.lax.stop_gradient(scores if bias is None else scores + bias)
    return CHOICES[config.choice](config, ranked if config.groups is None else in_best_groups(config, ranked))


def by_tokens(config: Moe, ranked: Float[Array, "b t e"]) -> Bool[Array, "b t e"]:
    """Each token takes its top_k experts; of equal ones the first."""
    return marked(jax.lax.top_k(ranked, config.top_k)[1], config.experts)


def by_experts(config: Moe, ranked: Float[Array, "b t e"]) -> Bool[Array, "b t e"]:
    """Each expert takes the best ceil(top_k t / e) tokens of each sequence."""
    t = ranked.shape[1]
    return marked(jax.lax.top_k(ranked.swapaxes(1, 2), share(config, t))[1], t).swapaxes(1, 2)


CHOICES: dict[str, Callable] = {
    "token": by_tokens,
    "expert": by_experts,  # Zhou et al. 2022, arXiv 2202.09368
}


def share(config: Moe, t: int) -> int:
    """The assignments that each of the experts gets of a sequence of t tokens under an even load, rounded up."""
    return -(-config.top_k * t // config.experts)


def marked(indices: Array, size: int) -> Bool[Array, "..."]:
    """Whether each number below `size` is among the indices of the last axis."""
    return (indices[..., None] == jnp.arange(size, dtype=indices.dtype)).any(-2)


def in_best_groups(config: Moe, ranked: Float[Array, "b t e"]) -> Float[Array, "b t e"]:
    """The scores of experts in the group_top_k groups with the largest sum of their two best scores, -inf elsewhere.

    Source: DeepSeek-V3, arXiv 2412.19437, section 2.1.2.
    """
    grouped = ranked.reshape(*ranked.shape[:-1], config.groups, -1)
    best = jax.lax.top_k(grouped, min(2, grouped.shape[-1]))[0].sum(-1)
    allowed = marked(jax.lax.top_k(best, config.group_top_k)[1], config.groups)
    return jnp.where(allowed[..., None], grouped, -jnp.inf).reshape(ranked.shape)


def weigh(config: Moe, scores: Float[Array, "b t e"], chosen: Bool[Array, "b t e"]) -> Float[Array, "b t e"]:
    """The weight of each expert for each token: its score, divided by the sum of the chosen ones where `normalise`; zero if not chosen.

    With router softmax and `normalise` this is the softmax taken after the choice: exp z / sum over the chosen of exp z.
    """
    weights = jnp.where(chosen, scores, 0)
    return weights / weights.sum(-1, keepdims=True) if config.normalise else weights


def jittered(x: Float[Array, "b t d"], jitter: float, key: Array) -> Float[Array, "b t d"]:
    """x times noise that is uniform in [1 - jitter, 1 + jitter]; Fedus et al. 2021, arXiv 2101.03961, section 2.4."""
    return x * jax.random.uniform(key, x.shape, x.dtype, 1 - jitter, 1 + jitter)
