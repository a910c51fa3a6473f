"""The stability panel: which reducer sits at which site, and what is published from it.

A published key without a slash is a statistic per layer ("attention_entropy": [layers]), one with a slash a single number
("train/loss"). `.heads` and `.experts` values are per layer and head or expert.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from models.parameters import Row
from models.taps import SITES, Probe, Taps
from train.metrics import Last, Max, Mean, Rms

Published = dict[str, Any]

PLAIN = {"": lambda x: x}
WORST_IS_HIGH = {"": lambda x: x.mean(-1), ".worst": lambda x: x.max(-1), ".heads": lambda x: x}
WORST_IS_LOW = {"": lambda x: x.mean(-1), ".worst": lambda x: x.min(-1), ".heads": lambda x: x}
LARGEST = {"": lambda x: x.max(-1), ".mean": lambda x: x.mean(-1), ".heads": lambda x: x}


@dataclass(frozen=True)
class Instrument:
    """A row of the panel: what it is called, where it sits, how it reduces there, and what is published of the [layers, heads] result."""

    tag: str
    site: str
    reduce: Callable[[Array], Any]
    publish: Mapping[str, Callable[[Array], Array]]


def over_heads(kind) -> Callable[[Array], Any]:
    """The reducer over batch and time that leaves heads."""
    return lambda x: kind.of(x, axis=(0, 1))


def norm_of_vectors(x: Float[Array, "b t h k"]) -> Mean:
    return Mean.of(jnp.linalg.norm(x.astype(jnp.float32), axis=-1), axis=(0, 1))


def log_z(x: Float[Array, "b t c"]) -> Mean:
    return Mean.of(jax.nn.logsumexp(x, axis=-1))


def entropy(p: Float[Array, "b t e"]) -> Mean:
    return Mean.of(-jax.scipy.special.xlogy(p, p).sum(-1))


def shares(load: Float[Array, "e"]) -> Mean:
    """The share of the assignments that each expert gets: parts of a batch merge by their counts."""
    return Mean(load, jnp.full_like(load, load.sum()))


def gini(share: Float[Array, "... e"]) -> Float[Array, "..."]:
    """sum_ij |share[i] - share[j]| / (2 e): 0 for an even load, 1 - 1/e where one expert has all."""
    e = share.shape[-1]
    return (jnp.sort(share, axis=-1) * (2 * jnp.arange(1, e + 1) - e - 1)).sum(-1) / e


LOAD = {
    "_load.experts": lambda share: share,
    "_max_vio": lambda share: share.shape[-1] * share.max(-1) - 1,  # Wang et al. 2024, arXiv 2408.15664, section 4.1
    "_gini": gini,
    "_unused": lambda share: (share == 0).sum(-1),
}
"""Of a mixture's load: each expert's share, the largest over the mean minus one, the Gini coefficient, experts without a token."""


STREAM = ("resid.pre", "attn.in", "attn.out", "resid.mid", "mlp.in", "mlp.out", "resid.post")
FRAME = {"embed": "embed", "resid.final": "final", "logits": "logits"}
GRADIENT_SITES = ("resid.pre", "resid.mid", "resid.post")

PANEL: tuple[Instrument, ...] = (
    *(Instrument(f"activation_rms.{site}", site, Rms.of, PLAIN) for site in STREAM),
    *(Instrument(f"activation_max.{site}", site, lambda x: Max.of(jnp.abs(x)), PLAIN) for site in STREAM),
    *(Instrument(f"{name}/activation_rms", site, Rms.of, PLAIN) for site, name in FRAME.items()),
    *(Instrument(f"{name}/activation_max", site, lambda x: Max.of(jnp.abs(x)), PLAIN) for site, name in FRAME.items()),
    Instrument("attention_logit_max", "attn.max", over_heads(Max), LARGEST),
    Instrument("attention_logit_lse", "attn.lse", over_heads(Mean), WORST_IS_HIGH),
    Instrument("attention_entropy", "attn.entropy", over_heads(Mean), WORST_IS_LOW),
    Instrument("attention_sink", "attn.sink", over_heads(Mean), WORST_IS_HIGH),
    Instrument("query_norm", "attn.q", norm_of_vectors, WORST_IS_HIGH),
    Instrument("key_norm", "attn.k", norm_of_vectors, WORST_IS_HIGH),
    Instrument("query_key_cosine", "attn.cosine", over_heads(Mean), WORST_IS_HIGH),
    Instrument("router", "router.load", shares, LOAD),
    Instrument("router_balance", "router.balance", Mean.of, PLAIN),
    Instrument("router_dropped", "router.dropped", Mean.of, PLAIN),
    Instrument("router_entropy", "router.probabilities", entropy, PLAIN),
    Instrument("router_logit_max", "router.logits", Max.of, PLAIN),
    Instrument("router_logit_lse", "router.logits", log_z, PLAIN),
    Instrument("logits/log_z", "logits", log_z, PLAIN),
    Instrument("logits/mean", "logits", Mean.of, PLAIN),
)
"""What a loud step publishes of the training batch, and a probe step of the probe batch."""

QUANTILES = {"p01": 0.01, "p50": 0.50, "p95": 0.95, "p99": 0.99}
BINS = 30


def quantiles(z: Float[Array, "b h t s"]) -> Last:
    """Quantiles of the logits that are not masked."""
    visible = jnp.where(jnp.isneginf(z), jnp.nan, z)
    return Last.of(jnp.nanquantile(visible, jnp.asarray(list(QUANTILES.values())), method="linear"))


def histogram(z: Float[Array, "b h t s"]) -> Last:
    """Counts of the logits that are not masked in equal bins from the smallest to the largest: [low, high, counts…]."""
    masked = jnp.isneginf(z)
    low, high = jnp.min(jnp.where(masked, jnp.inf, z)), jnp.max(z)
    width = jnp.maximum(high - low, 1e-6)
    bins = jnp.clip((z - low) / width * BINS, 0, BINS - 1)
    counts = jnp.zeros(BINS, jnp.float32).at[jnp.where(masked, 0, bins).astype(jnp.int32)].add(jnp.where(masked, 0.0, 1.0))
    return Last.of(jnp.concatenate((jnp.stack((low, low + width)), counts)))


PROBE_PANEL: tuple[Instrument, ...] = (
    *PANEL,
    Instrument("attention_logit", "attn.rows", quantiles, {f"_{name}": (lambda x, i=i: x[..., i]) for i, name in enumerate(QUANTILES)}),
    Instrument("attention_logit_histogram", "attn.rows", histogram, PLAIN),
)
"""What a probe step publishes: beside the panel, the distribution of the logits."""

HISTOGRAM = "attention_logit_histogram"
UNUSED = "router_unused_since_panel"


def request(panel: tuple[Instrument, ...], carriers: Mapping[str, Array]) -> Taps:
    """The taps of a panel, and probes of the gradient's square sum at the sites of `carriers`."""
    at_site: dict[str, dict[str, Callable]] = {}
    for instrument in panel:
        at_site.setdefault(instrument.site, {})[instrument.tag] = instrument.reduce
    record = {site: (lambda x, rows=rows: {tag: reduce(x) for tag, reduce in rows.items()}) for site, rows in at_site.items()}
    square_sum = lambda gradient: jnp.sum(jnp.square(gradient.astype(jnp.float32)))
    return Taps(record=record, probes={site: Probe(carrier, square_sum) for site, carrier in carriers.items()})


