"""Attention kernels against loops: outputs, statistics, grouped queries, windows, caps, sinks."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models.kernels import KERNELS, attend
from models.kernels.scores import logit_rows, mean_cosine
from tests.models import reference
from tests.models.reference import EPS, EPS32, assert_close, draw

pytestmark = pytest.mark.usefixtures("x64")

B, T, H, K = 2, 9, 4, 6
ROUNDINGS = 4 * (K + T)  # a score, its exponential, and two sums over the keys
PLAIN = {"scale": K**-0.5, "softcap": None, "window": None}
VARIANTS = {
    "plain": (4, {}), "grouped": (2, {}), "multi-query": (1, {}), "window": (2, {"window": 3}), "window of one": (4, {"window": 1}),
    "window of all": (4, {"window": T}), "softcap": (2, {"softcap": 1.5}), "scale": (4, {"scale": 2.0}),
    "all": (2, {"window": 4, "softcap": 2.0, "scale": 1.3}),
}
SINKS = {"no sinks": None, "sinks": np.array([-2.0, 0.0, 3.0, 40.0])}


def inputs(kv_heads: int, t: int = T):
    return tuple(jnp.asarray(draw(name, B, n, heads, K)) for name, n, heads in (("q", t, H), ("k", T, kv_heads), ("v", T, kv_heads)))


@pytest.mark.parametrize("sinks", SINKS)
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("kernel", KERNELS)
def test_kernel_against_loops(kernel, variant, sinks):
    """Output, largest logit, log-sum-exp, entropy and mass on the first key are those of the textbook softmax."""
    kv_heads, options = VARIANTS[variant]
    options, sinks = PLAIN | options, SINKS[sinks]
    q, k, v = inputs(kv_heads)
    out, stats = attend(q, k, v, kernel=kernel, **options, sinks=None if sinks is None else jnp.asarray(sinks))
    expected, expected_stats = reference.attention(*map(np.asarray, (q, k, v)), **options, sinks=sinks)
    assert_close(out, expected, ROUNDINGS)
    for name, value in stats._asdict().items():
        if value is not None:
            assert_close(value, expected_stats[name], ROUNDINGS)


@pytest.mark.parametrize("kernel", KERNELS)
def test_fewer_queries_than_keys(kernel):
    """The last query meets the last key: t queries give the last t rows of the full result."""
    q, k, v = inputs(2)
    options = PLAIN | {"kernel": kernel, "window": 4}
    full, full_stats = attend(q, k, v, **options)
    last, last_stats = attend(q[:, -3:], k, v, **options)
    assert_close(last, full[:, -3:], ROUNDINGS)
    for few, many in zip(last_stats, full_stats, strict=True):
        assert few is None or not np.abs(few - many[:, -3:]).max() > ROUNDINGS * EPS * np.abs(many).max()


@pytest.mark.parametrize("kv_heads", (1, 2))
@pytest.mark.parametrize("kernel", KERNELS)
def test_grouped_queries_are_repeated_keys(kernel, kv_heads):
    """Grouped (or multi-query) attention is multi-head attention whose key and value heads are repeated for their group."""
    q, k, v = inputs(kv_heads)
    repeat = lambda x: jnp.repeat(x, H // kv_heads, axis=2)
    assert_close(attend(q, k, v, kernel=kernel, **PLAIN)[0], attend(q, repeat(k), repeat(v), kernel=kernel, **PLAIN)[0], ROUNDINGS)


@pytest.mark.parametrize("kernel", KERNELS)
def test_entropy_bounds(kernel):
    """Entropy is 0 where one key is seen, log n where n equal logits are, and between elsewhere; a sink adds one choice."""
    q, k, v = inputs(4)
    entropy = lambda q, **changes: attend(q, k, v, kernel=kernel, **PLAIN | changes)[1].entropy
    np.testing.assert_array_equal(entropy(q, window=1), 0)
    np.testing.assert_array_equal(entropy(q)[:, 0], 0)
    seen = np.log(np.arange(1, T + 1))[:, None]
    assert_close(entropy(0 * q), np.broadcast_to(seen, (B, T, H)), ROUNDINGS)
    assert_close(entropy(0 * q, sinks=jnp.zeros(H)), np.broadcast_to(np.log(np.arange(2, T + 2))[:, None], (B, T, H)), ROUNDINGS)
    found = entropy(5 * q)
    assert (found >= -ROUNDINGS * EPS).all()
    assert (found <= seen + ROUNDINGS * EPS).all()


@pytest.mark.parametrize("kernel", KERNELS)
def test_statistics_carry_no_gradient(kernel):
    """No gradient flows through the statistics."""
    q, k, v = inputs(2)
    loss = lambda *qkv: sum(x.sum() for x in attend(*qkv, kernel=kernel, **PLAIN, sinks=jnp.zeros(H))[1])
    for gradient in jax.grad(loss, (0, 1, 2))(q, k, v):
        np.testing.assert_array_equal(gradient, 0)


@pytest.mark.parametrize("kernel", KERNELS)
def test_enormous_logits_stay_finite(kernel):
    """Logits of a million overflow nothing: output, statistics and gradients are finite, and the softmax is the argmax."""
    q, k, v = inputs(4)
    q = 1e6 * q
    out, stats = attend(q, k, v, kernel=kernel, **PLAIN, sinks=jnp.zeros(H))
    gradients = jax.grad(lambda *qkv: attend(*qkv, kernel=kernel, **PLAIN, sinks=jnp.zeros(H))[0].sum(), (0, 1, 2))(q, k, v)
    assert all(jnp.isfinite(x).all() for x in (out, *(x for x in stats if x is not None), *gradients))
    expected, _ = reference.attention(*map(np.asarray, (q, k, v)), **PLAIN, sinks=np.zeros(H))
    assert_close(out, expected, ROUNDINGS * 1e6)  # exp turns an error of a logit into a share of its size


@pytest.mark.parametrize("kernel", KERNELS)
def test_bfloat16_operands(kernel):
    """With bfloat16 operands the output is off by bfloat16 roundings of q, k, p and v alone: logits and softmax stay float32."""
    q, k, v = (x.astype(jnp.float32) for x in inputs(2))
    cut = lambda x: np.asarray(x.astype(jnp.bfloat16), np.float64)
    out, stats = attend(q, k, v, kernel=kernel, **PLAIN, operands="bfloat16")
    expected, expected_stats = reference.attention(cut(q), cut(k), cut(v), **PLAIN)
    assert out.dtype == jnp.float32
    assert_close(stats.lse, expected_stats["lse"], ROUNDINGS, EPS32)
    assert_close(out, expected, 1, eps=2.0**-8)  # p is rounded once, and sums to one


@pytest.mark.parametrize("window", (None, 1, 3, T, T + 5))
@pytest.mark.parametrize(("kv_heads", "t"), ((4, T), (2, T), (1, T), (2, 4)))
def test_mean_cosine_against_brute_force(kv_heads, t, window):
    """The running sums give the mean over visible keys of the cosine of each query with each key."""
    q, k, v = map(np.asarray, inputs(kv_heads, t))
    _, stats = reference.attention(q, k, v, **PLAIN | {"window": window})
    assert_close(mean_cosine(jnp.asarray(q), jnp.asarray(k), window), stats["cosine"], ROUNDINGS * T)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("rows", (1, 3, T - 1, T, 50))
def test_logit_rows_against_brute_force(rows, variant):
    """The sampled rows are rows of the full logits, -inf where masked; the last query is among them, and they are evenly spaced."""
    kv_heads, options = VARIANTS[variant]
    q, k, v = inputs(kv_heads)
    _, stats = reference.attention(*map(np.asarray, (q, k, v)), **PLAIN | options)
    found = np.asarray(logit_rows(q, k, rows, **PLAIN | options))
    assert found.shape == (B, H, min(rows, T), T)
    seen = np.isfinite(found)
    chosen = np.array([row[0].nonzero()[0].max() for row in seen[0].swapaxes(0, 1)])  # a query's last visible key is its own position
    assert chosen[-1] == T - 1
    assert set(np.diff(chosen)) <= {int(np.floor(T / rows)), int(np.ceil(T / rows))}
    expected = stats["logits"][:, :, chosen]
    np.testing.assert_array_equal(seen, np.isfinite(expected))
    assert_close(found[seen], expected[seen], ROUNDINGS)
