"""Repeat a step of a run to the bit and show its panel in full; or go on without the batches that come there, as a run of its own."""

import dataclasses
from pathlib import Path
from typing import Annotated

import tyro
from rich.console import Console
from rich.table import Table

from configs.load import UserError
from train.command_line import exit_with


@dataclasses.dataclass(frozen=True)
class Options:
    run: Annotated[Path, tyro.conf.Positional]
    """A run directory."""
    step: int
    """The step, as its line of metrics.jsonl counts it."""
    batches_from: int | None = None
    """Feed the batch of this step to the state of --step: is it the data, or the state?"""
    skip: int | None = None
    """Go on from the checkpoint before --step without so many batches from there on, in a run directory of its own."""


def main() -> int:
    options = tyro.cli(Options, description=__doc__, prog="python -m scripts.replay")
    if options.skip is not None and (options.skip < 1 or options.batches_from is not None):
        raise UserError(f"--skip {options.skip}: must be positive, and stand without --batches-from")
    from train.directory import config_of
    from train.loop import keep_compiled, run
    from train.revisit import revisit, sheets, without

    keep_compiled(config_of(options.run).run.compilation_cache)
    console = Console(highlight=False, soft_wrap=True, markup=False)
    if options.skip is not None:
        return run(without(options.run, options.step, options.skip, console.print))
    found = revisit(options.run, options.step, options.batches_from, console.print)
    for sheet in sheets(found.panel, found.depth):
        table = Table(*sheet.columns, title=sheet.title, title_justify="left")
        for row in sheet.rows:
            table.add_row(*row)
        console.print(table, crop=False, no_wrap=True)
    console.print(f"batch of step {found.contents['step']}: windows {', '.join(map(str, found.contents['windows']))}")
    for place, text in zip(found.contents["windows"], found.contents["text"], strict=True):
        console.print(f"{place:>8} {text!r}")
    console.print(found.verdict)
    return 1 if found.same is False else 0


if __name__ == "__main__":
    exit_with(main)
