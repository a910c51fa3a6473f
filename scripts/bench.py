"""Measure a config's speed and the cost of its telemetry; prints one JSON object."""

import json

from train.command_line import exit_with, parse_experiment


def main() -> int:
    config, _ = parse_experiment("scripts.bench", __doc__)
    from train.bench import bench  # mistakes on the command line are told before JAX loads

    print(json.dumps(bench(config), indent=1))
    return 0


if __name__ == "__main__":
    exit_with(main)
