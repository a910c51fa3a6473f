"""Spikes: values far above those before them, and the evidence that is kept of each."""

import json
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from configs.load import read_json
from configs.schema import Experiment
from configs.schema import Spikes as SpikesConfig
from train.checkpoint import Checkpoints
from train.directory import write
from train.instruments import Published
from train.log import line_of, plain
from train.step import due

FOLDER = "spikes"
SINGLE = ("train/loss", "train/grad_norm", "train/update_rms")
LARGEST_LOGIT = "attention_logit_max"
LEAST = 20
"""Values that a value is compared with at least."""


class Spiked(Exception):
    """A value spiked, and spikes.action says to stop."""

    def __init__(self, step: int, what: str):
        super().__init__(f"{what} at step {step}")
        self.step = step


def watched(line: Mapping[str, Any]) -> dict[str, float]:
    """The numbers of a line of metrics.jsonl that are judged, those that are finite: single ones, and the largest logit of all layers."""
    found = {key: float(line[key]) for key in SINGLE if key in line}
    logits = [float(x) for x in line.get(LARGEST_LOGIT, ()) if x is not None]
    if logits:
        found[LARGEST_LOGIT] = max(logits)
    return {key: value for key, value in found.items() if np.isfinite(value)}


class Detector:
    """Judges lines of metrics.jsonl, each by the lines before it alone: a resumed run that reads its lines decides as if never stopped, and
    every process decides the same."""

    def __init__(self, config: SpikesConfig, lines: Iterable[Mapping[str, Any]] = ()):
        self.config = config
        self.before: dict[str, deque[float]] = {}
        for line in lines:
            self.judge(line)

    def judge(self, line: Mapping[str, Any]) -> dict[str, float]:
        """The watched numbers that spike, with their distance from the mean of those before, in standard deviations."""
        found = {}
        for key, value in watched(line).items():
            before = self.before.setdefault(key, deque(maxlen=self.config.window))
            if len(before) >= LEAST:
                distance = (value - np.mean(before)) / max(np.std(before), 1e-12)
                if distance >= self.config.deviations:
                    found[key] = float(f"{distance:.4g}")
            before.append(value)
        return found


class Watch:
    """Of a run: its detector; the panels of the last steps, on the device; and spikes/STEP, where the evidence of a spike goes."""

    def __init__(self, config: Experiment, directory: Path, checkpoints: Checkpoints, contents: Callable[[int], dict[str, Any]],
                 lines: Iterable[Mapping[str, Any]], report: Callable[[str], None]):
        self.config, self.folder, self.checkpoints, self.contents, self.report = config, directory / FOLDER, checkpoints, contents, report
        self.detector = Detector(config.spikes, lines)
        self.ring: deque[tuple[int, Published]] = deque(maxlen=(config.spikes.ring or -1) + 1)  # the step judged is one behind
        for path in self.folder.glob("*/spike.json"):
            checkpoints.policy.asked |= {read_json(path).get("checkpoint")} - {None}

    def written(self, step: int, panel: Published) -> Published:
        """Takes the panel of a step just dispatched into the ring; returns what of it goes to metrics.jsonl."""
        self.ring.append((step, panel))
        loud = due(self.config.instruments.every, step)
        return {key: value for key, value in panel.items() if loud or key.startswith("train/")}

    def judge(self, step: int, line: Mapping[str, Any]) -> None:
        """Keeps the evidence where a line spikes. Raises Spiked where that is to end the run."""
        action = self.config.spikes.action
        found = self.detector.judge(line) if action else {}
        if found:
            self.keep(step, found)
            what = ", ".join(f"{key} spikes, {distance:g} deviations above the mean before it," for key, distance in found.items())
            if action == "stop":
                raise Spiked(step, what)
            self.report(f"{what} at step {step}")

    def keep(self, step: int, found: Mapping[str, float]) -> None:
        """Writes the evidence of a step: panels.jsonl, the panels up to it that the ring holds; batch.json, its windows and their text; and
        spike.json, what was found and the checkpoint before, which is not deleted from then on."""
        checkpoint = self.checkpoints.keep_before(step)
        folder = self.folder / str(step)
        folder.mkdir(parents=True, exist_ok=True)
        panels = jax.device_get([(at, panel) for at, panel in self.ring if at <= step][-(self.config.spikes.ring or 0):])
        lines = (line_of(at, {key: plain(key, value) for key, value in panel.items()}) for at, panel in panels)
        write(folder / "panels.jsonl", "".join(lines))
        write(folder / "batch.json", json.dumps(self.contents(step), indent=1) + "\n")
        write(folder / "spike.json", json.dumps({"step": step, "deviations": dict(found), "checkpoint": checkpoint}, indent=1) + "\n")
