"""Checkpoints through orbax, each array with a digest of its own: what comes back is what was saved, or is refused by name."""

import functools
import hashlib
import logging
import math
import shutil
import sys
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp

from configs.knobs import diff
from configs.load import UserError, first_line, from_json, to_json
from configs.schema import Experiment
from train.processes import decided_by_first, done_by_all, listed_by_first
from train.state import State

MODEL = "model."
CONFIG, RECORD, LOSS, PANELS = "config", "metrics.jsonl", "eval_loss", "panels"
"""Stated beside the digests of the arrays: those of the config and of the record up to the step, the held-out loss, and the last panels."""
TEMPORARY = "*orbax-checkpoint-tmp*"


class SaveError(UserError):
    """A checkpoint could not be written."""


class OtherModel(UserError):
    """A checkpoint is of another model."""


Report = Callable[[str], None]


@dataclass
class Preserved:
    """orbax's policy of what stays: the latest `latest` steps, of those with a held-out loss the best, and those asked for."""

    latest: int
    losses: dict[int, float] = field(default_factory=dict)
    asked: set[int] = field(default_factory=set)

    def should_preserve(self, checkpoints, *, context) -> list[bool]:
        steps = sorted(checkpoint.step for checkpoint in checkpoints)
        best = sorted((step for step in steps if step in self.losses), key=self.losses.get)[:1]
        kept = {*steps[-self.latest :], *best, *self.asked}
        return [checkpoint.step in kept for checkpoint in checkpoints]


