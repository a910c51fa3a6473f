"""Attention kernels against loops: outputs, gradients and statistics of every row, over every feature of the signature."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models.kernels import KERNELS, AttentionStats, attend
from models.kernels.scores import logit_rows, mean_cosine
from tests.models import reference
from tests.models.reference import EPS, EPS32, assert_close, draw

B, T, H, K = 2, 9, 4, 6
ROUNDINGS = 4 * (K + T)
"""A score, its exponential, and two sums over the keys."""
OF_GRADIENTS = 2 * ROUNDINGS + 8 * B * T
"""The probabilities again, the products with the output's gradient, and a sum over all queries."""

PLAIN = {"scale": K**-0.5, "softcap": None, "window": None}
SINKS = np.array([-2.0, 0.0, 3.0, 40.0])
DOCUMENTS = np.array([[0, 0, 0, 0, 1, 1, 2, 2, 2, 2, 2], [4, 3, 3, 3, 3, 3, 3, 3, 3, 3, 3]])
CASES = {  # query length, key length, key heads, options
    "plain": (T, T, 4, {}),
    "grouped": (T, T, 2, {"scale": 2.0, "window": 3}),
    "multi-query": (T, T, 1, {"softcap": 1.5}),
    "window of one": (T, T, 4, {"window": 1}),
    "window of all": (T, T, 2, {"window": T, "sinks": SINKS}),
    "documents": (T, T, 2, {"segments": DOCUMENTS[:, :T]}),
    "a decoded token": (1, T, 2, {}),
    "the last tokens": (4, 11, 2, {"window": 3}),
    "into a cache": (3, 11, 2, {"offset": 4}),  # the keys after position 6 are not filled yet
    "all at once": (5, 11, 2, {"scale": 1.3, "softcap": 2.0, "window": 4, "sinks": SINKS, "segments": DOCUMENTS, "offset": 5}),
}
REFUSED = {"library": {"softcap", "sinks"}}
GIVEN = {"library": {"lse", "sink"}}
"""Statistics that a row gives, where not all."""
EPSILON = {"library": EPS32}
"""Relative rounding error of a row on float64 arrays, where not that of float64: JAX's own softmax is float32."""
BLOCKS = {"chunked": (4, 3), "pallas": (4, 2)}
CALLS = [(row, case) for row in KERNELS for case in CASES if not REFUSED.get(row, set()) & CASES[case][3].keys()]


@pytest.fixture(autouse=True)
def small_blocks(x64, monkeypatch, request):
    """Kernels that go by blocks meet several of them, and some that no query sees. JAX's own attention mixes types: it is let."""
    for row, blocks in BLOCKS.items():
        monkeypatch.setitem(KERNELS, row, functools.partial(KERNELS[row], blocks=blocks))
    with jax.numpy_dtype_promotion("standard" if request.node.callspec.params.get("row") == "library" else "strict"):
        yield


def inputs(t: int = T, s: int = T, kv_heads: int = 2, dtype=jnp.float64):
    """Queries, keys, values, and the gradient of a loss with respect to the output."""
    shapes = {"q": (t, H), "k": (s, kv_heads), "v": (s, kv_heads), "gradient": (t, H)}
    return [jnp.asarray(draw(name, B, *shape, K), dtype) for name, shape in shapes.items()]


def textbook(q, k, v, gradient, *, scale, softcap=None, window=None, sinks=None, segments=None, offset=None):
    """Causal attention in loops over batch, query and head: output, statistics, the gradients of q, k, v and sinks, and the largest term
    that a gradient is summed from."""
    (b, t, h, _), s, share = q.shape, k.shape[1], q.shape[2] // k.shape[2]
    offset = s - t if offset is None else offset
    segments = np.zeros((b, s)) if segments is None else segments
    out, stats = np.zeros(q.shape), {name: np.zeros((b, t, h)) for name in AttentionStats._fields}
    largest, (of_q, of_k, of_v, of_sinks) = 1.0, (np.zeros(np.shape(x)) for x in (q, k, v, np.zeros(h)))
    for i, j, n in np.ndindex(b, t, h):
        here, g = offset + j, n // share
        seen = [key for key in range(s) if 0 <= here - key < (window or s) and segments[i, key] == segments[i, here]]
        z = scale * k[i, seen, g] @ q[i, j, n]
        slope = np.full(len(seen), scale) if softcap is None else scale / np.cosh(z / softcap) ** 2
        z = z if softcap is None else softcap * np.tanh(z / softcap)
        every = z if sinks is None else np.append(z, sinks[n])
        weights = np.exp(every - every.max())
        p = weights / weights.sum()
        out[i, j, n] = p[: len(seen)] @ v[i, seen, g]
        stats["max"][i, j, n] = z.max()
        stats["lse"][i, j, n] = every.max() + np.log(weights.sum())
        stats["entropy"][i, j, n] = -(p[p > 0] * np.log(p[p > 0])).sum()
        stats["sink"][i, j, n] = p[0] if 0 in seen else 0.0
        of_p = np.append(v[i, seen, g] @ gradient[i, j, n], 0.0)[: len(p)]
        of_z = p * (of_p - out[i, j, n] @ gradient[i, j, n])
        largest = max(largest, np.abs(of_p).max() * max(1.0, scale * np.abs(k[i, seen, g]).max(), scale * np.abs(q[i, j, n]).max()))
        of_q[i, j, n] = (slope * of_z[: len(seen)]) @ k[i, seen, g]
        of_k[i, seen, g] += np.outer(slope * of_z[: len(seen)], q[i, j, n])
        of_v[i, seen, g] += np.outer(p[: len(seen)], gradient[i, j, n])
        of_sinks[n] += 0.0 if sinks is None else of_z[-1]
    return out, stats, (of_q, of_k, of_v, of_sinks), largest


