"""Every attention kernel beside the others: whether they agree, and how long forward and backward pass take."""

import functools
import importlib.metadata
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from configs.knobs import nearest, require
from models.kernels import KERNELS, attend
from train.directory import processor

LENGTHS = {"cpu": (512, 1024), "gpu": (512, 1024, 2048, 4096, 8192, 16384), "tpu": (512, 1024, 2048, 4096, 8192, 16384)}
TOKENS = {"cpu": 1024, "gpu": 16384, "tpu": 16384}
"""Lengths and tokens in a call by platform, where none are given."""

HOLDING = ("dense", "library")
"""Kernels that hold their logits (the library does not where cuDNN is)."""


@dataclass(frozen=True)
class Table:
    """What is measured."""

    kernels: tuple[str, ...] = tuple(KERNELS)
    """Rows."""
    lengths: tuple[int, ...] | None = None
    """Tokens in a sequence. None: 512 to 16384, on a CPU 512 and 1024."""
    tokens: int | None = None
    """Tokens in a call, as many sequences as they make. None: 16384, on a CPU 1024."""
    heads: int = 8
    """Query heads."""
    kv_heads: int = 4
    """Key and value heads."""
    head_width: int = 64
    """Width of a head."""
    window: int | None = None
    """Keys a query sees."""
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    """Type of queries, keys and values."""
    rounds: int = 10
    """Times each call is timed, the kernels in turn."""
    logits: float = 2.0
    """GiB of float32 logits above which the kernels that hold them are left out."""
    seconds: float = 240.0
    """After so long no length is begun."""

    def __post_init__(self):
        for kernel in self.kernels:
            require(kernel in KERNELS, f"kernels = {kernel!r}: no such kernel; {nearest(kernel, KERNELS)}")
        require(self.heads % self.kv_heads == 0, f"kv_heads = {self.kv_heads}: must divide heads = {self.heads}")
        require(self.rounds > 0, f"rounds = {self.rounds}: must be positive")


def measure(table: Table) -> Iterator[dict[str, Any]]:
    """One row after the other: length, batch, kernel, median milliseconds of the forward pass (statistics among its results) and of both,
    and the largest errors of output, gradients and statistics; or, under "failed", why there are none.

    Errors are against float32 on the same numbers (`dense` where its logits fit, else `chunked`), relative to the largest number, in
    roundings of the type; `agrees` where none is above 8 and one float32 rounding for each key.
    """
    begin, platform = time.perf_counter(), jax.default_backend()
    for length in LENGTHS[platform] if table.lengths is None else table.lengths:
        batch = max(1, (table.tokens or TOKENS[platform]) // length)
        if time.perf_counter() - begin > table.seconds:
            yield from ({"length": length, "batch": batch, "kernel": kernel, "failed": "out of time"} for kernel in table.kernels)
            continue
        yield from at_length(table, length, batch)


def at_length(table: Table, length: int, batch: int) -> Iterator[dict[str, Any]]:
    """The rows of one length."""
    keys, heads = jax.random.split(jax.random.key(0), 4), (table.heads, table.kv_heads, table.kv_heads, table.heads)
    arrays = [jax.random.normal(key, (batch, length, of, table.head_width), table.dtype) for key, of in zip(keys, heads, strict=True)]
    fits = 4 * batch * table.heads * length**2 <= table.logits * 2**30
    with jax.default_matmul_precision("highest"):
        _, both = programs("dense" if fits else "chunked", table)
        reference = jax.device_get(both(*(x.astype(jnp.float32) for x in arrays)))
    rows = {kernel: {"length": length, "batch": batch, "kernel": kernel} for kernel in table.kernels}
    calls = {}
    for kernel, row in rows.items():
        if kernel in HOLDING and not fits:
            row["failed"] = f"logits above {table.logits:g} GiB"
            continue
        try:
            forward, both = programs(kernel, table)
            jax.block_until_ready(forward(*arrays[:3]))
            row |= errors(jax.device_get(both(*arrays)), reference, table.dtype, length)
            calls[kernel] = forward, both
        except Exception as error:  # that a device does not take a kernel is a result
            row["failed"] = f"{type(error).__name__}: {str(error).splitlines()[0]}"
    for kernel, (forward, both) in timed(calls, arrays, table.rounds).items():
        rows[kernel] |= {"forward_ms": forward, "both_ms": both}
    yield from rows.values()


def here() -> str:
    """The device and what drives it."""
    device = jax.devices()[0]
    name = processor() if device.platform == "cpu" else device.device_kind
    return f"{name} ({device.platform}), jax {importlib.metadata.version('jax')}"


def programs(kernel: str, table: Table) -> tuple[Callable, Callable]:
    """Output and statistics of (q, k, v); and these with the gradients, of (q, k, v, gradient)."""
    run = functools.partial(attend, kernel=kernel, scale=table.head_width**-0.5, window=table.window)

    def loss(q, k, v, gradient):
        out, stats = run(q, k, v)
        return (out.astype(jnp.float32) * gradient.astype(jnp.float32)).sum(), (out, stats)

    return jax.jit(run), jax.jit(jax.grad(loss, (0, 1, 2), has_aux=True))


def errors(found, reference, dtype: str, length: int) -> dict[str, Any]:
    """Largest errors of output, gradients and statistics, in roundings of the type, and whether they are within bounds."""
    unit = float(jnp.finfo(dtype).eps) / 2
    most = 8 + length * 2.0**-24 / unit

    def largest(ours, theirs) -> float:
        pairs = [(np.asarray(a, np.float64), np.asarray(b, np.float64)) for a, b in zip(ours, theirs, strict=True) if a is not None]
        return max((float(np.abs(a - b).max() / np.abs(b).max() / unit) for a, b in pairs), default=0.0)

    (gradients, (out, stats)), (of_gradients, (of_out, of_stats)) = found, reference
    row = {"out": largest([out], [of_out]), "gradients": largest(gradients, of_gradients), "statistics": largest(stats, of_stats)}
    return row | {"gives": [name for name, value in stats._asdict().items() if value is not None], "agrees": max(row.values()) <= most}


def timed(calls: dict[str, tuple[Callable, Callable]], arrays, rounds: int) -> dict[str, list[float]]:
    """Median milliseconds of both programs of each kernel, taken in turn."""
    took: dict[str, list[list[float]]] = {kernel: [] for kernel in calls}
    for _ in range(rounds):
        for kernel, (forward, both) in calls.items():
            start = time.perf_counter()
            jax.block_until_ready(forward(*arrays[:3]))
            middle = time.perf_counter()
            jax.block_until_ready(both(*arrays))
            took[kernel].append([middle - start, time.perf_counter() - middle])
    return {kernel: [float(x) for x in 1e3 * np.median(times, axis=0)] for kernel, times in took.items()}
