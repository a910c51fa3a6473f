"""The run directory: claimed once, never overwritten."""

import dataclasses
import datetime
import functools
import importlib.metadata
import json
import platform
import subprocess
from pathlib import Path
from typing import Any

import jax

from configs.knobs import diff, tell
from configs.load import UserError, fingerprint, path_of, read_config, read_json, to_json
from configs.schema import Experiment
from train.data.corpus import Corpus
from train.kernels import kernels
from train.processes import decided_by_first

CONFIG, CONDITIONS, SUMMARY = "config.json", "conditions.json", "summary.json"
PACKAGES = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "grain", "numpy", "tensorboard")
MAY_CHANGE = ("mesh.", "train.on_save_error")
"""Knobs that a resumed run may have otherwise: where it runs and when it gives up, not what it computes."""


def claim(config: Experiment) -> tuple[Path, bool]:
    """The directory <run.root>/<run.name>, and whether it holds this run already and is to be continued; a new one gets config.json.

    Raises UserError, and changes nothing, where it holds another config (the difference is told), holds this one and run.resume is
    not set, or holds something else. Process 0 looks and writes.
    """
    directory = path_of(config.run.root) / config.run.name
    return directory, decided_by_first(lambda: claimed_before(directory, config))


def claimed_before(directory: Path, config: Experiment) -> bool:
    """Whether this run has claimed the directory before and is to be continued; otherwise it claims it."""
    held = directory / CONFIG
    if not held.exists():
        if directory.exists() and any(path != unfinished(held) for path in directory.iterdir()):  # a killed process may have left that
            raise UserError(f"run directory {directory} is not empty and holds no {CONFIG}; choose another --run.name")
        directory.mkdir(parents=True, exist_ok=True)
        write(held, to_json(config))
        return False
    try:
        before = read_config(held)
    except UserError as error:
        raise UserError(f"{error}; choose another --run.name") from error
    changes = {knob: values for knob, values in diff(config, before).items() if not (config.run.resume and knob.startswith(MAY_CHANGE))}
    if changes:
        raise UserError(f"run directory {directory} holds another config: {tell(changes)}\n"
                        "choose another --run.name, or give the same knobs")
    if not config.run.resume:
        raise UserError(f"run directory {directory} holds this run already: continue it with --run.resume, or choose another --run.name")
    return True


def config_of(directory: Path) -> Experiment:
    """The config that a run directory holds. Raises UserError, with the path, where it is damaged."""
    return read_config(directory / CONFIG)


def describe(directory: Path, conditions: dict[str, Any], continued_at: int | None, report=print) -> None:
    """Writes conditions.json; of a run continued at a step, adds what is different from then on. Where the
    file is damaged, `report` is told and it is written anew."""
    if continued_at is not None:
        try:
            before = read_json(directory / CONDITIONS)
        except UserError as error:
            report(f"{error}; written anew")
            before = conditions
        changed = {key: value for key, value in conditions.items() if before.get(key) != value}
        resumed = before.get("resumed", [])
        conditions = before | {"resumed": [*(resumed if isinstance(resumed, list) else ()), {"step": continued_at} | changed]}
    write(directory / CONDITIONS, json.dumps(conditions, indent=1) + "\n")


def write(path: Path, content: str | bytes) -> None:
    """Replaces a file in one step: a full disk or a killed process leaves the old one."""
    unfinished(path).write_bytes(content.encode() if isinstance(content, str) else content)
    unfinished(path).replace(path)


def unfinished(path: Path) -> Path:
    """What `write` leaves where the process is killed."""
    return path.with_name(path.name + ".new")


def conditions_here(config: Experiment, corpus: Corpus | None = None) -> dict[str, Any]:
    """What a number depends on beside the config: hardware, devices, versions, code, data, time."""
    device = jax.devices()[0]
    conditions = {
        "host": platform.node(),
        "machine": platform.machine(),
        "processor": processor(),
        "devices": f"{len(jax.devices())} {device.device_kind} ({device.platform})",
        "processes": jax.process_count(),
        "mesh": dataclasses.asdict(config.mesh),
        "dtype": config.train.dtype,
        "kernels": kernels(config),
        "batch": {"sequences": config.data.batch, "tokens": config.data.sequence},
        "python": platform.python_version(),
        "versions": {name: importlib.metadata.version(name) for name in PACKAGES},
        "commit": commit(),
        "start": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "fingerprint": fingerprint(config),
    }
    if corpus is not None:
        conditions["corpus"] = {
            "source": corpus.source,
            "files": corpus.files,
            "sha256": corpus.sha256,
            "bytes": {"train": len(corpus.train), "held_out": len(corpus.held_out)},
        }
    return conditions


def processor() -> str:
    """The processor's name where the system tells it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.processor())


def commit() -> str | None:
    """The commit of the code, with "+changes" where the working tree differs; None outside a checkout."""
    here = Path(__file__).parent
    try:
        run = functools.partial(subprocess.run, capture_output=True, text=True, check=True, timeout=10)
        git = lambda *words: run(("git", "-C", here, *words)).stdout.strip()
        return git("rev-parse", "HEAD") + ("+changes" if git("status", "--porcelain", "--untracked-files=no") else "")
    except (OSError, subprocess.SubprocessError):
        return None
