"""Describe an experiment without running it: diff from base, layers, parameters, norm contracts, sites, cost."""

import dataclasses

from rich.console import Console
from rich.table import Table

from train.command_line import exit_with, parse_experiment

console = Console(highlight=False)


def show(title: str, columns: tuple[str, ...], rows) -> None:
    table = Table(*columns, title=title, title_justify="left", title_style="bold")
    for row in rows:
        table.add_row(*map(str, row))
    console.print(table)


def main() -> int:
    config, _ = parse_experiment("scripts.describe", __doc__)
    from configs.knobs import diff, flatten
    from configs.load import fingerprint, load
    from configs.model import Layer
    from models import init
    from models.norms import contracts
    from models.parameters import counts, flops_per_token, table
    from models.taps import SITES
    from models.transformer import Transformer

    model = Transformer(config.model, operands=config.train.dtype)
    rows, common = table(model), Layer(**{knob.name: getattr(config.model, knob.name) for knob in dataclasses.fields(Layer)})

    def place(index: int, layer: int) -> str:
        changes = diff(config.model.layers[layer], common)
        return f"+{index}: " + (", ".join(f"{knob} = {value!r}" for knob, (_, value) in changes.items()) or "as below")

    def segment(of) -> tuple[str, str]:
        how = "unrolled" if of.unroll else "scanned"
        places = [place(index, of.start + index) for index in range(len(of.unit))]
        return f"{of.layers[0]} to {of.layers[-1]}: {len(of.unit)} x {of.repeats}, {how}", "\n".join(places)

    show("Changes from base", ("knob", "base", "here"), ((knob, *values) for knob, values in diff(config, load("base")).items()))
    show("Layers, as segments", ("layers", "the places of the repeating unit"), map(segment, model.stack.segments))
    show("The common layer", ("knob", "value"), flatten(common).items())
    of_role = {role: [row for row in rows if row.role == role] for role in counts(rows)}
    of_role["total"] = rows

    def shapes(of) -> str:
        found = {row.shape if row.layers is None else row.shape[1:] for row in of}
        return ", ".join(" x ".join(map(str, shape)) for shape in sorted(found))

    show("Parameters", ("role", "arrays", "shape of each", "numbers"), (
        (role, sum(len(row.layers or "1") for row in of_role[role]), "" if role == "total" else shapes(of_role[role]), f"{n:,}")
        for role, n in counts(rows).items()))
    show("Norms", ("where", "contract", "layers"), contracts(model))
    show("Sites", ("site", "axes", "meaning"), ((name, site.axes, site.meaning) for name, site in SITES.items()))
    console.print(f"init: {init.kind(config.model)}; training FLOPs per token at sequence {config.data.sequence}: "
                  f"{flops_per_token(config.model, rows, config.data.sequence):,.0f}; fingerprint {fingerprint(config)}")
    if warning := init.warning(config.model):
        console.print(f"warning: {warning}")
    return 0


if __name__ == "__main__":
    exit_with(main)
