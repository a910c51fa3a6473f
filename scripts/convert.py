"""Convert a checkpoint: from a run directory to the Hugging Face format, or from that to a run directory that training continues."""

import dataclasses
from pathlib import Path
from typing import Annotated

import tyro

from configs.load import UserError
from train.command_line import exit_with


@dataclasses.dataclass(frozen=True)
class Options:
    source: Annotated[Path, tyro.conf.Positional]
    """A run directory (its newest sound checkpoint is taken), or a directory with config.json and safetensors."""
    destination: Annotated[Path, tyro.conf.Positional]
    """A directory that does not exist yet, or is empty."""
    family: str | None = None
    """To the Hugging Face format: the model_type to write. None: the first that can express the model."""


def main() -> int:
    options = tyro.cli(Options, description=__doc__, prog="python -m scripts.convert")
    if options.destination.exists() and (not options.destination.is_dir() or any(options.destination.iterdir())):
        raise UserError(f"{options.destination} is there already and not an empty directory; choose another")
    from train.convert import to_huggingface, to_run
    from train.source import is_run

    if is_run(options.source):
        name = to_huggingface(options.source, options.destination, options.family)
        print(f"{options.source} as {name}: {options.destination}")
    else:
        to_run(options.source, options.destination)
        print(f"{options.source} as the checkpoint of step 0: {options.destination}")
    return 0


if __name__ == "__main__":
    exit_with(main)
