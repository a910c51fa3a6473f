"""The figures of a report, drawn with matplotlib; each function returns a figure, or None where the sweep has nothing to show."""

from collections.abc import Callable

import matplotlib
import numpy as np

matplotlib.use("Agg")
from matplotlib import pyplot as plt
from matplotlib.colors import LogNorm, Normalize
from matplotlib.figure import Figure

from configs.sweep import Curve
from train.ablation.collect import Result, Table
from train.ablation.curves import Line
from train.ablation.statistics import Interval

HEATMAPS = {
    "activation RMS of the residual stream": ("activation_rms.resid.post", True),
    "gradient norm": ("grad_norm", True),
    "attention-logit max": ("attention_logit_max", True),
    "attention entropy, nats": ("attention_entropy", False),
}
"""Title to statistic, and whether its colour scale is logarithmic."""

plt.rcParams.update({"figure.dpi": 110, "axes.spines.top": False, "axes.spines.right": False, "font.size": 9, "axes.grid": True,
                     "grid.alpha": 0.3, "legend.frameon": False, "figure.constrained_layout.use": True})


def over_rates(table: Table, values: Callable[[str], np.ndarray], label: str, logarithmic: bool = False) -> Figure | None:
    """Numbers of a variant, [rates, seeds], against the learning rate, one line per variant: the mean over seeds, in the band that the
    seeds span; a cross where a run diverged."""
    if len(table.rates) < 2:
        return None
    figure, axes = plt.subplots(figsize=(7, 4))
    for index, variant in enumerate(table.variants):
        grid = np.ma.masked_invalid(values(variant))  # members without a result
        mean, low, high = grid.mean(1), grid.min(1), grid.max(1)
        axes.plot(table.rates, mean, marker="o", ms=4, color=f"C{index}", label=variant)
        axes.fill_between(table.rates, low, high, alpha=0.15, color=f"C{index}")
        lost = [rate for rate, row in zip(table.rates, table.grid(variant, lambda run: run.loss), strict=True) if np.isinf(row).any()]
        axes.plot(lost, [mean[table.rates.index(rate)] for rate in lost], "x", ms=10, color=f"C{index}")
    axes.set(xscale="log", xlabel="peak learning rate", ylabel=label)
    axes.set_yscale("log" if logarithmic else "linear")
    axes.legend(fontsize=8)
    return figure


def bars(values: dict[str, Interval], label: str) -> Figure:
    """Means by variant with their intervals where there are any."""
    figure, axes = plt.subplots(figsize=(7, 0.4 * len(values) + 1.2))
    means = [value.mean for value in values.values()]
    errors = np.asarray([[value.mean - value.low, value.high - value.mean] for value in values.values()]).T
    axes.barh(list(values), means, xerr=np.where(np.isfinite(errors), errors, 0), height=0.6, capsize=3, color="C0")
    axes.invert_yaxis()
    axes.set_xlabel(label)
    return figure


def heatmaps(runs: dict[str, Result], title: str, key: str, logarithmic: bool) -> Figure | None:
    """Layer by fraction of the schedule, one row per variant, one colour scale for all."""
    panels = {name: panel for name, run in runs.items() if (panel := run.series(key)) is not None}
    if not panels:
        return None
    values = np.concatenate([panel.ravel() for _, panel in panels.values()])
    values = values[np.isfinite(values) & ((values > 0) | (not logarithmic))]
    if not len(values):
        return None
    scale = (LogNorm if logarithmic else Normalize)(values.min(), max(values.max(), values.min() * 1.001))
    figure, rows = plt.subplots(len(panels), 1, figsize=(7, 0.9 * len(panels) + 0.9), sharex=True, squeeze=False)
    for axes, (name, (fraction, panel)) in zip(rows[:, 0], panels.items(), strict=True):
        edges = np.append(fraction, 1.0) if len(fraction) > 1 else [0, 1]
        image = axes.pcolormesh(edges, np.arange(panel.shape[1] + 1) - 0.5, panel.T, norm=scale, cmap="viridis")
        axes.set_title(name, fontsize=8, loc="left", pad=2)
        axes.set(ylabel="layer", yticks=range(0, panel.shape[1], max(1, panel.shape[1] // 4)))
        axes.grid(False)
    rows[-1, 0].set_xlabel("fraction of the schedule")
    figure.colorbar(image, ax=rows[:, 0], label=title)
    return figure


def curve(of: Curve, lines: dict[str, Line]) -> Figure:
    """One line per variant: the mean over seeds in the band that they span; both axes logarithmic where all values allow it and span more
    than a factor of eight."""
    figure, axes = plt.subplots(figsize=(7, 4))
    for index, (variant, line) in enumerate(lines.items()):
        grid = np.ma.masked_invalid(line.values)
        marker = "o" if len(line.x) <= 60 else None
        axes.plot(line.x, grid.mean(1), marker=marker, ms=3, color=f"C{index}", label=variant)
        axes.fill_between(line.x, grid.min(1), grid.max(1), alpha=0.15, color=f"C{index}")
    axes.set(xlabel={"step": "fraction of the schedule"}.get(of.over, of.over), ylabel=of.key)
    for values, set_scale in ((np.concatenate([line.values.ravel() for line in lines.values()]), axes.set_yscale),
                              (np.concatenate([line.x for line in lines.values()]), axes.set_xscale)):
        present = values[np.isfinite(values)]
        if len(present) and present.min() > 0 and present.max() > 8 * present.min():
            set_scale("log")
    points = np.unique(np.concatenate([line.x for line in lines.values()]))
    if of.over not in ("layer", "step") and len(points) <= 12:
        axes.set_xticks(points, [f"{point:g}" for point in points])
        axes.set_xticks([], minor=True)
    axes.legend(fontsize=8)
    return figure
