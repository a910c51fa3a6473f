"""How long a published checkpoint takes to load, against reading its bytes, and how much memory it takes."""

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np

from configs.knobs import replace
from configs.model import Model
from models import parameters
from models.huggingface import load, save
from models.parameters import bind, table
from models.transformer import Transformer

ROUNDS = 5


def example(directory: Path, megabytes: int) -> None:
    """Writes a Llama checkpoint of about so many megabytes of float32."""
    width, per_layer = 1024, 4 * 1024**2 + 3 * 1024 * 2816
    depth = max(1, round((megabytes * 1e6 / 4 - 2 * 4096 * width) / per_layer))
    model = replace(Model(), {"width": width, "depth": depth, "vocab": 4096, "attention.heads": 16, "mlp.width": 2816, "mlp.gated": True,
                              "mlp.kind": "silu", "tied": False})
    transformer, draw = Transformer(model), np.random.default_rng(0)
    save(directory, model, bind(transformer, {row.path: draw.standard_normal(row.shape, np.float32) for row in table(transformer)}))


def measure(directory: Path) -> dict[str, Any]:
    """In a new process: seconds to read the files' bytes and to load them, alternated, and the peak of resident memory that loading adds,
    as a multiple of the files' size."""
    files = sorted(directory.glob("*.safetensors"))
    size = sum(file.stat().st_size for file in files)
    jax.block_until_ready(jax.numpy.zeros(1))
    before, rounds = peak_memory(), []
    for _ in range(ROUNDS):
        start = time.perf_counter()
        _, transformer = load(directory)
        jax.block_until_ready(parameters.values(transformer))
        loaded = time.perf_counter()
        added = peak_memory() - before if not rounds else added
        del transformer
        again = time.perf_counter()
        for file in files:
            file.read_bytes()
        rounds.append((loaded - start, time.perf_counter() - again))
    ratios = [load_seconds / read_seconds for load_seconds, read_seconds in rounds]
    seconds = {name: statistics.median(of) for name, of in zip(("load_seconds", "read_seconds"), zip(*rounds, strict=True), strict=True)}
    return {"bytes": size, **seconds, "ratio": statistics.median(ratios), "ratios": ratios, "peak_over_size": added / size,
            "cores": os.cpu_count()}


def peak_memory() -> int:
    """The largest resident memory of this process so far, in bytes (Linux; that of getrusage begins with the parent's)."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) * 1024


def benchmark(megabytes: int) -> dict[str, Any]:
    """`measure` of an example of that size."""
    with tempfile.TemporaryDirectory() as folder:
        example(Path(folder), megabytes)
        code = f"import json; from pathlib import Path; from train.loading import measure; print(json.dumps(measure(Path({folder!r}))))"
        return json.loads(subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout)
