"""A sweep on the disk: its plan in runs/SWEEP/sweep.json, a run directory for each member, and how far each is."""

import dataclasses
import json
from pathlib import Path
from typing import Any, Literal

from configs.knobs import diff, replace, tell
from configs.load import UserError, fingerprint, read_json
from configs.sweep import Member, Sweep
from train.directory import CONFIG, SUMMARY, config_of, write

PLAN = "sweep.json"
Progress = Literal["new", "begun", "completed", "diverged"]


def placed(sweep: Sweep, root: str) -> list[Member]:
    """The members with their run directories: <root>/<sweep>/<member>, to be continued where begun."""
    place = {"run.root": str(Path(root) / sweep.name), "run.resume": True, "run.progress": False}
    return [dataclasses.replace(member, config=replace(member.config, place | {"run.name": member.name})) for member in sweep.members]


def progress(member: Member) -> Progress:
    """How far a member is. Raises UserError where its directory holds another config than the sweep gives it."""
    directory = Path(member.config.run.root) / member.config.run.name
    if not (directory / CONFIG).exists():
        return "new"
    held = config_of(directory)
    if fingerprint(held) != fingerprint(member.config):
        told = tell(diff(member.config, held), "in the sweep")
        raise UserError(f"{directory} is not what the sweep made it: {told}\nrestore its {CONFIG}, or move the directory away")
    status = read_json(directory / SUMMARY).get("status") if (directory / SUMMARY).exists() else None
    return status if status in ("completed", "diverged") else "begun"


def write_plan(sweep: Sweep, root: str) -> None:
    """Writes sweep.json. Raises UserError, and changes nothing, where the folder holds another sweep."""
    folder = Path(root) / sweep.name
    plan = {
        "name": sweep.name,
        "question": sweep.question,
        "axes": [{"name": axis.name, "labels": [label for label, _ in axis.points], "knobs": sorted(axis.knobs),
                  "points": {label: dict(overrides) for label, overrides in axis.points}} for axis in sweep.axes],
        "curves": [dataclasses.asdict(curve) for curve in sweep.curves],
        "members": {member.name: {"labels": dict(member.labels), "fingerprint": fingerprint(member.config)} for member in sweep.members},
    }
    if (folder / PLAN).exists():
        held = read_plan(folder)
        changed = {name for name, of in held["members"].items() if plan["members"].get(name) != of}
        if changed:
            raise UserError(f"{folder} holds another sweep of this name: {len(changed)} of its members, such as {min(changed)!r}, "
                            "are not in this one or differ; give another --root")
    folder.mkdir(parents=True, exist_ok=True)
    write(folder / PLAN, json.dumps(plan, indent=1) + "\n")


def read_plan(folder: Path) -> dict[str, Any]:
    """What `write_plan` wrote. Raises UserError where it is missing, damaged, or lacks a part."""
    plan = read_json(folder / PLAN)
    lacking = [part for part in ("name", "question", "axes", "curves", "members") if part not in plan]
    if lacking:
        raise UserError(f"{folder / PLAN}: lacks {', '.join(lacking)}; move it away and run the sweep again, which keeps what is finished")
    return plan
