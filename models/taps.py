"""Taps: the one way to see and to change activations.

A site in model code is one call that returns its argument, `x = tap("resid.mid", x)`. What happens there is a request made from
outside: edits, probes and records, in this order. Statistics, the logit lens, activation patching, head ablation and steering are
requests, not code in the model.
"""

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import jax
from jaxtyping import Array, Float

from configs.knobs import nearest
from models.sharding import constrain


@dataclass(frozen=True)
class Site:
    """A row of SITES: its axes, whether each layer has one, whether it is a statistic (it can be recorded, not changed), and whether only
    mixture layers have it."""

    axes: str
    meaning: str
    layered: bool = True
    statistic: bool = False
    mixture: bool = False


SITES: dict[str, Site] = {
    "embed": Site("b t d", "embedding, scaled", layered=False),
    "resid.pre": Site("b t d", "residual stream entering the layer"),
    "attn.in": Site("b t d", "what q, k and v are made of: gain in(x)"),
    "attn.q": Site("b t h k", "queries as they meet the keys: after QK-norm and RoPE"),
    "attn.k": Site("b t g k", "keys as they meet the queries: after QK-norm and RoPE"),
    "attn.v": Site("b t g k", "values"),
    "attn.max": Site("b t h", "largest logit of the query over the keys it sees", statistic=True),
    "attn.lse": Site("b t h", "log of the softmax's denominator, learned sink included, in nats", statistic=True),
    "attn.entropy": Site("b t h", "entropy of the softmax, learned sink included, in nats", statistic=True),
    "attn.sink": Site("b t h", "attention to the first key", statistic=True),
    "attn.cosine": Site("b t h", "mean cosine of the query with the keys it sees", statistic=True),
    "attn.rows": Site("b h t s", "logits of evenly spaced query rows, -inf where masked", statistic=True),
    "attn.heads": Site("b t h k", "output of each head, before the output projection"),
    "attn.out": Site("b t d", "output of the attention branch, before its norm"),
    "resid.mid": Site("b t d", "residual stream after attention"),
    "mlp.in": Site("b t d", "what the MLP reads: gain in(x)"),
    "mlp.hidden": Site("b t f", "hidden units after activation and gate; in a mixture those of its shared experts"),
    "router.logits": Site("b t e", "router logits of a mixture", mixture=True),
    "router.probabilities": Site("b t e", "scores of the experts divided by their sum", statistic=True, mixture=True),
    "router.weights": Site("b t e", "weight of each expert in a mixture, zero where not chosen; dispatch dense alone sends a token to "
                           "experts that an edit adds", mixture=True),
    "router.balance": Site("", "balance loss, 1 for an even load", statistic=True, mixture=True),
    "router.load": Site("e", "assignments of counted tokens to each expert", statistic=True, mixture=True),
    "router.dropped": Site("", "share of the assignments that found no slot", statistic=True, mixture=True),
    "mlp.out": Site("b t d", "output of the MLP branch, before its norm"),
    "resid.post": Site("b t d", "residual stream leaving the layer"),
    "resid.final": Site("b t d", "what the output head reads", layered=False),
    "logits": Site("b t v", "output logits, after their soft cap", layered=False),
}

Reducer = Callable[[Array], Any]


@dataclass(frozen=True)
class Edit:
    """x <- keep x + add, at one site; both broadcast to the site's axes, behind a leading axis of layers where the site has one."""

    keep: Array
    add: Array


@dataclass(frozen=True)
class Probe:
    """An identity whose backward pass reduces the gradient of the loss with respect to the activation.

    The gradient of the loss with respect to `carrier` ([layers, …] zeros, or […] at a site of the frame) is `reduce(dL/dx)`, summed over
    calls: O(layers) memory instead of one more set of activations.
    """

    carrier: Array
    reduce: Reducer


@dataclass(frozen=True)
class Taps:
    """A request: what to record, edit and probe, by site. Raises ValueError for an unknown site, or for a change to a statistic."""

    record: Mapping[str, Reducer] = field(default_factory=dict)
    edits: Mapping[str, Edit] = field(default_factory=dict)
    probes: Mapping[str, Probe] = field(default_factory=dict)

    def __post_init__(self):
        for site in (*self.record, *self.edits, *self.probes):
            check_site(site)
        for site in (*self.edits, *self.probes):
            if SITES[site].statistic:
                raise ValueError(f"site {site!r} is a statistic: it can be recorded, not edited or probed")

    def inputs(self) -> dict:
        """The arrays that go into the layers, with a leading axis of layers."""
        return {
            "edits": {site: (edit.keep, edit.add) for site, edit in self.edits.items() if SITES[site].layered},
            "probes": {site: probe.carrier for site, probe in self.probes.items() if SITES[site].layered},
        }

    def frame(self) -> "Tap":
        """The tap of the sites around the layers."""
        return Tap(self, {
            "edits": {site: (edit.keep, edit.add) for site, edit in self.edits.items() if not SITES[site].layered},
            "probes": {site: probe.carrier for site, probe in self.probes.items() if not SITES[site].layered},
        })


def check_site(site: str) -> None:
    """Raises ValueError for a name that SITES does not have."""
    if site not in SITES:
        raise ValueError(f"unknown site {site!r}; {nearest(site, SITES)}")


class Tap:
    """The request as it stands in one layer (or in the frame): call it at a site; afterwards `records` holds what was recorded."""

    def __init__(self, taps: Taps, inputs: dict):
        self.taps, self.inputs = taps, inputs
        self.records: dict[str, Any] = {}

    def __call__(self, site: str, x: Float[Array, "..."]) -> Float[Array, "..."]:
        check_site(site)
        x = constrain(x, tuple(SITES[site].axes.split()))
        if site in self.inputs["edits"]:
            keep, add = self.inputs["edits"][site]
            x = (keep * x + add).astype(x.dtype)
        if site in self.inputs["probes"]:
            x = probed(self.taps.probes[site].reduce, x, self.inputs["probes"][site])
        if site in self.taps.record:
            self.records[site] = self.taps.record[site](jax.lax.stop_gradient(x))
        return x


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def probed(reduce: Reducer, x: Array, carrier: Array) -> Array:
    """x; its backward pass hands reduce(dL/dx) to the carrier."""
    return x


def probed_forward(reduce, x, carrier):
    return x, carrier


def probed_backward(reduce, carrier, gradient):
    return gradient, jax.numpy.broadcast_to(reduce(gradient), carrier.shape).astype(carrier.dtype)


probed.defvjp(probed_forward, probed_backward)
