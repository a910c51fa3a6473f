"""The stability panel against brute force on the activations themselves."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models.parameters import bind
from models.taps import Edit, Taps
from tests.train.small import SAME, by_layer, plan_of, small, tokens_of
from train.instruments import HISTOGRAM, PROBE_PANEL, headline, known_keys
from train.log import plain
from train.loss import next_token_loss
from train.step import gradients, make_probe, make_step

PLAIN = {"model.depth": 3}
UNEVEN = {
    "model.depth": 4,
    "model.pattern": ("attention.window=3", "attention.heads=2 mlp.width=16"),
    "model.attention.sinks": True,
    "model.attention.softcap": 2.0,
    "model.attention.scale": 1.5,
}
CASES = {"plain": PLAIN, "uneven": UNEVEN}


@functools.cache
def seen(case: str):
    """(plan, parameters, tokens, published by the probe panel)."""
    plan = plan_of(small(CASES[case]))
    parameters, tokens = plan.fresh().parameters, tokens_of(plan.config, plan.mesh)
    published = jax.jit(lambda p, t: gradients(plan, PROBE_PANEL, p, t)[2])(parameters, tokens)
    return plan, parameters, tokens, jax.device_get(published)


@functools.cache
def taken(case: str, site: str) -> list[np.ndarray]:
    """The raw activations of a site, by layer."""
    plan, parameters, tokens, _ = seen(case)
    forward = lambda p, t: bind(plan.model, p)(t[:, :-1], taps=Taps(record={site: lambda x: x})).records[site]
    return by_layer(jax.jit(forward)(parameters, tokens))


def logits_of(case: str, layer: int) -> np.ndarray:
    """The attention logits [b, h, t, s] of a layer from its queries and keys, -inf where masked, in float64."""
    attention = seen(case)[0].config.model.layers[layer].attention
    q, k = (taken(case, site)[layer].astype(np.float64) for site in ("attn.q", "attn.k"))
    k = np.repeat(k, q.shape[2] // k.shape[2], axis=2)
    z = np.einsum("bthk,bshk->bhts", q, k) * (attention.scale or q.shape[-1] ** -0.5)
    if attention.softcap is not None:
        z = attention.softcap * np.tanh(z / attention.softcap)
    distance = np.arange(z.shape[2])[:, None] - np.arange(z.shape[3])
    return np.where((distance >= 0) & (distance < (attention.window or np.inf)), z, -np.inf)


def attention_statistics(case: str, layer: int) -> dict[str, np.ndarray]:
    """[b, h, t] statistics of each query's softmax; an initial sink is one more logit of zero."""
    z = logits_of(case, layer)
    with_sink = np.concatenate((z, np.zeros((*z.shape[:3], 1))), -1) if seen(case)[0].config.model.layers[layer].attention.sinks else z
    lse = np.log(np.exp(with_sink).sum(-1))
    p = np.exp(with_sink - lse[..., None])
    return {"max": z.max(-1), "lse": lse, "entropy": -np.where(p > 0, p * np.log(np.maximum(p, 1e-300)), 0).sum(-1), "sink": p[..., 0]}