def close(found, wanted, most: float) -> None:
    """Equal but for an absolute error."""
    np.testing.assert_allclose(np.asarray(found, np.float64), wanted, rtol=0, atol=most)


def differentiated(row: str, q, k, v, gradient, options):
    """Output, statistics, and the gradients of q, k, v and sinks, all compiled as one; arrays among the options are arguments."""
    arrays = {name: jnp.asarray(x) for name, x in options.items() if name in ("sinks", "segments", "offset")}
    fixed = {name: x for name, x in options.items() if name not in arrays}

    def loss(q, k, v, sinks, arrays):
        out, stats = attend(q, k, v, kernel=row, **fixed, **arrays, sinks=sinks)
        return (out * gradient).sum(), (out, stats)

    sinks = arrays.pop("sinks", None)
    argnums = (0, 1, 2) if sinks is None else (0, 1, 2, 3)
    gradients, (out, stats) = jax.jit(jax.grad(loss, argnums, has_aux=True))(q, k, v, sinks, arrays)
    return out, stats, gradients


@pytest.mark.parametrize(("row", "case"), CALLS)
def test_kernel_against_loops(row, case):
    """Output, gradients of queries, keys, values and sinks, and every statistic that the row gives are those of the textbook."""
    t, s, kv_heads, options = CASES[case]
    eps, arrays = EPSILON.get(row, EPS), inputs(t, s, kv_heads)
    out, stats, gradients = differentiated(row, *arrays, PLAIN | options)
    expected, expected_stats, expected_gradients, largest = textbook(*(np.asarray(x, np.float64) for x in arrays), **PLAIN | options)
    assert_close(out, expected, ROUNDINGS, eps)
    for name, value in stats._asdict().items():
        assert (value is None) == (name not in GIVEN.get(row, AttentionStats._fields))
        if value is not None:
            close(value, expected_stats[name], ROUNDINGS * eps * np.abs(expected_stats["lse"]).max())  # off by as much as a logit
    for found, wanted in zip(gradients, expected_gradients, strict=False):  # without sinks there are three
        close(found, wanted, OF_GRADIENTS * eps * largest)


@pytest.mark.parametrize("row", KERNELS)
def test_fixed_and_traced_offset(row):
    """An offset known at compile time gives what an argument gives; one out of range is refused with its range."""
    q, k, v, _ = inputs(3, 11)
    call = lambda offset: attend(q, k, v, kernel=row, **PLAIN, offset=offset)
    for fixed, traced in zip(jax.tree.leaves(call(4)), jax.tree.leaves(jax.jit(call)(jnp.int32(4))), strict=True):
        assert_close(fixed, traced, ROUNDINGS, EPSILON.get(row, EPS))
    for offset in (-1, 9):
        with pytest.raises(ValueError, match=rf"offset = {offset}: 3 queries over 11 keys start between 0 and 8"):
            call(offset)


