"""Run a sweep of configs/ablations: every combination of its axes, each in its own run directory, continued where it stopped."""

import dataclasses
import shlex
from typing import Annotated, Literal

import tyro
from rich.console import Console
from rich.table import Column, Table

from configs.load import UserError, load_sweep
from train.command_line import exit_with


@dataclasses.dataclass(frozen=True)
class Options:
    sweep: Annotated[str, tyro.conf.Positional]
    """A sweep of configs/ablations, or the path of a .py file with base() and AXES."""
    root: str = "runs"
    """Folder of the sweep's folder."""
    jobs: int = 1
    """Processes or Slurm jobs among which the members are divided; 1 and local: this process."""
    where: Literal["local", "slurm"] = "local"
    """Where jobs run."""
    slurm: tuple[str, ...] = ()
    """Slurm's parameters, such as partition=gpu gpus_per_node=8 timeout_min=600."""
    dry_run: bool = False
    """Show the members and stop."""
    print_commands: bool = False
    """Print a command for each unfinished member, for any other scheduler, and stop."""


def main() -> int:
    options = tyro.cli(Options, description=__doc__, prog="python -m scripts.ablate")
    sweep = load_sweep(options.sweep)
    if options.jobs < 1 or not all("=" in word for word in options.slurm):
        raise UserError("--jobs must be at least 1, and --slurm takes words of the form name=value")
    from train.ablation.run import describe, run_sweep, unfinished, write_configs
    from train.ablation.sweep import placed, write_plan

    members = placed(sweep, options.root)
    rows = describe(members)
    table = Table(Column("member", overflow="fold"), "progress", "parameters", "FLOPs/token", "about", title=sweep.name)
    for row in rows:
        numbers = f"{row['parameters']:,}", f"{row['flops_per_token']:,.0f}", f"{row['seconds']:,.0f} s"
        table.add_row(row["member"], row["progress"], *numbers)
    left = sum(row["seconds"] for row in rows if row["progress"] in ("new", "begun"))
    Console(highlight=False, stderr=options.print_commands).print(table, f"about {left / 60:,.1f} minutes are left on this machine")
    if options.dry_run:
        return 0
    write_plan(sweep, options.root)
    if options.print_commands:
        for path in write_configs(unfinished(members)):
            print(shlex.join(["python", "-m", "scripts.train", str(path)]))
        return 0
    return run_sweep(members, options.jobs, options.where, dict(word.split("=", 1) for word in options.slurm))


if __name__ == "__main__":
    exit_with(main)