ATTENTION = {  # key: (statistic, over batch and time, over heads)
    "attention_logit_max": ("max", np.max, np.max),
    "attention_logit_lse": ("lse", np.mean, np.mean),
    "attention_logit_lse.worst": ("lse", np.mean, np.max),
    "attention_entropy": ("entropy", np.mean, np.mean),
    "attention_entropy.worst": ("entropy", np.mean, np.min),
    "attention_sink": ("sink", np.mean, np.mean),
    "attention_sink.worst": ("sink", np.mean, np.max),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("key", ATTENTION)
def test_attention_statistics_are_those_of_the_softmax(key, case):
    """Largest logit, log sum exp, entropy and mass on the first key are those of the softmax over the visible keys and the sink,
    averaged over batch and time, then over heads or at the worst head; `.heads` has each head."""
    statistic, over_tokens, over_heads = ATTENTION[key]
    published = seen(case)[3]
    for layer, found in enumerate(by_layer(published[key])):
        of_heads = over_tokens(attention_statistics(case, layer)[statistic], axis=(0, 2))
        np.testing.assert_allclose(found, over_heads(of_heads), rtol=SAME, atol=SAME)
        np.testing.assert_allclose(by_layer(published[key.removesuffix(".worst") + ".heads"])[layer], of_heads, rtol=SAME, atol=SAME)


@pytest.mark.parametrize("case", CASES)
def test_query_and_key_geometry(case):
    """Query and key norms are mean lengths, their cosine the mean over each query's visible keys."""
    published = seen(case)[3]
    for layer, z in enumerate(logits_of(case, layer) for layer in range(seen(case)[0].config.model.depth)):
        q, k = (taken(case, site)[layer].astype(np.float64) for site in ("attn.q", "attn.k"))
        length = lambda x: np.linalg.norm(x, axis=-1)
        for key, x in (("query_norm", q), ("key_norm", k)):
            np.testing.assert_allclose(by_layer(published[key])[layer], length(x).mean(), rtol=SAME)
            np.testing.assert_allclose(by_layer(published[f"{key}.worst"])[layer], length(x).mean((0, 1)).max(), rtol=SAME)
        k = np.repeat(k, q.shape[2] // k.shape[2], axis=2)
        cosine = np.einsum("bthk,bshk->bhts", q / length(q)[..., None], k / length(k)[..., None])
        visible = np.isfinite(z)
        mean = np.where(visible, cosine, 0).sum(-1) / visible.sum(-1)
        np.testing.assert_allclose(by_layer(published["query_key_cosine"])[layer], mean.mean(), rtol=SAME, atol=SAME)


@pytest.mark.parametrize("case", CASES)
def test_activation_sizes_are_those_of_the_activations(case):
    """RMS and largest absolute value at each residual and branch site are those of the tensor there."""
    published = seen(case)[3]
    for site in ("resid.pre", "attn.in", "attn.out", "resid.mid", "mlp.in", "mlp.out", "resid.post"):
        rms, largest = by_layer(published[f"activation_rms.{site}"]), by_layer(published[f"activation_max.{site}"])
        for layer, x in enumerate(taken(case, site)):
            np.testing.assert_allclose(rms[layer], np.sqrt(np.square(x, dtype=np.float64).mean()), rtol=SAME)
            np.testing.assert_allclose(largest[layer], np.abs(x).max(), rtol=SAME)


@pytest.mark.parametrize("case", CASES)
def test_logit_quantiles_and_histogram_are_of_the_visible_logits(case):
    """On evenly spaced queries, the last among them, p1 to p99 are numpy's quantiles of the logits that are not masked, and the
    histogram counts each of them once between the smallest and the largest."""
    plan, _, _, published = seen(case)
    t = plan.config.data.sequence
    for layer in range(plan.config.model.depth):
        rows, z = taken(case, "attn.rows")[layer], logits_of(case, layer)
        chosen = [int(np.flatnonzero(np.isfinite(row))[-1]) for row in rows[0, 0]]  # a causal row ends at its own position
        assert len(chosen) == plan.config.instruments.rows and chosen[-1] == t - 1 and np.ptp(np.diff(chosen)) <= 1
        np.testing.assert_allclose(rows, z[:, :, chosen], rtol=SAME, atol=SAME)
        visible = rows[np.isfinite(rows)]
        for name, share in (("p01", 0.01), ("p50", 0.5), ("p95", 0.95), ("p99", 0.99)):
            found = by_layer(published[f"attention_logit_{name}"])[layer]
            np.testing.assert_allclose(found, np.quantile(visible, share), rtol=SAME, atol=SAME)
        low, high, *counts = by_layer(published[HISTOGRAM])[layer]
        assert sum(counts) == visible.size
        np.testing.assert_allclose((low, high), (visible.min(), visible.max()), rtol=SAME)
        expected = np.histogram(visible, len(counts), (low, high))[0]
        np.testing.assert_allclose(np.cumsum(counts), np.cumsum(expected), atol=2)  # a logit on the edge of a bin falls on either side


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("site", ["resid.pre", "resid.mid", "resid.post"])
def test_activation_gradients_are_those_of_an_added_zero(site, case):
    """activation_grad_rms at a residual site is the RMS of the loss's gradient with respect to a zero that is added there."""
    plan, parameters, tokens, published = seen(case)
    shape = (plan.config.model.depth, tokens.shape[0], tokens.shape[1] - 1, plan.config.model.width)

    def loss(zero):
        taps = Taps(edits={site: Edit(jnp.ones(shape[0]), zero)})
        logits = bind(plan.model, parameters)(tokens[:, :-1], taps=taps).logits
        return next_token_loss(logits, tokens[:, 1:], plan.config.train.z_loss).total

    gradient = np.asarray(jax.jit(jax.grad(loss))(jnp.zeros(shape)), np.float64)
    np.testing.assert_allclose(published[f"activation_grad_rms.{site}"], np.sqrt((gradient**2).mean((1, 2, 3))), rtol=SAME)


def test_output_logits_are_summed_up():
    """logits/log_z and logits/mean are the means over tokens of log sum exp and of the logits."""
    plan, parameters, tokens, published = seen("plain")
    logits = np.asarray(jax.jit(lambda p, t: bind(plan.model, p)(t[:, :-1]).logits)(parameters, tokens), np.float64)
    np.testing.assert_allclose(published["logits/log_z"], np.log(np.exp(logits).sum(-1)).mean(), rtol=SAME)
    np.testing.assert_allclose(published["logits/mean"], logits.mean(), atol=SAME * np.abs(logits).max())


@functools.cache
def everything(case: str) -> dict:
    """All that a loud step and a probe publish, as a log writes it."""
    plan, _, tokens, _ = seen(case)
    values = jax.device_get(make_step(plan, loud=True)(plan.fresh(), tokens)[1] | make_probe(plan)(plan.fresh().parameters, tokens))
    return {key: plain(key, value) for key, value in values.items()}


@pytest.mark.parametrize("case", CASES)
def test_every_statistic_of_layers_has_each_layer(case):
    """A key without a slash has one entry per layer, one with a slash is a number: on the training batch and on the probe batch."""
    depth = seen(case)[0].config.model.depth
    for key, value in everything(case).items():
        assert isinstance(value, float) if "/" in key else len(value) == depth, key
    assert sum("/" not in key for key in everything(case)) > 80


@pytest.mark.parametrize("case", CASES)
def test_the_layout_knows_every_statistic_of_layers(case):
    """Whatever is published per layer, per-head values and histograms aside, has its chart; and no chart is without a statistic."""
    drawn = {key.removeprefix("probe.") for key in everything(case) if "/" not in key and not key.endswith((".heads", HISTOGRAM))}
    assert drawn == set(known_keys())
    assert len(known_keys()) == len(set(known_keys()))


def test_the_headline_is_the_worst_layer():
    """The worst layer is the one with the lowest entropy, and the one with the highest of all else; a layer without a value has no say."""
    found = headline({"attention_entropy": [2.0, 0.5, None], "attention_logit_max": [1.0, 30.0, 2.0], "train/loss": 4.0,
                      "probe.attention_entropy.worst": [0.3, 0.2], "attention_sink.heads": [[0.1], [0.9]], "grad_norm.norm": [None, None]})
    assert found == {"worst/attention_entropy": 0.5, "worst/attention_logit_max": 30.0, "worst/probe.attention_entropy.worst": 0.2}
