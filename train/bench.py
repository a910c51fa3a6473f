"""Speed of a config: quiet and loud steps in alternation within one run, against a large matrix product of the same run."""

import itertools
import resource
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from configs.knobs import replace
from configs.schema import Experiment
from models.parameters import flops_per_token
from train.bench_mixture import bench_mixture
from train.data.batches import training_batches
from train.data.corpus import read
from train.directory import conditions_here
from train.log import Log
from train.mesh import make_mesh
from train.programs import make_programs
from train.state import make_plan

PAIRS, SECONDS = 40, 120.0
"""So many pairs of steps; fewer, but at least ten, where they would take longer than this."""

PRODUCTS = ((4096, 4096, 4096), (2048, 512, 2048))
"""Sizes n x k x m of the float32 products; the rate is the best of their medians."""


def bench(config: Experiment) -> dict[str, Any]:
    """Measures a config in one process; seconds per step, tokens per second, bytes, floating-point operations per second.

    Every step is timed to the end of the device's work and the writing of its metrics. `loud_over_quiet` is the ratio within a pair;
    telemetry_percent = 100 (median ratio - 1) / instruments.every, the cost of the panel at its interval. `mixture`: see
    `train.bench_mixture`.
    """
    every = config.instruments.every
    config = replace(config, {"instruments.every": 2, "instruments.probe_every": None, "train.steps": max(config.train.steps, 1)})
    plan, corpus = make_plan(config, make_mesh(config.mesh)), read(config.data.source)
    batch, programs = training_batches(corpus, config.data, config.train.seed, plan.mesh), make_programs(plan)
    compiled, seconds = programs.compile(), {"quiet": [], "loud": []}
    products: dict[tuple[int, ...], list[float]] = {size: [] for size in PRODUCTS}
    state, begin = plan.fresh(), time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        log = Log(Path(folder), config, None)
        for pair in itertools.count():
            for place, name in enumerate(("quiet", "loud") if pair % 2 else ("loud", "quiet")):
                tokens = jax.block_until_ready(batch(2 * pair + place))
                start = time.perf_counter()
                state, values = getattr(programs, name)(state, tokens)
                log.write(2 * pair + place, jax.device_get(values))
                jax.block_until_ready(state)
                seconds[name].append(time.perf_counter() - start)
            if pair % 10 == 0:
                for size in PRODUCTS:
                    products[size].append(product_rate(*size))
            if pair >= PAIRS or (pair >= 10 and time.perf_counter() - begin > SECONDS):
                break
        log.close()
    quiet, loud = (np.asarray(times[1:]) for times in seconds.values())
    flops, tokens = flops_per_token(config.model, plan.rows, config.data.sequence), config.data.batch * config.data.sequence
    rate = max(float(np.median(rates)) for rates in products.values())
    ratio = np.quantile(loud / quiet, (0.25, 0.5, 0.75))
    return {
        "conditions": conditions_here(config, corpus),
        "pairs": len(quiet),
        "step_seconds": {name: percentiles(times) for name, times in (("quiet", quiet), ("loud", loud))},
        "loud_over_quiet": dict(zip(("q25", "median", "q75"), map(digits, ratio), strict=True)),
        "telemetry_percent": None if every is None else digits(100 * (ratio[1] - 1) / every),
        "instruments_every": every,
        "tokens_per_second": digits(tokens / np.median(quiet)),
        "compile_seconds": {name: digits(took) for name, took in compiled.items()},
        "peak_resident_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024),
        "model_flops_per_token": flops,
        "matmul_gflops": digits(rate / 1e9),
        "fraction_of_matmul": digits(flops * tokens / np.median(quiet) / rate),
        "mixture": bench_mixture(config, corpus),
    }


def product_rate(n: int, k: int, m: int) -> float:
    """Floating-point operations per second of a float32 matrix product."""
    a, b = jnp.ones((n, k)), jnp.ones((k, m))
    product = jax.jit(jnp.matmul)
    jax.block_until_ready(product(a, b))
    start = time.perf_counter()
    jax.block_until_ready(product(a, b))
    return 2 * n * k * m / (time.perf_counter() - start)


def percentiles(times: np.ndarray) -> dict[str, float]:
    return {f"p{p}": digits(np.percentile(times, p)) for p in (50, 95, 99)}


def digits(x: float) -> float:
    return float(f"{x:.5g}")
