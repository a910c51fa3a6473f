"""The results of a sweep as a table, and whether its members may be compared."""

import functools
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from configs.knobs import diff, tell
from configs.load import UserError, fingerprint, read_config, read_json
from configs.schema import Experiment
from configs.sweep import Curve
from train.ablation.sweep import read_plan
from train.directory import CONDITIONS, SUMMARY, config_of
from train.log import METRICS, read_lines

RATE, SEED = "optim.learning_rate", "train.seed"
"""The axes with a role: the abscissa of the figures, and what members are paired by."""

SAME_CONDITIONS = ("corpus",)
"""Conditions, beside the knobs, that every member of a fair comparison shares."""


@dataclass(frozen=True)
class Result:
    """One finished member: labels by axis, config as knobs, summary, conditions, and its metrics."""

    directory: Path
    labels: dict[str, str]
    config: Experiment
    summary: dict[str, Any]
    conditions: dict[str, Any]

    @property
    def variant(self) -> str:
        """The labels of all axes but the learning rate and the seed."""
        return self.variant_without()

    def variant_without(self, *axes: str) -> str:
        """The variant as if these axes were not there."""
        return ", ".join(label for axis, label in self.labels.items() if axis not in (RATE, SEED, *axes)) or "all"

    @property
    def rate(self) -> float:
        return self.config.optim.learning_rate

    @property
    def seed(self) -> int:
        return self.config.train.seed

    @property
    def diverged(self) -> bool:
        return self.summary["status"] == "diverged"

    @property
    def reached(self) -> float:
        """The fraction of the schedule that it ran."""
        return self.summary["step"] / max(self.config.train.steps, 1) if self.diverged else 1.0

    @property
    def loss(self) -> float:
        """Held-out loss at the end; infinite where the run diverged, or where the loss is no number."""
        value = np.inf if self.diverged or self.summary["eval_loss"] is None else float(self.summary["eval_loss"])
        return value if np.isfinite(value) else np.inf

    @property
    def initial(self) -> float:
        return float(self.summary["initial_eval_loss"])

    @property
    def capped(self) -> float:
        """min(loss, loss at init): what a comparison takes for the loss of a run, also of one that diverged."""
        return float(np.fmin(self.loss, self.initial))

    @property
    def largest_logit(self) -> float:
        """The largest attention logit of all panels; NaN where none was logged."""
        value = self.summary["largest_attention_logit"]
        return np.nan if value is None else float(value)

    @functools.cached_property
    def lines(self) -> list[dict[str, Any]]:
        return read_lines(self.directory / METRICS)

    def series(self, key: str) -> tuple[np.ndarray, np.ndarray] | None:
        """A statistic as (fraction of the schedule [n], values [n, layers], or [n] of a single number); None where no step logged it so."""
        lines = [line for line in self.lines if key in line]
        try:
            values = np.asarray([line[key] for line in lines], float)  # None is NaN, and the texts NaN and Infinity are what they say
        except (TypeError, ValueError):  # histograms, and heads of which some layers have none
            return None
        if not lines or values.ndim > 2:
            return None
        return np.asarray([line["step"] for line in lines]) / max(self.config.train.steps, 1), values


