"""What a report says in words and tables: the conclusion, the variants side by side, interactions, and what it all stands on."""

import functools
import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from configs.knobs import diff
from models import init
from models.parameters import table as parameter_table
from models.transformer import Transformer
from train.ablation import curves
from train.ablation.collect import RATE, SEED, Result, Table
from train.ablation.statistics import compare, interaction, interval, sensitivity


def as_table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A table in markdown."""
    cell = lambda of: str(of).replace("|", "\\|")
    return "\n".join("| " + " | ".join(map(cell, row)) + " |" for row in (head, ["---"] * len(head), *rows))


def best(table: Table, variant: str) -> np.ndarray:
    """The loss of each seed at the variant's best learning rate, the one with the least mean over seeds."""
    losses = table.losses(variant)
    return losses[np.argmin(losses.mean(1))]


def best_run(table: Table, variant: str) -> Result:
    """The first seed's run at the best learning rate."""
    return table.at_best_rate(variant)[0]


def sensitivities(table: Table) -> dict[str, np.ndarray]:
    """Learning-rate sensitivity of each variant, for each seed."""
    return {variant: np.asarray([sensitivity(of_seed) for of_seed in table.losses(variant).T]) for variant in table.variants}


def spike_scores(table: Table, variant: str) -> np.ndarray:
    """Spike score of the gradient norm, mean over the learning rates, for each seed."""
    return table.grid(variant, lambda run: run.summary["spike_score"])[:, table.whole].mean(0)


def conclusion(table: Table) -> list[str]:
    """The variant with the least loss at its best rate and the one with the least learning-rate sensitivity, each with the others against
    it, paired by seed; and the exponents of the sweep's curves."""
    if table.trained:
        lines = against_least("lowest held-out loss", {variant: best(table, variant) for variant in table.variants})
        lines += against_least("least learning-rate sensitivity", sensitivities(table)) if len(table.rates) > 1 else []
        if len(table.variants) > 2 and table.whole.sum() > 1:
            count = len(table.variants) - 1
            lines.append(f"the 95 % of an interval are for one comparison; here are {count}, against a winner picked from the same runs")
    else:
        lines = ["initial models alone: no run has a step"]
    for curve in table.curves:
        if curve.over not in ("layer", "step"):
            laws = {variant: of.law for variant, of in curves.lines(table, curve).items() if of.law is not None}
            lines += [f"{curves.title(curve)}: exponent " + "; ".join(f"{law} in {name}" for name, law in laws.items())] if laws else []
    return lines


def against_least(what: str, values: dict[str, np.ndarray]) -> list[str]:
    winner = min(values, key=lambda variant: values[variant].mean())
    lines = [f"{what}: **{winner}**, {interval(values[winner])} nats per byte"]
    for variant, theirs in values.items():
        if variant != winner:
            gap = compare(values[winner], theirs)
            lines.append(f"{variant}: higher by {gap}; {gap.verdict}")
    return lines


def variant_table(table: Table) -> str:
    """Loss, sensitivity, largest logit, parameters and FLOPs of each variant, side by side; of initial models, what they have of these."""
    swept, rows = len(table.rates) > 1, []
    spread = sensitivities(table)
    for variant in table.variants:
        run = best_run(table, variant)
        row = {"best loss": interval(best(table, variant)), "at rate": f"{run.rate:g}"} if table.trained else {
            "loss at init": interval(best(table, variant))}
        row |= {"LR sensitivity": interval(spread[variant])} if table.trained and swept else {}
        row |= {"spike score" + ", mean over rates" * swept: interval(spike_scores(table, variant))} if table.trained else {}
        rows.append(row | {
            "largest logit there": "not logged" if np.isnan(run.largest_logit) else f"{run.largest_logit:.3g}",
            "parameters": f"{run.summary['parameters']['total']:,}",
            "FLOPs per token": f"{run.summary['flops_per_token']:,.0f}",
        })
    return as_table(("variant", *rows[0]), [(variant, *row.values()) for variant, row in zip(table.variants, rows, strict=True)])


def pairs_of_two(table: Table) -> list[tuple[str, str]]:
    """Pairs of axes, beside learning rate and seed, of which each pair of labels can be crossed."""
    named = [axis["name"] for axis in table.axes if axis["name"] not in (RATE, SEED) and len(axis["labels"]) > 1]
    return list(itertools.combinations(named, 2)) if len(named) == 2 else []


QUANTITIES: dict[str, Callable[[Table, str], np.ndarray]] = {
    "best held-out loss": best,
    "learning-rate sensitivity": lambda table, variant: sensitivities(table)[variant],
    "spike score of the gradient norm, mean over rates": spike_scores,
}
"""What is crossed in an interaction table: numbers of a variant by seed."""


def interaction_tables(table: Table) -> list[str]:
    """For each pair of axes and each quantity of trained models, a heading and a table."""
    if not table.trained:
        return []
    quantities = {name: of for name, of in QUANTITIES.items() if name != "learning-rate sensitivity" or len(table.rates) > 1}
    return [part for first, second in pairs_of_two(table) for name, of in quantities.items()
            for part in (f"## {first} x {second}: {name}", interaction_table(table, first, second, of))]


