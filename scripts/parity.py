"""Check a checkpoint directory against its reference.npz: the first layer and site where it departs, and how far every site is off."""

import dataclasses
from pathlib import Path
from typing import Annotated, Literal

import jax
import tyro
from rich.console import Console
from rich.table import Table

from train.command_line import exit_with


@dataclasses.dataclass(frozen=True)
class Options:
    directory: Annotated[Path, tyro.conf.Positional]
    """A directory with config.json, safetensors and reference.npz."""
    dtype: Literal["float32", "float64"] = "float32"
    """Precision of parameters and computation."""


def main() -> int:
    options = tyro.cli(Options, description=__doc__, prog="python -m scripts.parity")
    jax.config.update("jax_enable_x64", options.dtype == "float64")
    from models.huggingface.parity import compare

    found = compare(options.directory, options.dtype)
    table = Table("case", "layer", "site", "largest difference", "")
    for row in found:
        table.add_row(row.case, "" if row.layer is None else str(row.layer), row.site, f"{row.largest:.2e}", "" if row.holds else "departs")
    console = Console(highlight=False)
    console.print(table)
    first = next((row for row in found if not row.holds), None)
    if first is None:
        console.print(f"all {len(found)} arrays agree; the largest difference is {max(row.largest for row in found):.2e}")
        return 0
    where = "the frame" if first.layer is None else f"layer {first.layer}"
    console.print(f"departs first in the {first.case} case at {first.site} of {where}, by {first.largest:.2e}")
    return 1


if __name__ == "__main__":
    exit_with(main)
