"""The figures of a report, drawn with matplotlib; each function returns a figure, or None where the sweep has nothing to show."""

from collections.abc import Callable, Iterable

import matplotlib
import numpy as np

matplotlib.use("Agg")
from matplotlib import pyplot as plt
from matplotlib.colors import LogNorm, Normalize
from matplotlib.figure import Figure

from configs.sweep import Curve
from train.ablation.collect import Result, Table
from train.ablation.curves import Line, named_points
from train.ablation.statistics import Interval

HEATMAPS = {
    "activation RMS of the residual stream": ("activation_rms.resid.post", True),
    "gradient norm": ("grad_norm", True),
    "attention-logit max": ("attention_logit_max", True),
    "attention entropy, nats": ("attention_entropy", False),
}
"""Title to statistic, and whether its colour scale is logarithmic."""

plt.rcParams.update({"figure.dpi": 160, "axes.spines.top": False, "axes.spines.right": False, "font.size": 9, "axes.grid": True,
                     "grid.alpha": 0.3, "legend.frameon": False, "figure.constrained_layout.use": True})

WIDTH = 5.0
"""Inches: on a phone, at half its size, the text of a figure can still be read."""

STROKES = ("-", "--", ":")
"""Of lines past the tenth and the twentieth, whose colours come round again."""


def over_rates(table: Table, values: Callable[[str], np.ndarray], label: str, logarithmic: bool = False) -> Figure | None:
    """Numbers of a variant, [rates, seeds], against the learning rate, one line per variant: the mean over seeds, in the band that the
    seeds span; a cross where a run diverged."""
    if len(table.rates) < 2 or not any(np.isfinite(values(variant)).any() for variant in table.variants):
        return None
    figure, axes = plt.subplots(figsize=(WIDTH, 3.2))
    for index, variant in enumerate(table.variants):
        grid = np.ma.masked_invalid(values(variant))  # members without a result
        mean, low, high = grid.mean(1).filled(np.nan), grid.min(1), grid.max(1)
        axes.plot(table.rates, mean, marker="o", ms=4, color=f"C{index}", ls=STROKES[index // 10 % 3], label=variant)
        axes.fill_between(table.rates, low, high, alpha=0.15, color=f"C{index}")
        lost = [rate for rate, row in zip(table.rates, table.grid(variant, lambda run: run.loss), strict=True) if np.isinf(row).any()]
        axes.plot(lost, [mean[table.rates.index(rate)] for rate in lost], "x", ms=10, color=f"C{index}")
    axes.set(xscale="log", xlabel="peak learning rate", ylabel=label)
    axes.set_yscale("log" if logarithmic else "linear")
    axes.set_xticks(table.rates, [f"{rate:g}" for rate in table.rates])
    axes.set_xticks([], minor=True)
    add_legend(figure, axes)
    return figure


def add_legend(figure: Figure, axes: plt.Axes) -> None:
    """The legend beside the lines, or below them where it is long."""
    handles, labels = axes.get_legend_handles_labels()
    if len(labels) <= 4:
        axes.legend(fontsize=8)
    else:
        columns = 3 if max(map(len, labels)) <= 18 else 2
        figure.set_figheight(figure.get_figheight() + 0.19 * -(-len(labels) // columns))
        figure.legend(handles, labels, loc="outside lower center", ncols=columns, fontsize=8)


def bars(values: dict[str, Interval], label: str) -> Figure:
    """Means by variant with their intervals where there are any."""
    figure, axes = plt.subplots(figsize=(WIDTH, 0.4 * len(values) + 1.2))
    means = [value.mean for value in values.values()]
    errors = np.asarray([[value.mean - value.low, value.high - value.mean] for value in values.values()]).T
    axes.barh(list(values), means, xerr=np.where(np.isfinite(errors), errors, 0), height=0.6, capsize=3, color="C0")
    axes.invert_yaxis()
    axes.set_xlabel(label)
    return figure


def heatmaps(runs: dict[str, Result], title: str, key: str, logarithmic: bool) -> Figure | None:
    """Layer by fraction of the schedule, one row per variant, one colour scale for all; a run that diverged ends where it did."""
    panels = {name: panel for name, run in runs.items() if (panel := run.series(key)) is not None}
    if not panels:
        return None
    values = np.concatenate([panel.ravel() for _, panel in panels.values()])
    values = values[np.isfinite(values) & ((values > 0) | (not logarithmic))]
    if not len(values):
        return None
    scale = (LogNorm if logarithmic else Normalize)(values.min(), max(values.max(), values.min() * 1.001))
    figure, rows = plt.subplots(len(panels), 1, figsize=(WIDTH, 0.9 * len(panels) + 0.9), sharex=True, squeeze=False)
    for axes, (name, (fraction, panel)) in zip(rows[:, 0], panels.items(), strict=True):
        edges = np.append(fraction, max(runs[name].reached, fraction[-1]))
        image = axes.pcolormesh(edges, np.arange(panel.shape[1] + 1) - 0.5, panel.T, norm=scale, cmap="viridis")
        axes.set_title(name, fontsize=8, loc="left", pad=2)
        axes.set(ylabel="layer", yticks=range(0, panel.shape[1], max(1, panel.shape[1] // 4)))
        axes.grid(False)
    rows[-1, 0].set(xlabel="fraction of the schedule", xlim=(0, 1))
    figure.colorbar(image, ax=rows[:, 0], label=title)
    return figure


def curve(of: Curve, lines: dict[str, Line]) -> Figure:
    """One line per variant: the mean over seeds in the band that they span. An axis is logarithmic where its values are positive and span
    more than a factor of eight; the vertical one also where the horizontal one is, so that a power law is straight."""
    figure, axes = plt.subplots(figsize=(WIDTH, 3.2))
    for index, (variant, line) in enumerate(lines.items()):
        band, marker = np.ma.masked_invalid(line.values), "o" if len(line.x) <= 60 else None
        axes.plot(line.x, line.mean, marker=marker, ms=3, color=f"C{index}", ls=STROKES[index // 10 % 3], label=variant)
        axes.fill_between(line.x, band.min(1), band.max(1), alpha=0.15, color=f"C{index}")
    horizontal, vertical = (spans(getattr(line, values) for line in lines.values()) for values in ("x", "values"))
    axes.set_xscale("log" if horizontal > 8 else "linear")
    axes.set_yscale("log" if vertical > (1 if horizontal > 8 else 8) else "linear")
    xlabel = {"step": "fraction of the schedule", "layer": "layer, counted from 1"}.get(of.over, of.over)
    axes.set(xlabel=xlabel, ylabel=of.key)
    if of.over != "step":
        axes.set_xticks(*named_points(of, lines))
        axes.set_xticks([], minor=True)
    add_legend(figure, axes)
    return figure


def spans(values: Iterable[np.ndarray]) -> float:
    """The largest of finite values over the least, 0 where one is not positive."""
    values = np.concatenate([of.ravel() for of in values])
    values = values[np.isfinite(values)]
    return float(values.max() / values.min()) if len(values) and values.min() > 0 else 0.0
