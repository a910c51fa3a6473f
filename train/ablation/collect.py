"""The results of a sweep as a table, and whether its members may be compared."""

import functools
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from configs.knobs import diff, tell
from configs.load import UserError, fingerprint, from_json
from configs.schema import Experiment
from configs.sweep import Curve
from train.ablation.sweep import PLAN, config_of, read_json
from train.directory import CONDITIONS, SUMMARY
from train.log import METRICS, read_lines

RATE, SEED = "optim.learning_rate", "train.seed"
"""The axes with a role: the abscissa of the figures, and what members are paired by."""

SAME_CONDITIONS = ("corpus", "dtype", "batch")
"""Conditions that every member of a fair comparison shares."""


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
    def loss(self) -> float:
        """Held-out loss at the end; infinite where the run diverged."""
        value = self.summary["eval_loss"]
        return np.inf if self.summary["status"] == "diverged" or value is None else float(value)

    @property
    def initial(self) -> float:
        return float(self.summary["initial_eval_loss"])

    @functools.cached_property
    def lines(self) -> list[dict[str, Any]]:
        return read_lines(self.directory / METRICS)

    def series(self, key: str) -> tuple[np.ndarray, np.ndarray] | None:
        """A statistic as (fraction of the schedule [n], values [n, layers], or [n] of a single number); None where it was not logged."""
        lines = [line for line in self.lines if key in line]
        if not lines:
            return None
        number = lambda x: np.nan if x is None else float(x)
        values = [list(map(number, line[key])) if isinstance(line[key], list) else number(line[key]) for line in lines]
        return np.asarray([line["step"] for line in lines]) / max(self.config.train.steps, 1), np.asarray(values)


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
        return sorted({result.rate for result in self.results})

    def of(self, variant: str) -> list[Result]:
        return [result for result in self.results if result.variant == variant]

    def grid(self, variant: str, value: Callable[[Result], float]) -> np.ndarray:
        """A number of each run of a variant as [rates, seeds], NaN where a run is missing."""
        seeds = sorted({result.seed for result in self.results})
        grid = np.full((len(self.rates), len(seeds)), np.nan)
        for result in self.of(variant):
            grid[self.rates.index(result.rate), seeds.index(result.seed)] = value(result)
        return grid

    def losses(self, variant: str) -> np.ndarray:
        """Held-out loss [rates, seeds], at most the loss at init, which is also that of a run that diverged."""
        initial = self.grid(variant, lambda run: run.initial)
        return np.fmin(self.grid(variant, lambda run: run.loss), initial)[:, self.whole]

    @property
    def whole(self) -> np.ndarray:
        """Seeds of which every variant has a result at every rate."""
        return ~np.isnan([self.grid(variant, lambda run: run.initial) for variant in self.variants]).any((0, 1))


def collect(folder: Path) -> Table:
    """The table of a sweep's folder. Raises UserError where it holds no sweep, no finished member, or members that may not be compared."""
    plan = read_json(folder / PLAN)
    results, missing = [], []
    for name, of in plan["members"].items():
        directory = folder / name
        if not (directory / SUMMARY).exists():
            missing.append(name)
            continue
        summary, config = read_json(directory / SUMMARY), config_of(directory)
        if fingerprint(config) != of["fingerprint"]:
            raise UserError(f"{directory}: its config is not the one that the sweep planned{difference(folder, name, config)}; restore it")
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
    """How a member's config differs from the one the sweep wrote for it."""
    planned = folder / "configs" / f"{name}.json"
    return f"; {tell(diff(from_json(planned.read_text()), config), 'in the sweep')}" if planned.exists() else ""


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