class Checkpoints:
    """The checkpoints of a run: written in the background; the latest `keep`, the best by held-out loss and those asked for are kept.

    Where a save fails, `report` is told in one line and the run may go on; without one SaveError is raised. Either way the checkpoints
    before it stay as they are, and what was half written is removed. Raises UserError for a directory that cannot be listed.
    """

    def __init__(self, directory: Path, config: Experiment, read_only: bool = False):
        self.directory, self.config, self.read_only = directory.absolute(), config, read_only
        quieten()
        self.policy = Preserved(config.checkpoint.keep)
        options = ocp.CheckpointManagerOptions(preservation_policy=self.policy, cleanup_tmp_directories=not read_only, read_only=read_only)
        try:
            self.manager = ocp.CheckpointManager(self.directory, options=options)
            steps = self.steps()
        except Exception as error:  # whatever orbax meets in a directory that is not one of checkpoints
            raise UserError(f"{self.directory} cannot be read: {first_line(error)}") from error
        if not read_only:  # which step is the best decides only what is deleted
            self.policy.losses |= {step: loss for step in steps if (loss := self.loss(step)) is not None}

    def save(self, step: int, state: State, eval_loss: jax.Array | None, record: str | None = None, report: Report | None = None,
             panels: Sequence[str] = ()) -> None:
        """Starts saving the state after `step` updates, once the save before it is on the disk; `record`: the SHA-256 of the lines of
        metrics.jsonl before that step; `panels`: lines of the panels before it that spikes.ring holds."""
        self.finish(report)
        loss = math.nan if eval_loss is None else float(jax.device_get(eval_loss))
        self.guarded(lambda: self.start_saving(step, state, loss if math.isfinite(loss) else None, record, panels), report)

    def start_saving(self, step: int, state: State, loss: float | None, record: str | None, panels: Sequence[str]) -> None:
        arrays = named(state)
        size = sum(x.nbytes for x in arrays.values())
        if not decided_by_first(lambda: self.has_space(size)):
            raise OSError(f"the disk is full: {size / 1e6:,.1f} MB are needed")
        config = to_json(self.config)
        if loss is not None:
            self.policy.losses[step] = loss
        self.manager.save(step, force=True, args=ocp.args.Composite(
            state=ocp.args.StandardSave(arrays),
            digests=ocp.args.JsonSave(digests(arrays) | {CONFIG: of_text(config), RECORD: record, LOSS: loss, PANELS: list(panels)}),
            config=ocp.args.JsonSave({"text": config}),
        ))

    def finish(self, report: Report | None = None) -> None:
        """Waits until every save is on the disk, or has failed."""
        self.guarded(self.manager.wait_until_finished, report)

    def guarded(self, action: Callable[[], object], report: Report | None) -> None:
        try:
            action()
        except Exception as error:  # orbax passes on whatever the file system or tensorstore raised, as bare Exceptions too
            if jax.process_index() == 0:
                for half in self.directory.glob(TEMPORARY):  # on a full disk the room that the next save needs
                    shutil.rmtree(half, ignore_errors=True)
            steps = self.steps()
            kept = f"the checkpoint of step {steps[0]} is untouched" if steps else "there is no earlier checkpoint"
            failure = SaveError(f"checkpoint in {self.directory} cannot be written: {first_line(error)}; {kept}")
            if report is None:
                raise failure from error
            report(str(failure))

    def has_space(self, size: int) -> bool:
        """Whether the disk has room for `size` bytes: asked before anything is written."""
        return shutil.disk_usage(self.directory).free >= size

    def steps(self) -> list[int]:
        """Saved steps, newest first."""
        self.manager.reload()
        return sorted(self.manager.all_steps(), reverse=True)

    def keep_before(self, step: int) -> int | None:
        """Preserves the newest checkpoint at or before a step, and tells which that is."""
        newest = max((saved for saved in self.manager.all_steps() if saved <= step), default=None)
        self.policy.asked |= {newest} - {None}
        return newest

    def stated(self, step: int, *items: str) -> dict[str, Any]:
        """The JSON items of a checkpoint."""
        return dict(self.items(step, **dict.fromkeys(items, ocp.args.JsonRestore())).items())

    def items(self, step: int, **items: ocp.args.CheckpointArgs) -> ocp.args.Composite:
        """Items of a checkpoint, read without waiting for the other processes, as the manager would: one that fails leaves none waiting."""
        return ocp.CompositeCheckpointHandler().restore(self.directory / str(step), args=ocp.args.Composite(**items))

    def loss(self, step: int) -> float | None:
        """The held-out loss that a checkpoint states, where it can be read: what is damaged is told when it is restored."""
        try:
            loss = self.stated(step, "digests")["digests"].get(LOSS)
        except Exception:
            return None
        return loss if isinstance(loss, float) else None

    def panels(self, step: int) -> list[str]:
        """The lines of the panels before a step that its checkpoint holds. Raises at every process where one cannot read them."""
        return done_by_all(lambda: self.stated(step, "digests"))["digests"][PANELS]

    def restore(
        self, shapes: State, report: Report, record: Callable[[int], str] | None = None, at_most: int | None = None
    ) -> tuple[int, State] | None:
        """The newest sound checkpoint (at or before step `at_most`) laid out as `shapes` says, or None where nothing was saved: of several
        processes the newest that all can read, of those that process 0 sees.

        A damaged one is named through `report` and passed over; so is one before whose step metrics.jsonl, of which `record` gives the
        SHA-256 of the lines before a step, is not what it was. Those passed over are renamed to STEP.damaged, out of the way of the steps
        that are taken again. Raises UserError where a checkpoint belongs to another model, or where all are damaged.
        """
        steps = [step for step in listed_by_first(self.steps()) if at_most is None or step <= at_most]
        for place, step in enumerate(steps):
            try:
                state = self.read(step, shapes, record)
            except (OtherModel, jax.errors.JaxRuntimeError):  # a device, or another process, is no file
                raise
            except Exception as error:  # a damaged file surfaces as any exception that orbax, tensorstore or json has
                report(f"checkpoint {self.directory.name}/{step} is damaged: {first_line(error)}; trying the one before")
                continue
            done_by_all(functools.partial(self.set_aside, steps[:place]))
            self.manager.reload()
            return step, state
        if steps:
            raise UserError(f"{self.directory}: all of its {len(steps)} checkpoints are damaged; nothing was changed")
        return None

    def set_aside(self, damaged: list[int]) -> None:
        if not self.read_only and jax.process_index() == 0:
            for step in damaged:
                aside = self.directory / f"{step}.damaged"
                shutil.rmtree(aside, ignore_errors=True)
                (self.directory / str(step)).rename(aside)

    def read(self, step: int, shapes: State, record: Callable[[int], str] | None) -> State:
        """The state saved at a step, every array compared with its digest."""
        config, expected = done_by_all(lambda: self.identity(step, record))
        changes = diff(from_json(config), self.config)
        differing = [f"{knob} = {theirs} there, {ours} here" for knob, (ours, theirs) in changes.items() if knob.startswith(MODEL)]
        if differing:
            raise OtherModel(f"checkpoint {self.directory}/{step} is of another model: " + "; ".join(differing))
        arrays = done_by_all(lambda: self.items(step, state=ocp.args.StandardRestore(named(shapes)))["state"])
        found = digests(arrays)
        done_by_all(lambda: compare(found, expected))
        return jax.tree.unflatten(jax.tree.structure(shapes), [arrays[name] for name in named(shapes)])

    def identity(self, step: int, record: Callable[[int], str] | None) -> tuple[str, dict[str, Any]]:
        """The config of a checkpoint and its digests, those of the config and of the record compared."""
        stated = self.stated(step, "config", "digests")
        config, expected = stated["config"]["text"], stated["digests"]
        if expected.get(CONFIG) != of_text(config):
            raise ValueError("its config does not match its digest")
        if record is not None and expected.get(RECORD) not in (None, record(step)):
            raise ValueError(f"of {RECORD} the lines before step {step} are not what they were")
        return config, expected

    def close(self, report: Report | None = None) -> None:
        self.finish(report)
        self.manager.close()


