"""Runs the members of a sweep that are not finished: here, in other processes, or under Slurm."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import submitit

from configs.load import UserError, load, to_json
from configs.schema import Experiment
from configs.sweep import Member
from models.parameters import counts, flops_per_token, table
from models.transformer import Transformer
from train import directory
from train.ablation.sweep import progress
from train.bench import product_rate
from train.guard import EXIT
from train.loop import run
from train.programs import structure

Where = Literal["local", "slurm"]
SHARE = 0.25
"""Share of a large matrix product's rate that small models reach on a CPU: for the estimate of time, before anything has run."""


def describe(members: Sequence[Member]) -> list[dict[str, Any]]:
    """A row for each member: name, progress, parameters, FLOPs per token, estimated seconds."""
    rate, rows = SHARE * product_rate(2048, 512, 2048), []
    for member in members:
        config = member.config
        parameters = table(Transformer(config.model))
        flops = flops_per_token(config.model, parameters, config.data.sequence)
        tokens = config.train.steps * config.data.batch * config.data.sequence
        rows.append({"member": member.name, "progress": progress(member), "parameters": counts(parameters)["total"],
                     "flops_per_token": flops, "seconds": flops * tokens / rate})
    return rows


def unfinished(members: Sequence[Member]) -> list[Member]:
    """Members still to run, those that share a compiled program next to each other."""
    left = [member for member in members if progress(member) in ("new", "begun")]
    order = list(dict.fromkeys(structure(member.config) for member in left))
    return sorted(left, key=lambda member: order.index(structure(member.config)))


def write_configs(members: Sequence[Member]) -> list[Path]:
    """The members' configs as files that `scripts.train` takes: <root>/<sweep>/configs/<member>.json."""
    paths = []
    for member in members:
        path = Path(member.config.run.root) / "configs" / f"{member.name}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        directory.write(path, to_json(member.config))
        paths.append(path)
    return paths


def run_members(paths: Sequence[Path]) -> int:
    """Runs configs one after the other. A run that diverges is a result, one that fails is told at the end, one that is stopped stops the
    rest with its exit status."""
    failed: list[str] = []
    for number, path in enumerate(paths, 1):
        config: Experiment = load(str(path))
        print(f"[{number}/{len(paths)}] {config.run.name}", flush=True)
        try:
            status = run(config)
        except UserError as error:
            failed.append(f"{config.run.name}: {error}")
            continue
        if status not in (EXIT["completed"], EXIT["diverged"]):
            return status
    if failed:
        raise UserError("; ".join(failed))
    return 0


def run_sweep(members: Sequence[Member], jobs: int, where: Where, slurm: dict[str, str]) -> int:
    """Runs what is unfinished: in this process, or as `jobs` submitit jobs, local processes or Slurm's; returns the worst exit status."""
    paths = write_configs(unfinished(members))
    if not paths:
        return 0
    if jobs == 1 and where == "local":
        return run_members(paths)
    try:
        executor = submitit.AutoExecutor(folder=paths[0].parent.parent / "jobs", cluster=where)
    except RuntimeError as error:  # no Slurm here
        raise UserError(f"--where {where}: {error}") from error
    minutes = int(slurm.get("timeout_min", 24 * 60))
    executor.update_parameters(timeout_min=minutes, **{f"slurm_{key}": value for key, value in slurm.items() if key != "timeout_min"})
    chunk = -(-len(paths) // jobs)
    submitted = [executor.submit(run_members, paths[start : start + chunk]) for start in range(0, len(paths), chunk)]
    print("\n".join(f"job {job.job_id}: {job.paths.stdout}" for job in submitted), flush=True)
    return max(map(result_of, submitted))


def result_of(job: submitit.Job) -> int:
    """The exit status of a job's members. Raises UserError, with the last line of its error and its log, where it failed."""
    try:
        return job.result()
    except submitit.core.utils.FailedJobError as error:
        told = [line for line in str(error).splitlines() if "UserError: " in line or "Error: " in line]
        raise UserError(f"job {job.job_id} failed, see {job.paths.stderr}: {told[-1] if told else error}") from error
