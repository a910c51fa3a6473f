"""What is kept of a spike, and what a run does then."""

import json
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax

from configs.load import read_json
from configs.schema import Experiment
from train.checkpoint import Checkpoints
from train.detector import Detector
from train.directory import write
from train.instruments import Published
from train.log import line_of, plain
from train.programs import due

FOLDER, SKIPPED = "spikes", "train/skipped"


class Spiked(Exception):
    """A value spiked, and spikes.action says to stop."""

    def __init__(self, step: int, what: str):
        super().__init__(f"{what} at step {step}")
        self.step = step


class Watch:
    """Of a run: its detector; the panels of the last steps, on the device; and spikes/STEP, where the evidence of a spike goes."""

    def __init__(self, config: Experiment, directory: Path, checkpoints: Checkpoints, contents: Callable[[int], dict[str, Any]],
                 lines: Sequence[Mapping[str, Any]], panels: Sequence[str], report: Callable[[str], None]):
        self.config, self.folder, self.checkpoints, self.contents, self.report = config, directory / FOLDER, checkpoints, contents, report
        self.detector, self.skipped = Detector(config.spikes, lines), lines[-1].get(SKIPPED, 0) if lines else 0
        self.before = panels  # of the steps before this process, as its checkpoint holds them
        self.ring: deque[tuple[int, Published]] = deque(maxlen=(config.spikes.ring or -1) + 1)  # the step judged is one behind
        for path in self.folder.glob("*/spike.json"):
            checkpoints.policy.asked |= {read_json(path).get("checkpoint")} - {None}

    def written(self, step: int, panel: Published) -> Published:
        """Takes the panel of a step just dispatched into the ring; returns what of it goes to metrics.jsonl."""
        self.ring.append((step, panel))
        loud = due(self.config.instruments.every, step)
        return {key: value for key, value in panel.items() if loud or key.startswith("train/")}

    def panels(self, step: int) -> list[str]:
        """The lines of the last spikes.ring panels up to a step."""
        panels = jax.device_get([(at, panel) for at, panel in self.ring if at <= step])
        lines = [line_of(at, {key: plain(key, value) for key, value in panel.items()}) for at, panel in panels]
        return [*self.before, *lines][-(self.config.spikes.ring or 0):]

    def judge(self, step: int, line: Mapping[str, Any]) -> None:
        """Keeps the evidence where a line spikes, or tells of a skipped update. Raises Spiked where a spike is to end the run."""
        action = self.config.spikes.action
        found = self.detector.judge(line) if action else {}
        skipped, self.skipped = line.get(SKIPPED, 0) > self.skipped, line.get(SKIPPED, 0)
        if found or (skipped and action == "skip"):
            self.keep(step, found)
            named = (f"{key} spikes, {distance:g} deviations above the mean before it," for key, distance in found.items())
            what = ", ".join(named) or "a value is not finite or spikes"
            if action == "stop":
                raise Spiked(step, what)
            self.report(f"{what} at step {step}" + "; its update is skipped" * skipped)

    def keep(self, step: int, found: Mapping[str, float]) -> None:
        """Writes the evidence of a step: panels.jsonl, the panels up to it that the ring holds; batch.json, its windows and their text; and
        spike.json, what was found and the checkpoint before, which is not deleted from then on."""
        checkpoint = self.checkpoints.keep_before(step)
        folder = self.folder / str(step)
        folder.mkdir(parents=True, exist_ok=True)
        write(folder / "panels.jsonl", "".join(self.panels(step)))
        write(folder / "batch.json", json.dumps(self.contents(step), indent=1) + "\n")
        write(folder / "spike.json", json.dumps({"step": step, "deviations": dict(found), "checkpoint": checkpoint}, indent=1) + "\n")