def interaction_table(table: Table, first: str, second: str, quantity: Callable[[Table, str], np.ndarray]) -> str:
    """For each label of the first axis against its first, and of the second: what both together do beyond each alone."""
    labels, rows = {axis["name"]: axis["labels"] for axis in table.axes}, []
    of = lambda a, b: quantity(table, next(run.variant for run in table.results if run.labels[first] == a and run.labels[second] == b))
    a, b = labels[first][0], labels[second][0]
    for other, change in itertools.product(labels[first][1:], labels[second][1:]):
        try:
            grid = np.asarray([[of(x, y) for y in (b, change)] for x in (a, other)])
        except StopIteration:
            continue
        alone, together, beyond = interval(grid[0, 1] - grid[0, 0]), interval(grid[1, 1] - grid[1, 0]), interaction(grid)
        rows.append((f"{a} to {other}", f"{b} to {change}", alone, together, beyond, beyond.verdict))
    return as_table(("against", "change", "alone", "with the change", "interaction", "verdict"), rows) if rows else "No pair is complete."


def diverged(table: Table) -> str:
    rows = [(run.variant, f"{run.rate:g}", run.seed, run.summary["step"]) for run in table.results if run.diverged]
    return as_table(("variant", "learning rate", "seed", "step"), rows) if rows else "None."


SHARED = {
    "the order of the data": ("data.batch", "data.sequence"),
    "the held-out text": ("data.batch", "data.sequence", "eval.batches"),
    "the probe batch": ("data.sequence", "instruments.probe_batch"),
}
"""What runs of one seed share, and the knobs whose change ends it."""


def caption(table: Table) -> str:
    """What every figure stands on: the conditions, what members differ in, and what they share."""
    each = functools.partial(told_once, table)
    differing = {knob for run in table.results for knob in diff(run.config, table.results[0].config)}
    same = [what for what, knobs in SHARED.items() if not differing.intersection(knobs)]
    kept = f"Runs of one seed share {', '.join(same) or 'neither the order of the data nor the held-out text'}"
    schedule = ", compared at equal fractions of their schedules" if table.trained else ""
    return (f"{len(table.results)} runs of {each(lambda run: run.config.train.steps)} steps x {each(lambda run: run.config.data.batch)} x "
            f"{each(lambda run: run.config.data.sequence)} bytes{schedule}. They differ in nothing but (checked): "
            f"{'; '.join(map(axis_told, table.axes))}. {kept}; {unequal_start(table)}. {each(lambda run: run.conditions['devices'])}, "
            f"{each(lambda run: run.config.train.dtype)}, jax {each(lambda run: run.conditions['versions']['jax'])}, "
            f"commit {each(lambda run: str(run.conditions['commit'])[:12])}.")


def told_once(table: Table, of: Callable[[Result], object]) -> str:
    """Something of the runs, each different answer once: "4", or "4 or 8"."""
    return " or ".join(dict.fromkeys(str(of(run)) for run in table.results))


def axis_told(axis: dict[str, Any]) -> str:
    """An axis, its knob where that has another name, and its points: each label, and what it stands for where that is another text."""
    alone, named = len(axis["knobs"]) == 1, axis["knobs"] == [axis["name"]]

    def told(label: str, point: dict[str, Any]) -> str:
        values = ", ".join(str(value) if alone else f"{knob} = {value}" for knob, value in point.items()) or "the base"
        return label if named or values == label else f"{label}: {values}"

    points = [told(label, point) for label, point in axis["points"].items()]
    name = f"{axis['name']}, {axis['knobs'][0]}" if alone and not named else axis["name"]
    return f"{name} ({('; ' if ': ' in ''.join(points) else ', ').join(points)})"


def unequal_start(table: Table) -> str:
    """Whether weights of one name and shape start at the same values in every variant, which holds where their scales are equal."""
    configs = dict.fromkeys(run.config.model for run in table.results)
    scales: dict[tuple, set[float]] = {}
    for model in configs:
        for row in parameter_table(Transformer(model)):
            shape = row.part_shape
            scales.setdefault((row.role, row.local_path, shape), set()).add(init.scale(row, model))
    stray = sorted({role for (role, *_), found in scales.items() if len(found) > 1})
    same = "weights of one name and shape start equal"
    return same + (f", except {', '.join(stray)}, whose scale is the variant's own" if stray else "")


def conditions(table: Table) -> str:
    each = functools.partial(told_once, table)
    corpus = table.results[0].conditions["corpus"]
    rows = [
        ("corpus", f"{corpus['source']}, {corpus['files']} files, SHA-256 {corpus['sha256'][:16]}…"),
        ("hardware", each(lambda run: run.conditions["processor"])),
        ("devices", each(lambda run: run.conditions["devices"])),
        ("versions", each(lambda run: ", ".join(f"{name} {version}" for name, version in run.conditions["versions"].items()))),
        ("commit", each(lambda run: run.conditions["commit"])),
        ("steps", each(lambda run: run.config.train.steps)),
        ("axes", "; ".join(f"{axis['name']}: {', '.join(axis['labels'])}" for axis in table.axes)),
    ]
    return as_table(("condition", "value"), rows)
