"""Tiny sweeps on generated text, the commands run over them inside this process, and what a folder holds."""

import contextlib
import hashlib
import io
import json
import sys
from pathlib import Path
from typing import NamedTuple
from unittest import mock

import submitit  # noqa: F401 before any redirection: it shuts every log handler down, and absl's then closes a stream that is not stderr

from scripts import ablate, report
from tests.train.processes import lines_of, strict_json
from tests.train.small import text_of
from train.command_line import exit_with

SWEEP = '''"""Does a tiny sweep run?

Command: python -m scripts.ablate %(name)s
Expect:  every member ends.
"""

from configs.knobs import replace
from configs.schema import Experiment
from configs.sweep import seeds, values, variants


def base():
    return replace(Experiment(), {
        "model.width": 16, "model.depth": 2, "model.attention.heads": 2, "model.mlp.width": 32, "model.init.kind": "fan_in",
        "train.steps": 6, "optim.warmup": 2, "data.source": %(source)r, "data.batch": 4, "data.sequence": 16,
        "instruments.every": 3, "instruments.probe_every": 3, "instruments.probe_batch": 4, "instruments.rows": 4,
        "eval.every": 3, "eval.batches": 2, "checkpoint.every": None, "run.compilation_cache": %(cache)r,
    } | %(changes)r)


AXES = (%(axes)s,)
'''

PLACEMENT = 'variants("placement", pre={}, post={"model.norm.placement": "post"})'
AXES = f'{PLACEMENT}, values("optim.learning_rate", 0.01, 0.1), seeds(2)'


def write_text(folder: Path) -> Path:
    """A folder of a dozen generated documents."""
    source = folder / "text"
    source.mkdir()
    for index in range(12):
        (source / f"{index}.txt").write_text(text_of(2000, index))
    return source


def write_sweep(folder: Path, source: Path, axes: str = AXES, changes: dict | None = None, name: str = "tiny_sweep",
                cache: Path | None = None) -> Path:
    """A sweep file over the text at `source`; without a cache, this process's own cache of compiled programs stays in use."""
    path = folder / f"{name}.py"
    words = {"name": name, "source": str(source), "cache": cache and str(cache), "changes": changes or {}, "axes": axes}
    path.write_text(SWEEP % words)
    return path


class Done(NamedTuple):
    """How a command ended, and what it printed."""

    status: int
    out: str
    err: str


def call(main, *words: object) -> Done:
    """A command's main() with these words, in this process."""
    out, err = io.StringIO(), io.StringIO()
    with mock.patch.object(sys, "argv", [main.__module__, *map(str, words)]), contextlib.redirect_stdout(out), \
            contextlib.redirect_stderr(err):
        try:
            exit_with(main)
        except SystemExit as end:
            return Done(end.code, out.getvalue(), err.getvalue())
    raise AssertionError("exit_with returned")


def ablate_here(*words: object) -> Done:
    return call(ablate.main, *words)


def report_here(folder: Path) -> Done:
    return call(report.main, folder)


def refused(done: Done, *told: str) -> None:
    """The command ended with status 2 and one or two lines that tell these words."""
    assert done.status == 2, done
    assert done.err.startswith("error: ") and len(done.err.splitlines()) <= 3, done.err
    assert all(word in done.err for word in told), done.err


def tree(folder: Path) -> dict[str, tuple[str, int]]:
    """Every file below a folder, with the hash of its bytes and its time of change."""
    of = lambda path: (hashlib.sha256(path.read_bytes()).hexdigest(), path.stat().st_mtime_ns)
    return {path.relative_to(folder).as_posix(): of(path) for path in sorted(folder.rglob("*")) if path.is_file()}


def summary(directory: Path) -> dict:
    return strict_json((directory / "summary.json").read_text())


def final(directory: Path) -> tuple[float, float]:
    """Held-out loss at the end and at init, from the metrics."""
    losses = [line["eval/loss"] for line in lines_of(directory) if "eval/loss" in line]
    return losses[-1], losses[0]


def edit(path: Path, *keys_and_value) -> None:
    """Sets one value in a JSON file: keys from the outside in, then the value."""
    *keys, last, value = keys_and_value
    whole = inner = json.loads(path.read_text())
    for key in keys:
        inner = inner[key]
    assert inner[last] != value
    inner[last] = value
    path.write_text(json.dumps(whole, indent=1))
