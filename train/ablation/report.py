"""A sweep's report: report.md, and from it report.html in one file; results.csv; the figures as PNG."""

import base64
import csv
import re
from pathlib import Path

import markdown
from matplotlib import pyplot as plt

from configs.knobs import file_name, nearest
from train import directory
from train.ablation import curves, figures
from train.ablation.collect import Table, collect
from train.ablation.statistics import interval
from train.ablation.tables import (
    as_table,
    best_run,
    caption,
    conclusion,
    conditions,
    diverged,
    interaction_tables,
    sensitivities,
    variant_table,
)

STYLE = """body { font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 1.5rem auto; padding: 0 1rem; color: #1b1b1b }
h1 { font-size: 1.5rem } h2 { font-size: 1.15rem; margin-top: 2rem; overflow-wrap: anywhere }
img { max-width: min(100%, 42rem); height: auto }
table { border-collapse: collapse; display: block; overflow-x: auto; font-size: .85rem }
th, td { padding: .25rem .6rem; text-align: left; white-space: nowrap; border-bottom: 1px solid #ddd }
pre { white-space: pre-wrap; font-size: .85rem; background: #f6f6f6; padding: .8rem; border-radius: 6px }
em { color: #555; font-size: .85rem; overflow-wrap: anywhere }"""

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
    parts = [f"# {table.name}", f"```\n{table.question}\n```", "## What came out", "\n".join(f"- {line}" for line in conclusion(table))]
    drawn: dict[str, figures.Figure] = {}
    note = caption(table)

    def add(name: str, title: str, figure, text: str = "") -> None:
        if figure is not None:
            drawn[name] = figure
            parts.extend([f"## {title}", f"![{title}]({name}.png)", f"*{text + ' ' if text else ''}{note}*"])

    over = lambda count: f"Mean over {count} seeds, in the band that they span" if count > 1 else "One seed"
    paired, seeds = over(int(table.whole.sum())), over(len(table.seeds))
    shown = {variant: best_run(table, variant) for variant in table.variants}
    at_best = ("; each variant at its best learning rate: " + ", ".join(f"{variant} at {run.rate:g}" for variant, run in shown.items())
               if len(table.rates) > 1 else "")
    if len(table.rates) > 1 and table.trained:
        add("loss", "Held-out loss against learning rate", figures.over_rates(table, table.losses, "held-out loss, nats per byte"),
            f"{paired}; a cross marks a rate at which a run diverged, drawn at its loss at init.")
        spread = {variant: interval(of_seeds) for variant, of_seeds in sensitivities(table).items()}
        figure = figures.bars(spread, "mean of min(loss, loss at init) - best loss, nats per byte")
        add("sensitivity", "Learning-rate sensitivity", figure, "Wortsman et al. 2023, arXiv 2309.14322; 95 % interval over seeds.")
        logits = lambda variant: table.grid(variant, lambda run: run.largest_logit)
        figure = figures.over_rates(table, logits, "largest attention logit seen", logarithmic=True)
        add("logits", "Largest attention logit against learning rate", figure, f"{seeds}.")
    for title, (key, logarithmic) in figures.HEATMAPS.items():
        figure = figures.heatmaps(shown, title, key, logarithmic)
        add(key.replace(".", "_"), f"{title[0].upper()}{title[1:]} by layer and step", figure, f"First seed{at_best}.")
    for curve in table.curves:
        lines, title = curves.lines(table, curve), capital(curves.title(curve))
        if lines:
            name = file_name(f"{curve.key.replace('/', '_')}_over_{curve.over}_{curve.layer}_{curve.step}")
            add(name, title, figures.curve(curve, lines), f"{seeds}{at_best}.")
            parts.append(as_table(*curves.told(curve, lines)))
        else:
            parts += [f"## {title}", unlogged(table, curve.key)]
    parts += ["## Variants", variant_table(table), *interaction_tables(table)]
    parts += ["## Runs that diverged", diverged(table)]
    if table.missing:
        parts += ["## Members without a result", f"{len(table.missing)}: {', '.join(table.missing)}"]
    parts += ["## Conditions", conditions(table)]
    return "\n\n".join(parts) + "\n", drawn


def capital(text: str) -> str:
    return text[0].upper() + text[1:]


def unlogged(table: Table, key: str) -> str:
    """That a curve cannot be drawn, with the statistic that may have been meant."""
    logged = {known for line in table.results[0].lines for known in line}
    return f"No run logged {key} as such" + ("." if key in logged else f"; {nearest(key, logged)}.")


def as_html(text: str, title: str, folder: Path) -> str:
    """The markdown as one self-contained page: figures inside it, no network, and the question in lines as long as the page is wide."""
    def inline(match: re.Match) -> str:
        return f'src="data:image/png;base64,{base64.b64encode((folder / match[1]).read_bytes()).decode()}"'

    unwrapped = lambda question: re.sub(r"(?<![`\n])\n(?![`\n]|\w+:) *", " ", question[0])
    text = re.sub(r"^```\n.*?\n```$", unwrapped, text, count=1, flags=re.M | re.S)
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
