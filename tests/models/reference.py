"""The textbook in plain numpy float64, and small models to hold against it. No formula here comes from `models`."""

import math
import zlib

import jax.numpy as jnp
import numpy as np

from configs.knobs import replace
from configs.model import Layer, Model
from models import parameters
from models.transformer import Transformer

EPS = float(np.finfo(np.float64).eps)
EPS32 = float(np.finfo(np.float32).eps)


def draw(name: str, *shape: int) -> np.ndarray:
    """Standard normal numbers that depend on the name and shape alone."""
    return np.random.default_rng(zlib.crc32(name.encode())).standard_normal(shape)


def tokens(batch: int = 2, sequence: int = 8, vocab: int = 32) -> jnp.ndarray:
    return jnp.asarray(np.random.default_rng(0).integers(0, vocab, (batch, sequence)))


def assert_close(actual, expected, roundings: float, eps: float = EPS) -> None:
    """Equal but for `roundings` errors of one eps each, on the scale of the largest expected number."""
    actual, expected = np.asarray(actual, np.float64), np.asarray(expected, np.float64)
    assert actual.shape == expected.shape
    np.testing.assert_allclose(actual, expected, rtol=0, atol=roundings * eps * max(np.abs(expected).max(initial=0), 1e-300))


def roundings(model: Model, sequence: int = 8) -> float:
    """An upper bound on the roundings behind a logit: the lengths of all sums that it passes through, and 16 more a layer."""
    total = 2 * model.width
    for layer in model.layers:
        k = layer.attention.head_width or model.width // layer.attention.heads
        total += 6 * model.width + 3 * k + sequence + layer.attention.heads * k + layer.mlp.width + 16
    return total


def tiny(changes: dict | None = None) -> Model:
    """Three layers of width 16 over 32 tokens, with changes."""
    return replace(Model(), {"width": 16, "depth": 3, "vocab": 32, "mlp.width": 24} | (changes or {}))


def random_values(rows, dtype="float64") -> dict[str, jnp.ndarray]:
    """Values of every parameter: weights of unit gain, and norms, biases, sinks and temperatures off their constants."""
    def value(row):
        noise = draw(row.path, *row.shape)
        return noise / math.sqrt(row.fan[0]) if row.constant is None else row.constant + 0.3 * noise

    return {row.path: jnp.asarray(value(row), dtype) for row in rows}


def build(model: Model, dtype="float64", **options):
    """A transformer with random values: (module, table, values)."""
    module = Transformer(model, **options)
    rows = parameters.table(module)
    values = random_values(rows, dtype)
    return parameters.bind(module, values), rows, values


def by_layer(rows, values, depth: int) -> list[dict[str, np.ndarray]]:
    """The parameters of each layer by their path inside it, float64."""
    layers = [{} for _ in range(depth)]
    for row in rows:
        for index, layer in enumerate(row.layers or ()):
            layers[layer][row.local_path] = np.asarray(values[row.path][index], np.float64)
    return layers


def norm(x, kind, *, eps=1e-6, eps_position="inside", centred=None, gain=1.0, bias=0.0, alpha=0.5, axes=(-1,)):
    """y = gain (x - mean) / root + bias; tanh for dyt."""
    if kind == "none":
        return x
    if kind == "layer" if centred is None else centred:
        x = x - x.mean(axes, keepdims=True)
    if kind == "dyt":
        return gain * np.tanh(alpha * x) + bias
    squares = (x**2).sum(axes, keepdims=True) if kind == "l2" else (x**2).mean(axes, keepdims=True)
    root = {"inside": np.sqrt(squares + eps), "outside": np.sqrt(squares) + eps, "floor": np.maximum(np.sqrt(squares), eps)}[eps_position]
    return gain * x / root + bias