def carriers(panel: tuple[Instrument, ...], depth: int) -> dict[str, Float[Array, "l"]]:
    """The zeros whose gradients are the square sums of dL/dx; none for an empty panel."""
    return {site: jnp.zeros(depth) for site in GRADIENT_SITES} if panel else {}


def publish(panel: tuple[Instrument, ...], records: Mapping[str, Any], square_sums: Mapping[str, Array], activations: int) -> Published:
    """The published values of a panel. `activations`: elements of a residual site over the whole batch."""
    published: Published = {f"activation_grad_rms.{site}": jnp.sqrt(total / activations) for site, total in square_sums.items()}
    for instrument in panel:
        if instrument.site in records:
            for suffix, function in instrument.publish.items():
                of_site = lambda found, tag=instrument.tag, function=function: function(found[tag].value())
                published[instrument.tag + suffix] = by_layer(of_site, records[instrument.site])
    return published


def by_layer(function: Callable, found):
    """`function` of what a site recorded: of the stack of layers, or of each layer of a list (None stays None)."""
    return [None if x is None else function(x) for x in found] if isinstance(found, list) else function(found)


STATISTIC_GROUPS = {"attention": "attention", "bias": "attention", "sinks": "attention", "norm": "norm", "qk_norm": "norm"}


def parameter_statistics(rows: list[Row], depth: int, trees: Mapping[str, Mapping[str, Array]]) -> Published:
    """Gradient norm, parameter RMS, update RMS and their ratio per layer: of attention, MLP and norm parameters and in all; and of the
    embedding, head and final norm; and the gradient norm of each expert. `trees` holds "grad", and optionally "param" and "update", each
    by path."""
    squares = {name: {row.path: row_squares(row, tree[row.path]) for row in rows} for name, tree in trees.items()}
    published: Published = {}
    for group in ("", "attention", "mlp", "norm"):
        members = [row for row in rows if row.layers is not None and group in ("", statistic_group(row))]
        size = np.zeros(depth)
        for row in members:
            np.add.at(size, list(row.layers), row.size / len(row.layers))
        totals = {name: sum_by_layer(members, of, depth) for name, of in squares.items()}
        for name, value in statistics(totals, np.maximum(size, 1)).items():
            if size.all():
                published[name + (group and f".{group}")] = value
            elif size.any():
                published[name + (group and f".{group}")] = [value[layer] if size[layer] else None for layer in range(depth)]
    frame = [row for row in rows if row.layers is None]
    for group in dict.fromkeys(row.group for row in frame):
        members = [row for row in frame if row.group == group]
        totals = {name: sum(of[row.path] for row in members) for name, of in squares.items()}
        found = statistics(totals, sum(row.size for row in members))
        published |= {f"{'final_norm' if group == 'norm' else group}/{name}": value for name, value in found.items()}
    return published | expert_statistics(rows, depth, trees["grad"])


