"""Runs in processes of their own, on one CPU device, from a small config file."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

from tests import QUICK

ROOT = Path(__file__).parent.parent.parent

CONFIG = '''"""A small run."""
from configs.knobs import replace
from configs.schema import Experiment

def config():
    return replace(Experiment(), {
        "model.width": 16, "model.depth": 2, "model.attention.heads": 2, "model.mlp.width": 32, "model.init.kind": "fan_in",
        "train.steps": 24, "optim.warmup": 4, "data.source": %r, "data.batch": 4, "data.sequence": 16,
        "instruments.every": 3, "instruments.probe_every": 8, "instruments.probe_batch": 4, "instruments.rows": 4,
        "eval.every": 8, "eval.batches": 2, "checkpoint.every": 4,
    })
'''


def write_config(folder: Path, source: Path) -> Path:
    """small.py in a folder, reading the text at `source`."""
    path = folder / "small.py"
    path.write_text(CONFIG % str(source))
    return path


def command(module: str, *words: object) -> list[str]:
    return [sys.executable, "-m", module, *map(str, words)]


def environment(**changes: str) -> dict[str, str]:
    return os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": QUICK} | changes


def training(config: object, root: Path, *words: object) -> list[str]:
    """The words that train a config into runs under `root`, compiled programs kept from one test run to the next."""
    cache = ROOT / ".cache" / "jax-tests-runs"
    return command("scripts.train", config, "--run.root", root, "--run.compilation-cache", cache, "--run.progress", "False", *words)


def finish(words: list[str], timeout: float = 240, **changes: str) -> subprocess.CompletedProcess[str]:
    """Runs a command to its end in the repository's root."""
    return subprocess.run(words, cwd=ROOT, env=environment(**changes), capture_output=True, text=True, timeout=timeout)


def start(words: list[str], **changes: str) -> subprocess.Popen:
    return subprocess.Popen(words, cwd=ROOT, env=environment(**changes), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def wait_for(process: subprocess.Popen, happened, timeout: float = 120) -> None:
    """Waits until `happened()` while the process lives."""
    end = time.monotonic() + timeout
    while not happened():
        assert process.poll() is None, f"ended early with {process.returncode}: {process.communicate()[0]}"
        assert time.monotonic() < end, "nothing happened"
        time.sleep(0.002)


def lines_of(directory: Path) -> list[dict]:
    path = directory / "metrics.jsonl"
    return [strict_json(line) for line in path.read_text().splitlines()] if path.exists() else []


def strict_json(text: str):
    """Parses JSON as its standard has it: NaN and Infinity are no numbers."""

    def refuse(word: str):
        raise AssertionError(f"{word} is not JSON")

    return json.loads(text, parse_constant=refuse)
