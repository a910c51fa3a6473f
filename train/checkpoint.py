"""Checkpoints through orbax, each array with a digest of its own: what comes back is what was saved, or is refused by name."""

import hashlib
import logging
import math
import shutil
import sys
import zlib
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp
from orbax.checkpoint.checkpoint_managers import AnyPreservationPolicy, BestN, LatestN

from configs.knobs import diff
from configs.load import UserError, from_json, to_json
from configs.schema import Experiment
from train.processes import decided_by_first, first_line
from train.state import State

MODEL = "model."
CONFIG = "config"


class SaveError(UserError):
    """A checkpoint could not be written."""


class OtherModel(UserError):
    """A checkpoint is of another model."""


class Kept:
    """A preservation policy of orbax: the steps that were asked for."""

    def __init__(self):
        self.steps: set[int] = set()

    def should_preserve(self, checkpoints, *, context) -> list[bool]:
        return [checkpoint.step in self.steps for checkpoint in checkpoints]


class Checkpoints:
    """The checkpoints of a run: written in the background, the latest `keep`, the best by held-out loss and those of `kept` preserved."""

    def __init__(self, directory: Path, config: Experiment, read_only: bool = False):
        self.directory, self.config = directory.absolute(), config
        quieten()
        best = BestN(get_metric_fn=lambda metrics: metrics["eval_loss"], reverse=True, n=1, keep_checkpoints_without_metrics=False)
        self.kept = Kept()
        policy = AnyPreservationPolicy([LatestN(config.checkpoint.keep), best, self.kept])
        options = ocp.CheckpointManagerOptions(preservation_policy=policy, cleanup_tmp_directories=not read_only, read_only=read_only)
        self.manager = ocp.CheckpointManager(self.directory, options=options)

    def save(self, step: int, state: State, eval_loss: jax.Array | None) -> None:
        """Starts saving the state after `step` updates. Raises SaveError where this save, or one before it, cannot be written."""
        arrays = named(state)
        decided_by_first(lambda: self.has_space(sum(x.nbytes for x in arrays.values())))
        config = to_json(self.config)
        items = ocp.args.Composite(
            state=ocp.args.StandardSave(arrays),
            digests=ocp.args.JsonSave(digests(arrays) | {CONFIG: of_text(config)}),
            config=ocp.args.JsonSave({"text": config}),
        )
        loss = math.nan if eval_loss is None else float(jax.device_get(eval_loss))
        metrics = {"eval_loss": loss} if math.isfinite(loss) else None
        self.guarded(lambda: self.manager.save(step, args=items, metrics=metrics, force=True))

    def finish(self) -> None:
        """Waits until every save is on the disk. Raises SaveError where one could not be written."""
        self.guarded(self.manager.wait_until_finished)

    def guarded(self, action) -> None:
        try:
            action()
        except Exception as error:  # orbax passes on whatever the file system or tensorstore raised, as bare Exceptions too
            raise self.save_error(first_line(error)) from error

    def has_space(self, size: int) -> bool:
        """Whether the disk has room for `size` bytes. Raises SaveError where it has none: told before anything is written."""
        free = shutil.disk_usage(self.directory).free
        if free < size:
            raise self.save_error(f"the disk is full: {size / 1e6:,.1f} MB are needed, {free / 1e6:,.1f} MB are free")
        return True

    def save_error(self, reason: str) -> SaveError:
        steps = self.steps()
        kept = f"the checkpoint of step {steps[0]} is untouched" if steps else "there is no earlier checkpoint"
        return SaveError(f"checkpoint in {self.directory} cannot be written: {reason}; {kept}")

    def steps(self) -> list[int]:
        """Saved steps, newest first."""
        self.manager.reload()
        return sorted(self.manager.all_steps(), reverse=True)

    def keep_before(self, step: int) -> int | None:
        """Preserves the newest checkpoint at or before a step, and tells which that is."""
        newest = max((saved for saved in self.manager.all_steps() if saved <= step), default=None)
        self.kept.steps |= {newest} - {None}
        return newest

    def restore(self, shapes: State, report, at_most: int | None = None) -> tuple[int, State] | None:
        """The newest sound checkpoint (at or before step `at_most`) laid out as `shapes` says, or None where nothing was saved.

        A damaged one is named through `report` and passed over. Raises UserError where a checkpoint belongs to another model, or where
        all are damaged.
        """
        steps = [step for step in self.steps() if at_most is None or step <= at_most]
        for step in steps:
            try:
                return step, self.read(step, shapes)
            except OtherModel:
                raise
            except Exception as error:  # a damaged file surfaces as any exception that orbax, tensorstore or json has
                report(f"checkpoint {self.directory.name}/{step} is damaged: {first_line(error)}; trying the one before")
        if steps:
            raise UserError(f"{self.directory}: all of its {len(steps)} checkpoints are damaged; nothing was changed")
        return None

    def read(self, step: int, shapes: State) -> State:
        """The state saved at a step, every array compared with its digest."""
        saved = self.manager.restore(step, args=ocp.args.Composite(config=ocp.args.JsonRestore(), digests=ocp.args.JsonRestore()))
        config = saved["config"]["text"]
        if saved["digests"].get(CONFIG) != of_text(config):
            raise ValueError("its config does not match its digest")
        changes = diff(from_json(config), self.config)
        differing = [f"{knob} = {theirs} there, {ours} here" for knob, (ours, theirs) in changes.items() if knob.startswith(MODEL)]
        if differing:
            raise OtherModel(f"checkpoint {self.directory}/{step} is of another model: " + "; ".join(differing))
        arrays = self.manager.restore(step, args=ocp.args.Composite(state=ocp.args.StandardRestore(named(shapes))))["state"]
        for name, digest in digests(arrays).items():
            if saved["digests"].get(name) != digest:
                raise ValueError(f"array {name} does not match its digest")
        return jax.tree.unflatten(jax.tree.structure(shapes), [arrays[name] for name in named(shapes)])

    def close(self) -> None:
        self.manager.close()


def named(state: State) -> dict[str, Any]:
    """The arrays of a state by name, in the order of its leaves."""
    return {jax.tree_util.keystr(path, simple=True, separator="/"): leaf for path, leaf in jax.tree_util.tree_flatten_with_path(state)[0]}


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
