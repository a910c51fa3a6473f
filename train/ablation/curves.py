"""Curves that a sweep asks for: a statistic over the layers, the steps or the points of an axis, by variant and seed."""

from dataclasses import dataclass

import numpy as np
from jaxtyping import Float

from configs.sweep import Curve
from train.ablation.collect import Result, Table
from train.ablation.statistics import Interval, interval

OF_LAYERS = {
    "first": lambda x: x[..., 0],
    "last": lambda x: x[..., -1],
    "mean": lambda x: np.nanmean(x, -1),
    "max": lambda x: np.nanmax(x, -1),
}


@dataclass(frozen=True)
class Line:
    """One line of a curve: values [points, seeds] over x [points]; NaN where a run has none."""

    x: Float[np.ndarray, "points"]
    values: Float[np.ndarray, "points seeds"]

    @property
    def law(self) -> Interval | None:
        """The exponent p of values ~ x^p, fitted in each seed; None where a logarithm or a third point is missing."""
        if len(self.x) < 3 or not (self.x > 0).all() or not (np.isfinite(self.values) & (self.values > 0)).all():
            return None
        return interval(np.polyfit(np.log(self.x), np.log(self.values), 1)[0])

    @property
    def growth(self) -> Interval:
        """The last value over the first, in each seed."""
        return interval(self.values[-1] / self.values[0])


def lines(table: Table, curve: Curve) -> dict[str, Line]:
    """The curve of each variant at its best learning rate; over an axis, of the variants without that axis. Empty where no run has it."""
    if curve.over in ("layer", "step"):
        found = {variant: line(runs, curve) for variant in table.variants if (runs := at_best_rate(table, table.of(variant)))}
        return {variant: of for variant, of in found.items() if of is not None}
    labels = next(axis["labels"] for axis in table.axes if axis["name"] == curve.over)
    x, found = numbers(labels), {}
    for variant in dict.fromkeys(result.variant_without(curve.over) for result in table.results):
        of_label = lambda label, variant=variant: [
            run for run in table.results if run.labels[curve.over] == label and run.variant_without(curve.over) == variant]
        columns = [[value(run, curve) for run in at_best_rate(table, of_label(label))] for label in labels]
        seeds = max(map(len, columns))
        rows = [column + [np.nan] * (seeds - len(column)) for column in columns]
        if np.isfinite(rows).any():
            found[variant] = Line(x, np.asarray(rows))
    return found


def numbers(labels: list[str]) -> Float[np.ndarray, "points"]:
    """Labels as numbers, or their order where one of them is none."""
    try:
        return np.asarray([float(label) for label in labels])
    except ValueError:
        return np.arange(len(labels), dtype=float)


def at_best_rate(table: Table, runs: list[Result]) -> list[Result]:
    """The runs of one learning rate, in the order of their seeds: the rate of the lowest mean loss."""
    of_rate = lambda rate: [run for run in runs if run.rate == rate]
    best = min({run.rate for run in runs}, key=lambda rate: np.mean([run.loss for run in of_rate(rate)]), default=None)
    return sorted(of_rate(best), key=lambda run: run.seed)


def line(runs: list[Result], curve: Curve) -> Line | None:
    """A statistic over the layers or the steps, one column per run; shorter runs end in NaN."""
    columns, x = [], np.zeros(0)
    for run in runs:
        series = run.series(curve.key)
        if series is None:
            return None
        fraction, values = series
        if curve.over == "layer":
            column = values[-1 if curve.step == "last" else 0]
            at = np.arange(1, len(column) + 1)
        else:
            column, at = OF_LAYERS[curve.layer](values) if values.ndim == 2 else values, fraction
        columns.append(column)
        x = at if len(at) > len(x) else x
    padded = [np.append(column, np.full(len(x) - len(column), np.nan)) for column in columns]
    return Line(x, np.asarray(padded, float).T)


def value(run: Result, curve: Curve) -> float:
    """A statistic of one run at its first or last step; NaN where it was not logged."""
    series = run.series(curve.key)
    if series is None:
        return np.nan
    last = series[1][-1 if curve.step == "last" else 0]
    return float(OF_LAYERS[curve.layer](last) if np.ndim(last) else last)


def title(curve: Curve) -> str:
    """What a curve shows, in words."""
    of = {"first": "the first layer's ", "last": "the last layer's ", "mean": "", "max": "the largest "}[curve.layer]
    where = "" if curve.over == "step" else ", at init" if curve.step == "first" else ", at the end"
    over = {"layer": "the layers", "step": "the steps"}.get(curve.over, curve.over)
    return f"{'' if curve.over == 'layer' else of}{curve.key} over {over}{where}"


def told(curve: Curve, found: dict[str, Line]) -> str:
    """A table of a curve: means over seeds at up to seven points, and the exponent or the growth with its interval."""
    longest = max(found.values(), key=lambda of: len(of.x)).x
    shown = np.unique(np.linspace(0, len(longest) - 1, min(len(longest), 7)).round().astype(int))
    name = {"layer": "layer ", "step": "at "}.get(curve.over, "")
    head = [*(f"{name}{longest[i]:g}" for i in shown), "last / first", "exponent"]
    rows = []
    for variant, of in found.items():
        present = [i < len(of.x) and np.isfinite(of.values[i]).any() for i in shown]
        means = [f"{np.nanmean(of.values[i]):.4g}" if there else "" for i, there in zip(shown, present, strict=True)]
        rows.append([variant, *means, str(of.growth), "" if of.law is None else str(of.law)])
    return "\n".join("| " + " | ".join(row) + " |" for row in (["variant", *head], ["---"] * (len(head) + 1), *rows))
