"""Describe an experiment, a run directory or a published checkpoint without running it; of two, where they differ. With a mesh
(--mesh.fsdp 64) also what a step takes on each of so many devices: compiled ahead of time for virtual ones.

python -m scripts.describe NAME_OR_PATH [--section.knob value …]
python -m scripts.describe DIRECTORY
python -m scripts.describe DIRECTORY_OR_NAME DIRECTORY_OR_NAME
"""

import dataclasses
import itertools
import math
import os
import sys
from pathlib import Path

from rich.console import Console
from rich.table import Column, Table

from configs.knobs import diff
from configs.load import fingerprint, load
from configs.schema import Experiment
from train.command_line import exit_with, parse_experiment

console = Console(highlight=False)


def show(title: str, columns: tuple[str, ...], rows) -> None:
    table = Table(*(Column(name, overflow="fold") for name in columns), title=title, title_justify="left", title_style="bold")
    for row in rows:
        table.add_row(*map(str, row))
    console.print(table)


def main() -> int:
    places = list(itertools.takewhile(lambda word: not word.startswith("-"), sys.argv[1:]))
    experiment = len(places) < 2 and not (places and Path(places[0]).is_dir())
    config = parse_experiment("scripts.describe", __doc__)[0] if experiment else Experiment()
    devices = math.prod(dataclasses.astuple(config.mesh))
    if devices > 1:  # virtual ones, for what is compiled ahead; read by jax when it is imported
        os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={devices}"
        os.environ["JAX_PLATFORMS"] = "cpu"
    from models import init
    from models.description import compared, sheets, warnings
    from models.parameters import flops_per_token
    from models.parameters import table as parameters
    from models.transformer import Transformer
    from train.source import model_in

    model_of = lambda place: Transformer(model_in(Path(place)) if Path(place).is_dir() else load(place).model)
    if len(places) == 2:
        for sheet in compared(*map(model_of, places)):
            show(*sheet) if sheet.rows else console.print(f"{sheet.title}: no difference")
        return 0
    if not experiment:
        for sheet in sheets(model_of(places[0])):
            show(*sheet)
        return 0
    show("Changes from base", ("knob", "base", "here"), ((knob, *values) for knob, values in diff(config, load("base")).items()))
    model = Transformer(config.model, operands=config.train.dtype)
    for sheet in sheets(model):
        show(*sheet)
    flops = flops_per_token(config.model, parameters(model), config.data.sequence)
    console.print(f"init: {init.kind(config.model)}; training FLOPs per token at sequence {config.data.sequence}: {flops:,.0f}; "
                  f"fingerprint {fingerprint(config)}")
    for warning in warnings(config.model):
        console.print(f"warning: {warning}")
    if devices > 1:
        from train.ahead import ahead

        show(*ahead(config).sheet)
    return 0


if __name__ == "__main__":
    exit_with(main)