@dataclass(frozen=True)
class Table:
    """The finished members of a sweep, and those that are not."""

    name: str
    question: str
    axes: list[dict[str, Any]]
    curves: list[Curve]
    results: list[Result]
    missing: list[str]

    @property
    def variants(self) -> list[str]:
        return list(dict.fromkeys(result.variant for result in self.results))

    @property
    def trained(self) -> bool:
        """Whether its runs have steps: one that has none only measures initial models."""
        return any(run.config.train.steps for run in self.results)

    @property
    def rates(self) -> list[float]:
        """The learning rates that an axis of its own sweeps; without one a single rate, of which each variant may have another."""
        swept = RATE in (axis["name"] for axis in self.axes)
        return sorted({result.rate for result in self.results}) if swept else [self.results[0].rate]

    @property
    def seeds(self) -> list[int]:
        return sorted({result.seed for result in self.results})

    def of(self, variant: str) -> list[Result]:
        return [result for result in self.results if result.variant == variant]

    def grid(self, variant: str, value: Callable[[Result], float]) -> np.ndarray:
        """A number of each run of a variant as [rates, seeds], NaN where a run is missing."""
        grid = np.full((len(self.rates), len(self.seeds)), np.nan)
        for run in self.of(variant):
            grid[self.rates.index(run.rate) if len(self.rates) > 1 else 0, self.seeds.index(run.seed)] = value(run)
        return grid

    def losses(self, variant: str) -> np.ndarray:
        """Held-out loss [rates, seeds], at most the loss at init, which is also that of a run that diverged."""
        return self.grid(variant, lambda run: run.capped)[:, self.whole]

    def at_best_rate(self, variant: str) -> list[Result]:
        """The runs of a variant at the learning rate with the least mean loss over the seeds that every variant has, in order of seed."""
        row = int(np.argmin(self.losses(variant).mean(1)))
        runs = [run for run in self.of(variant) if len(self.rates) == 1 or run.rate == self.rates[row]]
        return sorted(runs, key=lambda run: run.seed)

    @property
    def whole(self) -> np.ndarray:
        """Seeds of which every variant has a result at every rate."""
        return ~np.isnan([self.grid(variant, lambda run: 1.0) for variant in self.variants]).any((0, 1))


def collect(folder: Path) -> Table:
    """The table of a sweep's folder. Raises UserError where it holds no sweep, no finished member, or members that may not be compared."""
    plan = read_plan(folder)
    results, missing = [], []
    for name, of in plan["members"].items():
        directory = folder / name
        if not (directory / SUMMARY).exists():
            missing.append(name)
            continue
        summary, config = read_json(directory / SUMMARY), config_of(directory)
        if fingerprint(config) != of["fingerprint"]:
            raise UserError(f"{directory}: its config is not the one that the sweep planned; {difference(folder, name, config)}")
        if summary["status"] not in ("completed", "diverged"):
            missing.append(name)
            continue
        if summary["initial_eval_loss"] is None:
            raise UserError(f"{directory}: has no held-out loss at step 0, which a report needs; run the sweep with eval.every set")
        results.append(Result(directory, of["labels"], config, summary, read_json(directory / CONDITIONS)))
    if not results:
        raise UserError(f"{folder}: none of its {len(plan['members'])} members has finished")
    table = Table(plan["name"], plan["question"], plan["axes"], [Curve(**of) for of in plan["curves"]], results, missing)
    check_fair(table)
    if not table.whole.any():
        raise UserError(f"{folder}: no seed has a result of every variant at every learning rate; {len(missing)} members are missing")
    return table


def difference(folder: Path, name: str, config: Experiment) -> str:
    """How a member's config differs from the one the sweep wrote for it, and what to do about it."""
    planned = folder / "configs" / f"{name}.json"
    changes = diff(read_config(planned), config) if planned.exists() else {}
    if planned.exists() and not changes:
        return "no knob differs, so that a default has changed since: use the code of then, whose commit is in conditions.json"
    return f"{tell(changes, 'in the sweep')}; restore it" if changes else "restore it"


def check_fair(table: Table) -> None:
    """Raises UserError, with the difference, where members differ in more than the declared axes: in a knob, or in a condition."""
    first, declared = table.results[0], {knob for axis in table.axes for knob in axis["knobs"]}
    for other in table.results[1:]:
        stray = {knob: values for knob, values in diff(other.config, first.config).items() if knob not in declared}
        stray |= {
            key: (first.conditions[key], other.conditions[key]) for key in SAME_CONDITIONS if first.conditions[key] != other.conditions[key]
        }
        if stray:
            told = "; ".join(f"{key} = {json.dumps(here)} and {json.dumps(there)}" for key, (here, there) in stray.items())
            raise UserError(f"{first.directory.name} and {other.directory.name} may not be compared, they differ beside the axes: {told}")
