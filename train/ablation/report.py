"""A sweep's report: report.md, and from it report.html in one file; results.csv; the figures as PNG."""

import base64
import csv
import itertools
import re
from pathlib import Path

import markdown
import numpy as np
from matplotlib import pyplot as plt

from train import directory
from train.ablation import figures
from train.ablation.collect import RATE, SEED, Result, Table, collect
from train.ablation.statistics import compare, interaction, interval, sensitivity

STYLE = """body { font: 16px/1.5 system-ui, sans-serif; max-width: 46rem; margin: 1.5rem auto; padding: 0 1rem; color: #1b1b1b }
h1 { font-size: 1.5rem } h2 { font-size: 1.15rem; margin-top: 2rem } img { max-width: 100%; height: auto }
table { border-collapse: collapse; display: block; overflow-x: auto; font-size: .85rem } th, td { padding: .25rem .6rem; text-align: left;
border-bottom: 1px solid #ddd } pre { white-space: pre-wrap; background: #f6f6f6; padding: .8rem; border-radius: 6px }
em { color: #555; font-size: .85rem }"""

COLUMNS = ("eval_loss", "initial_eval_loss", "best_eval_loss", "train_loss", "largest_attention_logit", "spike_score", "tokens_per_second",
           "flops_per_token")


def report(folder: Path) -> list[str]:
    """Writes the report beside the runs and returns the lines of its conclusion. Raises UserError as `collect` does."""
    table = collect(folder)
    text, drawn = compose(table)
    for name, figure in drawn.items():
        figure.savefig(folder / f"{name}.png")
        plt.close(figure)
    directory.write(folder / "report.md", text)
    directory.write(folder / "report.html", as_html(text, table.name, folder))
    write_csv(table, folder / "results.csv")
    return conclusion(table)


def compose(table: Table) -> tuple[str, dict[str, figures.Figure]]:
    """The report as markdown, and its figures by name."""
    parts = [f"# {table.name}", f"```\n{table.question}\n```", "## What came out", *(f"- {line}" for line in conclusion(table))]
    drawn: dict[str, figures.Figure] = {}
    note = caption(table)

    def add(name: str, title: str, figure, text: str = "") -> None:
        if figure is not None:
            drawn[name] = figure
            parts.extend([f"## {title}", f"![{title}]({name}.png)", f"*{text + ' ' if text else ''}{note}*"])

    add("loss", "Held-out loss against learning rate", figures.over_rates(table, table.losses, "held-out loss, nats per byte"),
        "Mean over seeds; the band spans them; a cross marks a rate at which a run diverged, drawn at its loss at init.")
    if len(table.rates) > 1:
        spread = {variant: interval(of_seeds) for variant, of_seeds in sensitivities(table).items()}
        figure = figures.bars(spread, "mean of min(loss, loss at init) - best loss, nats per byte")
        add("sensitivity", "Learning-rate sensitivity", figure, "Wortsman et al. 2023, arXiv 2309.14322; 95 % interval over seeds.")
    logits = lambda variant: table.grid(variant, lambda run: run.summary["largest_attention_logit"] or np.nan)
    figure = figures.over_rates(table, logits, "largest attention logit seen", logarithmic=True)
    add("logits", "Largest attention logit against learning rate", figure)
    shown = {variant: best_run(table, variant) for variant in table.variants}
    at = "Each variant at its best learning rate, first seed: " + "; ".join(f"{name} at {run.rate:g}" for name, run in shown.items()) + "."
    for title, (key, logarithmic) in figures.HEATMAPS.items():
        figure = figures.heatmaps(shown, title, key, logarithmic)
        add(key.replace(".", "_"), f"{title[0].upper()}{title[1:]} by layer and step", figure, at)
    parts += ["## Variants", *variant_table(table)]
    for first, second in pairs_of_two(table):
        parts += [f"## {first} x {second}", *interaction_table(table, first, second)]
    parts += ["## Runs that diverged", *diverged(table)]
    if table.missing:
        parts += ["## Members without a result", f"{len(table.missing)}: {', '.join(table.missing)}"]
    parts += ["## Conditions", *conditions(table)]
    return re.sub(r"\n\n(?=\|.*\n\n?\|)|(?<=\|)\n\n(?=\|)", "\n", "\n\n".join(parts)) + "\n", drawn


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


def conclusion(table: Table) -> list[str]:
    """The variant with the least loss over the swept rates and the one with the least learning-rate sensitivity, each with the others
    against it, paired by seed."""
    lines = against_least("lowest held-out loss", {variant: best(table, variant) for variant in table.variants})
    return lines + (against_least("least learning-rate sensitivity", sensitivities(table)) if len(table.rates) > 1 else [])