def rope(x, positions, theta, n=None, interleaved=False, factor=1.0):
    """Pair i of the first n dimensions of x [b t h k] turned by position / factor * theta^(-2 i / n)."""
    n = x.shape[-1] if n is None else n
    y = x.copy()
    for i in range(n // 2):
        first, second = (2 * i, 2 * i + 1) if interleaved else (i, i + n // 2)
        angle = (np.asarray(positions, np.float64) / factor * theta ** (-2 * i / n))[:, None]
        a, b = x[..., first], x[..., second]
        y[..., first], y[..., second] = a * np.cos(angle) - b * np.sin(angle), a * np.sin(angle) + b * np.cos(angle)
    return y


def attention(q, k, v, *, scale, softcap=None, window=None, sinks=None):
    """Causal attention, one query and head after the other: (out [b t h k], {max, lse, entropy, sink, logits})."""
    (b, t, h, _), s, g = q.shape, k.shape[1], k.shape[2]
    out = np.zeros((*q.shape[:3], v.shape[-1]))
    stats = {name: np.zeros((b, t, h)) for name in ("max", "lse", "entropy", "sink", "cosine")} | {"logits": np.full((b, h, t, s), -np.inf)}
    for i, j, head in np.ndindex(b, t, h):
        here, kv = j + s - t, head // (h // g)
        seen = range(0 if window is None else max(0, here - window + 1), here + 1)
        z = np.array([scale * q[i, j, head] @ k[i, key, kv] for key in seen])
        z = z if softcap is None else softcap * np.tanh(z / softcap)
        every = z if sinks is None else np.append(z, sinks[head])
        p = np.exp(every - every.max())
        p /= p.sum()
        out[i, j, head] = sum(p[n] * v[i, key, kv] for n, key in enumerate(seen))
        stats["max"][i, j, head] = z.max()
        stats["lse"][i, j, head] = every.max() + np.log(np.exp(every - every.max()).sum())
        stats["entropy"][i, j, head] = -(p[p > 0] * np.log(p[p > 0])).sum()
        stats["sink"][i, j, head] = p[0] if 0 in seen else 0.0
        stats["logits"][i, head, j, list(seen)] = z
        unit = lambda x: x / np.linalg.norm(x)
        stats["cosine"][i, j, head] = np.mean([unit(q[i, j, head]) @ unit(k[i, key, kv]) for key in seen])
    return out, stats


ACTIVATIONS = {
    "gelu": lambda x: x * 0.5 * (1 + np.vectorize(math.erf)(x / math.sqrt(2))),
    "gelu_tanh": lambda x: 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))),
    "relu": lambda x: np.where(x > 0, x, 0.0),
    "relu2": lambda x: np.where(x > 0, x, 0.0) ** 2,
    "silu": lambda x: x / (1 + np.exp(-x)),
}


def mlp_branch(layer: Layer, p: dict[str, np.ndarray]):
    """The function x [b t d] -> MLP(x) of one layer's parameters."""
    def linear(x, name):
        return x @ p[f"mlp.{name}.weight"] + p.get(f"mlp.{name}.bias", 0.0)

    def mlp(x):
        activation = ACTIVATIONS[layer.mlp.kind]
        return linear(activation(linear(x, "gate")) * linear(x, "up") if layer.mlp.gated else activation(linear(x, "up")), "down")

    return mlp


def attention_branch(layer: Layer, p: dict[str, np.ndarray], positions=None):
    """The function x [b t d] -> attention(x) of one layer's parameters, QK-norm and RoPE included."""
    config, rotary = layer.attention, layer.rope
    qk = config.qk_norm

    def heads(x, name):
        return np.einsum("btd,dhk->bthk", x, p[f"attention.{name}.weight"]) + p.get(f"attention.{name}.bias", 0.0)

    def normed(x, name):
        if qk.kind == "l2":
            return norm(x, "l2", eps=qk.norm.eps)
        if qk.kind == "none":
            return x
        gain, bias = p[f"attention.{name}_norm.scale"], p.get(f"attention.{name}_norm.bias", 0.0)
        axes = (-2, -1) if qk.kind == "whole" else (-1,)
        return norm(x, qk.norm.kind, eps=qk.norm.eps, gain=gain, bias=bias, axes=axes)

    def turned(x, name):
        x = normed(x, name) if qk.position == "before" else x
        if rotary.theta is not None:
            where = np.arange(x.shape[1]) if positions is None else positions
            x = rope(x, where, rotary.theta, int(x.shape[-1] * rotary.fraction), rotary.layout == "interleaved", rotary.scaling.factor)
        return normed(x, name) if qk.position == "after" else x

    def attend(x):
        q, k, v = turned(heads(x, "q"), "q"), turned(heads(x, "k"), "k"), heads(x, "v")
        v = normed(v, "v") if qk.values else v
        scale = config.scale or q.shape[-1] ** -0.5
        if qk.kind == "l2":
            q, scale = q * p["attention.temperature"][:, None], 1.0
        out, _ = attention(q, k, v, scale=scale, softcap=config.softcap, window=config.window, sinks=p.get("attention.sinks"))
        return np.einsum("bthk,hkd->btd", out, p["attention.out.weight"]) + p.get("attention.out.bias", 0.0)

    return attend
