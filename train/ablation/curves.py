"""Curves that a sweep asks for: a statistic over the layers, the steps or the points of an axis, by variant and seed."""

from dataclasses import dataclass

import numpy as np
from jaxtyping import Float

from configs.sweep import Curve
from train.ablation.collect import RATE, Result, Table
from train.ablation.statistics import Interval, interval


def mean_of_layers(x: Float[np.ndarray, "... l"]) -> Float[np.ndarray, "..."]:
    """The mean over the layers that have the statistic, NaN where none has it."""
    with np.errstate(invalid="ignore"):  # 0 / 0
        return np.nansum(x, -1) / np.sum(~np.isnan(x), -1)


OF_LAYERS = {
    "first": lambda x: x[..., 0],
    "last": lambda x: x[..., -1],
    "mean": mean_of_layers,
    "max": lambda x: np.fmax.reduce(x, -1),  # passes over NaN
}


@dataclass(frozen=True)
class Line:
    """One line of a curve: values [points, seeds] over x [points], which rises; NaN where a run has none. `names`: the points in words."""

    x: Float[np.ndarray, "points"]
    values: Float[np.ndarray, "points seeds"]
    names: tuple[str, ...]

    @property
    def mean(self) -> Float[np.ndarray, "points"]:
        """The mean over the seeds that have a finite value, NaN where none has."""
        return mean_of_layers(np.where(np.isfinite(self.values), self.values, np.nan))

    @property
    def law(self) -> Interval | None:
        """The exponent p of values ~ x^p, fitted in each seed that has every point; None where a logarithm or a third point is missing."""
        whole = self.values[:, np.isfinite(self.values).all(0)]
        if len(self.x) < 3 or not (self.x > 0).all() or not whole.size or not (whole > 0).all():
            return None
        return interval(np.polyfit(np.log(self.x), np.log(whole), 1)[0])

    @property
    def growth(self) -> Interval | None:
        """The last value over the first, in each seed that has both; None where there is none, or they are not positive."""
        ends = self.values[[0, -1]]
        ends = ends[:, np.isfinite(ends).all(0)]
        return interval(ends[1] / ends[0]) if len(self.x) > 1 and ends.size and (ends > 0).all() else None


def lines(table: Table, curve: Curve) -> dict[str, Line]:
    """The curve of each variant at its best learning rate; over an axis, of the variants without that axis. Empty where no run has it."""
    if curve.over in ("layer", "step"):
        found = {variant: line(table.at_best_rate(variant), curve) for variant in table.variants}
    else:
        variants = dict.fromkeys(run.variant_without(curve.over) for run in table.results)
        found = {variant: over_axis(table, curve, variant) for variant in variants}
    return {variant: of for variant, of in found.items() if of is not None}


def over_axis(table: Table, curve: Curve, variant: str) -> Line | None:
    """A statistic over the points of an axis, one column per seed: by rising number, or where a label is none, in their order."""
    labels = next(axis["labels"] for axis in table.axes if axis["name"] == curve.over)
    x = numbers(labels)
    runs = [run for run in table.results if run.variant_without(curve.over) == variant]
    if curve.over != RATE:
        runs = [run for of in dict.fromkeys(run.variant for run in runs) for run in table.at_best_rate(of)]
    values = np.full((len(labels), len(table.seeds)), np.nan)
    for run in runs:
        values[labels.index(run.labels[curve.over]), table.seeds.index(run.seed)] = value(run, curve)
    rising = np.argsort(x)
    return Line(x[rising], values[rising], tuple(labels[i] for i in rising)) if np.isfinite(values).any() else None


def numbers(labels: list[str]) -> Float[np.ndarray, "points"]:
    """Labels as numbers, or their order where one of them is none."""
    try:
        found = np.asarray([float(label) for label in labels])
    except ValueError:
        found = np.full(len(labels), np.nan)
    return found if np.isfinite(found).all() else np.arange(len(labels), dtype=float)


def line(runs: list[Result], curve: Curve) -> Line | None:
    """A statistic over the layers, counted from 1, or over the fraction of the schedule, one column per run; shorter runs end in NaN."""
    columns, x = [], np.zeros(0)
    for run in runs:
        if (series := run.series(curve.key)) is None:
            continue
        at, values = series
        if curve.over == "step":
            column = over_layers(values, curve)
        elif values.ndim == 2 and (index := moment(run, curve)) is not None:
            column, at = values[index], np.arange(1.0, values.shape[1] + 1)
        else:
            continue
        columns.append(column)
        x = at if len(at) > len(x) else x
    padded = [np.append(column, np.full(len(x) - len(column), np.nan)) for column in columns]
    return Line(x, np.asarray(padded).T, tuple(f"{at:g}" for at in x)) if padded else None


def over_layers(values: Float[np.ndarray, "n ..."], curve: Curve) -> Float[np.ndarray, "n"]:
    """A statistic per layer as a single number, as the curve asks; a single number as it is."""
    return OF_LAYERS[curve.layer](values) if values.ndim == 2 else values


def moment(run: Result, curve: Curve) -> int | None:
    """The index of a series at init or at the end, which a run that diverged does not have."""
    return 0 if curve.step == "first" else None if run.diverged else -1


def value(run: Result, curve: Curve) -> float:
    """A statistic of one run at init or at the end; NaN where it has none."""
    series, index = run.series(curve.key), moment(run, curve)
    return np.nan if series is None or index is None else float(over_layers(series[1], curve)[index])


def title(curve: Curve) -> str:
    """What a curve shows, in words."""
    if curve.over == "layer":
        of = "the layers'"
    elif "/" in curve.key:  # a single number
        of = "the runs'"
    else:
        of = {"first": "the first layer's", "last": "the last layer's", "mean": "the mean over layers of",
              "max": "the largest over layers of"}[curve.layer]
    over = {"layer": "", "step": " over the steps"}.get(curve.over, f" over {curve.over}")
    return f"{of} {curve.key}{over}" + ("" if curve.over == "step" else ", at init" if curve.step == "first" else ", at the end")


def named_points(curve: Curve, found: dict[str, Line], most: int = 7) -> tuple[Float[np.ndarray, "points"], list[str]]:
    """Up to seven points of the longest line and their names: steps at equal distances, layers and points of an axis in equal ratios."""
    longest = max(found.values(), key=lambda of: len(of.x))
    count = len(longest.x)
    spaced = np.linspace(0, count - 1, most) if curve.over == "step" else np.geomspace(1, count, most) - 1
    chosen = np.unique(spaced.round().astype(int)) if count > most else np.arange(count)
    return longest.x[chosen], [longest.names[i] for i in chosen]


def told(curve: Curve, found: dict[str, Line]) -> tuple[list[str], list[list[str]]]:
    """A curve as a table, head and rows: means over seeds at the named points (between two steps of another line along the straight line
    that joins them), and where there are any, last over first and the exponent with their intervals."""
    x, names = named_points(curve, found)
    kind = {"layer": "layer ", "step": "at "}.get(curve.over, "")
    head = ["variant", *(kind + name for name in names)]
    rows = [[variant, *map(spelled, np.interp(x, of.x, of.mean, np.nan, np.nan))] for variant, of in found.items()]
    for heading, of_line in (("last / first", lambda of: of.growth), ("exponent", lambda of: of.law)):
        column = [of_line(of) for of in found.values()]
        if any(of is not None for of in column):
            head.append(heading)
            for row, of in zip(rows, column, strict=True):
                row.append("" if of is None else str(of))
    return head, rows


def spelled(x: float) -> str:
    return f"{x:.4g}" if np.isfinite(x) else ""