def expert_statistics(rows: list[Row], depth: int, gradient: Mapping[str, Array]) -> Published:
    """The gradient norm of each expert's own weights and biases, and the largest of a layer; nothing where no layer is a mixture."""
    squares: list[Array | None] = [None] * depth
    for row in rows:
        if "experts" in row.axes:
            of_row = jnp.square(gradient[row.path].astype(jnp.float32)).reshape(*row.shape[:2], -1).sum(-1)
            for index, layer in enumerate(row.layers):
                squares[layer] = of_row[index] if squares[layer] is None else squares[layer] + of_row[index]
    if not any(x is not None for x in squares):
        return {}
    return {"grad_norm.experts": by_layer(jnp.sqrt, squares), "grad_norm.worst_expert": by_layer(lambda x: jnp.sqrt(x.max()), squares)}


def unused(load: list[Array | None]) -> Published:
    """How many experts of each layer have no token of the steps whose assignments `load` counts: those since the panel before."""
    found = by_layer(lambda of: (of == 0).sum(dtype=jnp.int32), load)
    return {} if all(x is None for x in found) else {UNUSED: found}


def statistic_group(row: Row) -> str:
    return "mlp" if row.role.startswith(("mlp", "moe")) else STATISTIC_GROUPS[row.group]


def row_squares(row: Row, x: Array) -> Array:
    """The sum of squares of a parameter, per layer where it holds layers."""
    return jnp.sum(jnp.square(x.astype(jnp.float32)), axis=None if row.layers is None else tuple(range(1, x.ndim)))


def sum_by_layer(rows: list[Row], squares: Mapping[str, Array], depth: int) -> Float[Array, "l"]:
    total = jnp.zeros(depth)
    for row in rows:
        total = total.at[np.asarray(row.layers)].add(squares[row.path])
    return total


def statistics(totals: Mapping[str, Array], size) -> Published:
    """Named statistics from sums of squares over `size` elements."""
    found: Published = {"grad_norm": jnp.sqrt(totals["grad"])}
    if "param" in totals:
        found |= {f"{name}_rms": jnp.sqrt(totals[name] / size) for name in ("param", "update")}
        found["update_ratio"] = found["update_rms"] / jnp.maximum(found["param_rms"], 1e-30)
    return found


EACH = (".heads", ".experts")
"""Ends of the keys whose values are per head or expert: for metrics.jsonl alone, however many there are."""


def headline(values: Mapping[str, Any]) -> dict[str, float]:
    """The worst layer of each statistic, as "worst/<statistic>": the lowest of entropies, the highest of all others."""
    found = {}
    for key, value in values.items():
        if isinstance(value, list) and not key.endswith((*EACH, HISTOGRAM)):
            present = [x for x in value if x is not None]
            if present:
                found[f"worst/{key}"] = float((np.min if "entropy" in key else np.max)(present))
    return found


def known_keys(mixture: bool = False) -> list[str]:
    """Every per-layer statistic that the panels may publish and TensorBoard draws, for the layout of its charts; `mixture`: those of
    mixtures of experts too."""
    drawn = [row for row in PROBE_PANEL if SITES[row.site].layered and row.tag != HISTOGRAM and (mixture or not SITES[row.site].mixture)]
    of_panel = [row.tag + suffix for row in drawn for suffix in row.publish if not suffix.endswith(EACH)]
    of_gradients = [f"activation_grad_rms.{site}" for site in GRADIENT_SITES]
    of_parameters = [f"{name}{group}" for name in ("grad_norm", "param_rms", "update_rms", "update_ratio")
                     for group in ("", ".attention", ".mlp", ".norm")]
    return of_parameters + ["grad_norm.worst_expert", UNUSED] * mixture + of_gradients + of_panel