@pytest.mark.parametrize("row", KERNELS)
def test_grouped_queries_are_repeated_keys(row):
    """Grouped attention is multi-head attention whose key and value heads are repeated for their group."""
    q, k, v, _ = inputs()
    repeat = lambda x: jnp.repeat(x, H // 2, axis=2)
    grouped, repeated = (attend(q, *kv, kernel=row, **PLAIN)[0] for kv in ((k, v), (repeat(k), repeat(v))))
    assert_close(grouped, repeated, ROUNDINGS, EPSILON.get(row, EPS))


@pytest.mark.parametrize("row", [row for row in KERNELS if "entropy" in GIVEN.get(row, AttentionStats._fields)])
def test_entropy_bounds(row):
    """Entropy is 0 where one key is seen, log n where n equal logits are, and between elsewhere; a sink adds one choice."""
    q, k, v, _ = inputs()
    entropy = lambda q, **changes: attend(q, k, v, kernel=row, **PLAIN | changes)[1].entropy
    seen, off = np.log(np.arange(1, T + 1))[:, None], ROUNDINGS * EPS * 10  # no logit here is above 10
    close(entropy(q, window=1), np.zeros((B, T, H)), off)
    close(entropy(q)[:, 0], np.zeros((B, H)), off)
    close(entropy(0 * q), np.broadcast_to(seen, (B, T, H)), off)
    close(entropy(0 * q, sinks=jnp.zeros(H)), np.broadcast_to(np.log(np.arange(2, T + 2))[:, None], (B, T, H)), off)
    found = entropy(3 * q)
    assert (found >= -off).all()
    assert (found <= seen + off).all()


@pytest.mark.parametrize("row", KERNELS)
def test_statistics_carry_no_gradient(row):
    """No gradient flows through the statistics."""
    arrays = inputs()[:3]
    loss = lambda *qkv: sum(x.sum() for x in attend(*qkv, kernel=row, **PLAIN)[1] if x is not None)
    for gradient in jax.grad(loss, (0, 1, 2))(*arrays):
        np.testing.assert_array_equal(gradient, 0)


@pytest.mark.parametrize("row", KERNELS)
def test_enormous_logits_stay_finite(row):
    """Logits of a million overflow nothing: output, statistics and gradients are finite, and the softmax is the argmax."""
    q, k, v, gradient = inputs()
    options = PLAIN if row in REFUSED else PLAIN | {"sinks": np.zeros(H)}
    out, stats, gradients = differentiated(row, 1e6 * q, k, v, gradient, options)
    assert all(jnp.isfinite(x).all() for x in jax.tree.leaves((out, stats, gradients)))
    expected, *_ = textbook(*map(np.asarray, (1e6 * q, k, v, gradient)), **options)
    assert_close(out, expected, ROUNDINGS * 1e6, EPSILON.get(row, EPS))  # exp turns an error of a logit into a share of its size


HALF = 2.0**-9
"""Relative error of one rounding to bfloat16."""


@pytest.mark.parametrize("given", ("float32", "bfloat16"))
@pytest.mark.parametrize("row", KERNELS)
def test_bfloat16(row, given):
    """bfloat16 arrays, or float32 ones with bfloat16 operands, cost a rounding of p and one of the output, in the gradients of p, of dL/dz,
    of dL/dout and of the result: logits, softmax, sums and statistics stay float32. Results have the type that was given."""
    arrays = [x.astype(jnp.bfloat16).astype(given) for x in inputs()]
    out, stats, gradients = differentiated(row, *arrays, PLAIN | {"operands": "bfloat16", "window": 5})
    expected, expected_stats, expected_gradients, largest = textbook(*(np.asarray(x, np.float64) for x in arrays), **PLAIN | {"window": 5})
    assert {x.dtype for x in (out, *gradients)} == {jnp.dtype(given)}
    for name, value in stats._asdict().items():
        assert (value is None) == (name not in GIVEN.get(row, AttentionStats._fields) or row == "library")  # whose residual is bfloat16
        if value is not None:
            assert value.dtype == jnp.float32
            close(value, expected_stats[name], ROUNDINGS * EPS32 * np.abs(expected_stats["lse"]).max())
    close(out, expected, (2 * HALF + ROUNDINGS * EPS32) * np.abs(expected).max())
    for found, wanted in zip(gradients, expected_gradients, strict=False):
        close(found, wanted, 4 * HALF * largest)


@pytest.mark.parametrize("row", BLOCKS)
def test_blocks_that_no_query_sees_are_not_read(row):
    """What lies before every window and after the last query may be anything: forward and backward skip its blocks."""
    q, k, v, gradient = inputs(4, 20)
    fill = lambda x: x.at[:, :6].set(jnp.nan).at[:, 15:].set(jnp.nan)  # of the keys, 9 to 13 are seen: blocks of 3 and 2 from 8 to 14
    options = PLAIN | {"window": 2, "offset": 10}
    out, stats, gradients = differentiated(row, q, fill(k), fill(v), gradient, options)
    expected = differentiated(row, q, k, v, gradient, options)
    for found, wanted in zip(jax.tree.leaves((out, stats, gradients)), jax.tree.leaves(expected), strict=True):
        np.testing.assert_array_equal(found, wanted)


@pytest.mark.parametrize("window", (None, 1, 3, T, T + 5))
@pytest.mark.parametrize(("kv_heads", "t"), ((4, T), (2, T), (1, T), (2, 4)))
def test_mean_cosine_against_brute_force(kv_heads, t, window):
    """The running sums give the mean over visible keys of the cosine of each query with each key."""
    q, k, v, _ = map(np.asarray, inputs(t, T, kv_heads))
    _, stats = reference.attention(q, k, v, **PLAIN | {"window": window})
    assert_close(mean_cosine(jnp.asarray(q), jnp.asarray(k), window), stats["cosine"], ROUNDINGS * T)


@pytest.mark.parametrize(("kv_heads", "options"), ((4, {}), (1, {"window": 1}), (2, {"window": 4, "softcap": 2.0, "scale": 1.3})))
@pytest.mark.parametrize("rows", (1, 3, T - 1, T, 50))
def test_logit_rows_against_brute_force(rows, kv_heads, options):
    """The sampled rows are rows of the full logits, -inf where masked; the last query is among them, and they are evenly spaced."""
    q, k, v, _ = inputs(kv_heads=kv_heads)
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
