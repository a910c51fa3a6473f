"""A step of a run revisited: its panel in full, and whether it is what it was; and a run gone on without the batches that came there."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np

from configs.knobs import replace
from configs.load import UserError
from configs.schema import Experiment
from models.description import Sheet
from train import directory as run_directory
from train.checkpoint import Checkpoints, Report
from train.data.batches import contents
from train.instruments import EACH, HISTOGRAM, Published
from train.log import METRICS, plain, read_lines, spelled
from train.nonfinite import diagnose, told
from train.recorder import FINITE
from train.replay import open_run
from train.step import make_probe, make_step


@dataclass(frozen=True)
class Revisited:
    """A step seen again: its panel in full, as plain numbers, of so many layers; the batch; whether it is what it was (None: another batch,
    or nothing to compare with), and that in words."""

    panel: dict[str, Any]
    depth: int
    contents: dict[str, Any]
    same: bool | None
    verdict: str


def revisit(directory: Path, step: int, batches_from: int | None, report: Report) -> Revisited:
    """Step `step` of a run (from 0) once more, with its own batch or with that of step `batches_from`, and the whole panel of that batch:
    that of a loud step, and the quantiles of the attention logits. Raises UserError for a step that the run's config does not have."""
    replay, corpus = open_run(directory, report)
    config = replay.plan.config
    own = step if batches_from is None else batches_from
    for name, asked in (("--step", step), ("--batches-from", own)):
        check_step(directory, config, name, asked)
    state, tokens = replay.at(step), replay.batch(own)
    of_probe = jax.device_get(make_probe(replay.plan)(state.parameters, tokens))
    copy = lambda: jax.device_put(state, replay.plan.shardings, may_alias=False)
    program = replay.programs.training(step)
    published = jax.device_get(program(copy(), tokens)[1])
    loud = replay.programs.loud or make_step(replay.plan, loud=True)
    whole = published if program is loud else jax.device_get(loud(copy(), tokens)[1])
    panel = {key.removeprefix("probe."): value for key, value in of_probe.items()} | whole
    same, verdict = compared(directory, step, own, published)
    if not all(np.isfinite(published[key]) for key in FINITE if key in published):
        verdict += f"\nnot finite: {told(diagnose(replay, state, tokens))}"
    told_batch = contents(corpus, config.data, config.train.seed, own)
    return Revisited({key: plain(key, value) for key, value in panel.items()}, config.model.depth, told_batch, same, verdict)


def check_step(directory: Path, config: Experiment, name: str, step: int) -> None:
    """Raises UserError for a step that the config does not have."""
    if not 0 <= step < config.train.steps:
        raise UserError(f"{name} {step}: {directory} has the steps 0 to {config.train.steps - 1}")


def compared(directory: Path, step: int, own: int, published: Published) -> tuple[bool | None, str]:
    """Whether what a step published is, to the last bit, what its line of metrics.jsonl says, in words too; of a step with another's batch,
    its loss beside those of both."""
    lines = {line["step"]: line for line in read_lines(directory / METRICS) if "train/loss" in line}
    if own != step:
        with_own, there = (lines[at]["train/loss"] if at in lines else "not known" for at in (step, own))
        return None, (f"train/loss {float(published['train/loss']):.6g} with the batch of step {own} at the state of step {step}; "
                      f"there with its own batch {with_own}, that batch at its own step {there}")
    if step not in lines:
        return None, f"{METRICS} has no line of step {step} to compare with"
    shared = {key: spelled(plain(key, value)) for key, value in published.items() if key in lines[step]}
    differing = [key for key, value in shared.items() if lines[step][key] != value]
    same = f"the same to the last bit as its line of {METRICS}, {len(shared)} keys"
    return not differing, f"differs from its line of {METRICS} in {', '.join(differing)}" if differing else same


def sheets(panel: Mapping[str, Any], depth: int) -> list[Sheet]:
    """A panel in full: single numbers, statistics by layer, and those by layer of each head or expert."""
    short = lambda x: "" if x is None else f"[{x['low']:.4g}, {x['high']:.4g}]" if isinstance(x, dict) else f"{x:.5g}"
    single = [(key, short(value)) for key, value in panel.items() if not isinstance(value, list)]
    layered = {key: value for key, value in panel.items() if isinstance(value, list) and not key.endswith(EACH)}
    each = []
    for key, value in panel.items():
        if key.endswith(EACH):
            for index in range(max(len(x or ()) for x in value)):
                each.append((f"{key}[{index}]", *(short(x[index]) if x and index < len(x) else "" for x in value)))
    by_layer = [(f"{key}, range" if key.endswith(HISTOGRAM) else key, *map(short, value)) for key, value in layered.items()]
    columns = ("", *(f"{layer:02}" for layer in range(depth)))
    return [Sheet("Numbers", ("", "value"), single), Sheet("By layer", columns, by_layer), Sheet("By layer, each", columns, each)]


def without(directory: Path, step: int, batches: int, report: Report) -> Experiment:
    """The config of a run that goes on from the newest sound checkpoint at or before a step, without so many batches from that step on; its
    directory, beside the other one, is made ready to be resumed. Raises UserError where that directory is there already."""
    replay, _ = open_run(directory, report)
    before = replay.plan.config
    check_step(directory, before, "--step", step)
    skip = (*before.data.skip, (step, batches))
    config = replace(before, {"data.skip": skip, "run.root": str(directory.parent), "run.resume": False,
                              "run.name": f"{directory.name},skip={step}+{batches}"})
    fresh, _ = run_directory.claim(config)
    saved, state = replay.before(step)
    if saved:
        checkpoints = Checkpoints(fresh / "checkpoints", config)
        checkpoints.save(saved, state, None)
        checkpoints.finish()
        checkpoints.close()
        for name in (METRICS, run_directory.CONDITIONS):
            run_directory.write(fresh / name, (directory / name).read_text())
    report(f"{fresh} goes on from step {saved}")
    return replace(config, {"run.resume": True})
