"""Tiny sweeps on generated text, the commands run over them inside this process, and what a folder holds."""

import contextlib
import hashlib
import io
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple
from unittest import mock

import submitit  # noqa: F401 before any redirection: it shuts every log handler down, and absl's then closes a stream that is not stderr

from configs.load import to_json
from configs.schema import Experiment
from configs.sweep import Axis, Curve, Sweep
from scripts import ablate, report
from tests.train.processes import lines_of, strict_json
from tests.train.small import small, text_of
from train.ablation.sweep import placed, write_plan
from train.command_line import exit_with

SWEEP = '''"""Does a tiny sweep run?

Command: python -m scripts.ablate %(name)s
Expect:  every member ends.
"""

from configs.knobs import replace
from configs.schema import Experiment
from configs.sweep import Curve, seeds, values, variants


def base():
    return replace(Experiment(), {
        "model.width": 16, "model.depth": 2, "model.attention.heads": 2, "model.mlp.width": 32, "model.init.kind": "fan_in",
        "train.steps": 6, "optim.warmup": 2, "data.source": %(source)r, "data.batch": 4, "data.sequence": 16,
        "instruments.every": 3, "instruments.probe_every": 3, "instruments.probe_batch": 4, "instruments.rows": 4,
        "eval.every": 3, "eval.batches": 2, "checkpoint.every": None, "run.compilation_cache": %(cache)r,
    } | %(changes)r)


AXES = (%(axes)s,)
CURVES = (%(curves)s)
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
                cache: Path | None = None, curves: str = "") -> Path:
    """A sweep file over the text at `source`; without a cache, this process's own cache of compiled programs stays in use."""
    path = folder / f"{name}.py"
    words = {"name": name, "source": str(source), "cache": cache and str(cache), "changes": changes or {}, "axes": axes, "curves": curves}
    path.write_text(SWEEP % words)
    return path


CONDITIONS = {
    "corpus": {"source": "text", "files": 12, "sha256": "0" * 64}, "processor": "a processor", "devices": "1 cpu (cpu)",
    "versions": {"jax": "0.0"}, "commit": "0" * 40,
}


def write_results(folder: Path, axes: tuple[Axis, ...], lines: Callable[[Experiment], list[dict]], curves: tuple[Curve, ...] = (),
                  changes: dict | None = None, **of_summary: object) -> Path:
    """The folder of a sweep that nobody ran: of each member the metrics that `lines` gives, and a summary of them. A member whose last
    line is not that of its last step diverged there, one without lines is missing."""
    sweep = Sweep("by_hand", "By hand.", small(changes), axes, curves)
    write_plan(sweep, str(folder))
    for member in placed(sweep, str(folder)):
        found, directory = lines(member.config), folder / sweep.name / member.name
        if not found:
            continue
        directory.mkdir(parents=True)
        losses = [line["eval/loss"] for line in found if "eval/loss" in line]
        step = found[-1]["step"]
        told = {"status": "completed" if step == member.config.train.steps else "diverged", "step": step, "initial_eval_loss": losses[0],
                "eval_loss": losses[-1], "best_eval_loss": losses[-1], "train_loss": None, "largest_attention_logit": None,
                "spike_score": 0.0, "tokens_per_second": None, "flops_per_token": 1.0, "parameters": {"total": 1}}
        (directory / "config.json").write_text(to_json(member.config))
        (directory / "summary.json").write_text(json.dumps(told | of_summary))
        (directory / "conditions.json").write_text(json.dumps(CONDITIONS))
        (directory / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in found))
    return folder / sweep.name


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