def named(state: State) -> dict[str, Any]:
    """The arrays of a state by name, in the order of its leaves."""
    return {jax.tree_util.keystr(path, simple=True, separator="/"): leaf for path, leaf in jax.tree_util.tree_flatten_with_path(state)[0]}


def compare(found: dict[str, str], expected: dict[str, Any]) -> None:
    """Raises ValueError for an array whose digest is not the expected one."""
    for name, digest in found.items():
        if expected.get(name) != digest:
            raise ValueError(f"array {name} does not match its digest")


def digests(arrays: dict[str, jax.Array]) -> dict[str, str]:
    """A 64-bit digest of each array, the same on every mesh: computed where the array lies, in integers, so in any order."""
    return {name: "".join(f"{int(half):08x}" for half in halves) for name, halves in jax.device_get(on_device(arrays)).items()}


@jax.jit
def on_device(arrays: dict[str, jax.Array]) -> dict[str, tuple[jax.Array, jax.Array]]:
    return {name: digest(x, zlib.crc32(name.encode())) for name, x in arrays.items()}


def of_text(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def digest(x: jax.Array, salt: int) -> tuple[jax.Array, jax.Array]:
    """Two sums modulo 2^32 over elements of mix(bits + position constant); `mix` is a bijection, so one changed element always shows.

    Mixer: the 32-bit finaliser of MurmurHash3 (Appleby 2011).
    """
    bits = jax.lax.bitcast_convert_type(x, {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32}[x.dtype.itemsize]).astype(jnp.uint32)
    position = jnp.full(x.shape, salt, jnp.uint32)
    for axis in range(x.ndim):
        position = position * jnp.uint32(x.shape[axis]) + jax.lax.broadcasted_iota(jnp.uint32, x.shape, axis)
    return tuple(mix(bits ^ mix(position + jnp.uint32(seed))).sum(dtype=jnp.uint32) for seed in (0x9E3779B9, 0x85EBCA77))


def mix(h: jax.Array) -> jax.Array:
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        h = (h ^ (h >> shift)) * jnp.uint32(factor)
    return h ^ (h >> 16)


def quieten() -> None:
    """Keeps orbax from printing tracebacks of errors that it also raises: here they end in one line."""
    for name in ("absl", "asyncio"):
        logging.getLogger(name).setLevel(logging.CRITICAL)
    before = sys.unraisablehook
    sys.unraisablehook = lambda found: None if "Event loop is closed" in str(found.exc_value) else before(found)
