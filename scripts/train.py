"""Train a transformer from a config and log its stability per layer."""

from train.command_line import exit_with, parse_experiment


def main() -> int:
    config, _ = parse_experiment("scripts.train", __doc__)
    from train.loop import run  # mistakes on the command line are told before JAX loads

    return run(config)


if __name__ == "__main__":
    exit_with(main)