def against_least(what: str, values: dict[str, np.ndarray]) -> list[str]:
    winner = min(values, key=lambda variant: values[variant].mean())
    lines = [f"{what}: **{winner}**, {interval(values[winner])} nats per byte"]
    for variant, theirs in values.items():
        if variant != winner:
            gap = compare(values[winner], theirs)
            lines.append(f"{variant}: higher by {gap}; {gap.verdict}")
    return lines


def variant_table(table: Table) -> list[str]:
    """Loss, sensitivity, parameters and FLOPs of each variant, side by side."""
    spread = sensitivities(table)
    rows = ["| variant | best loss | LR sensitivity | parameters | FLOPs per token |", "|---|---|---|---|---|"]
    for variant in table.variants:
        summary = table.of(variant)[0].summary
        swept = str(interval(spread[variant])) if len(table.rates) > 1 else "one rate"
        rows.append(f"| {variant} | {interval(best(table, variant))} | {swept} | {summary['parameters']['total']:,} | "
                    f"{summary['flops_per_token']:,.0f} |")
    return ["\n".join(rows)]


def pairs_of_two(table: Table) -> list[tuple[str, str]]:
    """Pairs of axes, beside learning rate and seed, of which each pair of labels can be crossed."""
    named = [axis["name"] for axis in table.axes if axis["name"] not in (RATE, SEED) and len(axis["labels"]) > 1]
    return list(itertools.combinations(named, 2)) if len(named) == 2 else []


def interaction_table(table: Table, first: str, second: str) -> list[str]:
    """For each label of the first axis against its first, and of the second: what both together do beyond each alone."""
    labels = {axis["name"]: axis["labels"] for axis in table.axes}
    rows = ["| against | change | alone | with the change | interaction |", "|---|---|---|---|---|"]
    loss = lambda a, b: best(table, next(run.variant for run in table.results if run.labels[first] == a and run.labels[second] == b))
    a, b = labels[first][0], labels[second][0]
    for other, change in itertools.product(labels[first][1:], labels[second][1:]):
        try:
            grid = np.asarray([[loss(x, y) for y in (b, change)] for x in (a, other)])
        except StopIteration:
            continue
        alone, together = interval(grid[0, 1] - grid[0, 0]), interval(grid[1, 1] - grid[1, 0])
        rows.append(f"| {a} to {other} | {b} to {change} | {alone} | {together} | {interaction(grid)} |")
    return ["\n".join(rows)]


def diverged(table: Table) -> list[str]:
    lost = [run for run in table.results if run.summary["status"] == "diverged"]
    rows = [f"| {run.variant} | {run.rate:g} | {run.seed} | {run.summary['step']} |" for run in lost]
    return ["\n".join(["| variant | learning rate | seed | step |", "|---|---|---|---|", *rows])] if rows else ["None."]


def caption(table: Table) -> str:
    """What every figure stands on: the conditions and what members differ in."""
    run = table.results[0]
    size = f"{run.config.train.steps} steps x {run.config.data.batch} x {run.config.data.sequence} bytes"
    axes = ", ".join(axis["name"] for axis in table.axes)
    return (f"{len(table.results)} runs of {size}; they differ in {axes} alone (checked), see the same data in the same order by seed "
            f"and the same probe batch; {run.conditions['devices']}, {run.conditions['dtype']}, jax {run.conditions['versions']['jax']}, "
            f"commit {str(run.conditions['commit'])[:12]}.")


def conditions(table: Table) -> list[str]:
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
    return ["\n".join(["| condition | value |", "|---|---|", *(f"| {key} | {value} |" for key, value in rows)])]


def as_html(text: str, title: str, folder: Path) -> str:
    """The markdown as one self-contained page: figures inside it, no network."""
    def inline(match: re.Match) -> str:
        return f'src="data:image/png;base64,{base64.b64encode((folder / match[1]).read_bytes()).decode()}"'

    body = re.sub(r'src="([^":]+\.png)"', inline, markdown.markdown(text, extensions=["tables", "fenced_code"]))
    head = f'<meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1"><title>{title}</title>'
    return f"<!doctype html>\n<html lang=\"en\"><head>{head}<style>{STYLE}</style></head><body>\n{body}\n</body></html>\n"


def write_csv(table: Table, path: Path) -> None:
    """One row per run: labels, status, step, and the numbers of its summary."""
    axes = [axis["name"] for axis in table.axes]
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow([*axes, "status", "step", "parameters", *COLUMNS])
        for run in table.results:
            summary = run.summary
            numbers = [summary["parameters"]["total"], *(summary[column] for column in COLUMNS)]
            writer.writerow([*(run.labels[axis] for axis in axes), summary["status"], summary["step"], *numbers])
