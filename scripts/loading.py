"""Measure how fast a published checkpoint loads: against reading its bytes, and how much memory it takes at most."""

import dataclasses
import json

import tyro

from train.command_line import exit_with


@dataclasses.dataclass(frozen=True)
class Options:
    megabytes: int = 500
    """Size of the example, a Llama checkpoint in float32."""


def main() -> int:
    options = tyro.cli(Options, description=__doc__, prog="python -m scripts.loading")
    from train.loading import benchmark

    print(json.dumps(benchmark(options.megabytes), indent=1))
    return 0


if __name__ == "__main__":
    exit_with(main)
