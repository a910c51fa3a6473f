"""What a report says in words and tables: the conclusion, the variants side by side, interactions, and what it all stands on."""

import itertools
from collections.abc import Callable, Iterable, Sequence

import numpy as np

from models import init
from models.parameters import table as parameter_table
from models.transformer import Transformer
from train.ablation import curves
from train.ablation.collect import RATE, SEED, Result, Table
from train.ablation.statistics import compare, interaction, interval, sensitivity


def as_table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A table in markdown."""
    return "\n".join("| " + " | ".join(map(str, row)) + " |" for row in (head, ["---"] * len(head), *rows))


def best(table: Table, variant: str) -> np.ndarray:
    """The least loss over the learning rates, for each seed; the loss at init where every run diverged."""
    return np.fmin.reduce(table.losses(variant), axis=0)


def best_run(table: Table, variant: str) -> Result:
    """The first seed's run at the learning rate with the least loss."""
    runs = [run for run in table.of(variant) if run.seed == min(run.seed for run in table.of(variant))]
    return min(runs, key=lambda run: run.loss)


def sensitivities(table: Table) -> dict[str, np.ndarray]:
    """Learning-rate sensitivity of each variant, for each seed."""
    return {variant: np.asarray([sensitivity(of_seed) for of_seed in table.losses(variant).T]) for variant in table.variants}


def spike_scores(table: Table, variant: str) -> np.ndarray:
    """Spike score of the gradient norm, mean over the learning rates, for each seed."""
    return table.grid(variant, lambda run: run.summary["spike_score"])[:, table.whole].mean(0)


def conclusion(table: Table) -> list[str]:
    """The variant with the least loss over the swept rates and the one with the least learning-rate sensitivity, each with the others
    against it, paired by seed; and the exponents of the sweep's curves."""
    losses = {variant: best(table, variant) for variant in table.variants}
    lines = against_least("lowest held-out loss", losses) if table.trained else []
    lines += against_least("least learning-rate sensitivity", sensitivities(table)) if len(table.rates) > 1 else []
    for curve in table.curves:
        if curve.over not in ("layer", "step"):
            laws = {variant: of.law for variant, of in curves.lines(table, curve).items() if of.law is not None}
            lines += [f"{curves.title(curve)}: exponent of {variant} {law}" for variant, law in laws.items()]
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
    """Loss, sensitivity, largest logit, parameters and FLOPs of each variant, side by side."""
    spread, rows = sensitivities(table), []
    for variant in table.variants:
        summary, run = table.of(variant)[0].summary, best_run(table, variant)
        swept = str(interval(spread[variant])) if len(table.rates) > 1 else "one rate"
        rows.append((variant, interval(best(table, variant)), f"{run.rate:g}", swept, interval(spike_scores(table, variant)),
                     f"{run.summary['largest_attention_logit'] or np.nan:.3g}", f"{summary['parameters']['total']:,}",
                     f"{summary['flops_per_token']:,.0f}"))
    return as_table(("variant", "best loss", "at rate", "LR sensitivity", "spike score, mean over rates", "largest logit there",
                     "parameters", "FLOPs per token"), rows)


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
    return as_table(("against", "change", "alone", "with the change", "interaction", "verdict"), rows)


def diverged(table: Table) -> str:
    lost = [run for run in table.results if run.summary["status"] == "diverged"]
    rows = [(run.variant, f"{run.rate:g}", run.seed, run.summary["step"]) for run in lost]
    return as_table(("variant", "learning rate", "seed", "step"), rows) if rows else "None."


def caption(table: Table) -> str:
    """What every figure stands on: the conditions, what members differ in, and what they share."""
    run = table.results[0]
    data = run.config.data
    steps = ", ".join(str(steps) for steps in sorted({run.config.train.steps for run in table.results}))
    return (f"{len(table.results)} runs of {steps} steps x {data.batch} x {data.sequence} bytes, compared at equal fractions of their "
            f"schedules. They differ in nothing but (checked): {'; '.join(map(axis_told, table.axes))}. "
            "By seed they see the same data in the same order, and the same probe batch; "
            f"{unequal_start(table)}. {run.conditions['devices']}, {run.conditions['dtype']}, jax {run.conditions['versions']['jax']}, "
            f"commit {str(run.conditions['commit'])[:12]}.")


def axis_told(axis: dict) -> str:
    """An axis and its points: labels that are the values of the knob it is named for, else what each label stands for."""
    if axis["knobs"] == [axis["name"]]:
        return f"{axis['name']} ({', '.join(axis['labels'])})"
    told = lambda point: ", ".join(f"{knob} = {value}" for knob, value in point.items()) or "the base"
    return f"{axis['name']} (" + "; ".join(f"{label}: {told(point)}" for label, point in axis["points"].items()) + ")"


def unequal_start(table: Table) -> str:
    """Whether weights of one name and shape start at the same values in every variant, which holds where their scales are equal."""
    configs = dict.fromkeys(run.config.model for run in table.results)
    scales: dict[tuple, set[float]] = {}
    for model in configs:
        for row in parameter_table(Transformer(model)):
            shape = row.shape if row.layers is None else row.shape[1:]
            scales.setdefault((row.role, row.local_path, shape), set()).add(init.scale(row, model))
    stray = sorted({role for (role, *_), found in scales.items() if len(found) > 1})
    same = "weights of one name and shape start equal"
    return same + (f", except {', '.join(stray)}, whose scale is the variant's own" if stray else "")


def conditions(table: Table) -> str:
    run = table.results[0]
    corpus = run.conditions["corpus"]
    rows = [
        ("corpus", f"{corpus['source']}, {corpus['files']} files, SHA-256 {corpus['sha256'][:16]}…"),
        ("hardware", run.conditions["processor"]),
        ("devices", run.conditions["devices"]),
        ("versions", ", ".join(f"{name} {version}" for name, version in run.conditions["versions"].items())),
        ("commit", run.conditions["commit"]),
        ("steps", run.config.train.steps),
        ("axes", "; ".join(f"{axis['name']}: {', '.join(axis['labels'])}" for axis in table.axes)),
    ]
    return as_table(("condition", "value"), rows)
