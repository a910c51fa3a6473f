"""Writes what steps measured, one step behind the device."""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from configs.schema import Experiment
from train.clock import Clock
from train.log import Log

FINITE = ("train/loss", "train/grad_norm", "eval/loss")
"""A value of these that is not finite ends the run, unless train.on_nonfinite says otherwise."""


class Diverged(Exception):
    """A loss, the gradient or a parameter is not finite."""

    def __init__(self, step: int, what: str):
        super().__init__(f"{what} at step {step}; the panels before it are in metrics.jsonl")
        self.step = step


class Recorder:
    """As a context: a progress bar, the log, and the clock of the steps. `push` hands over the metrics of the step just dispatched and
    writes those of the step before it, so that the device never waits for the host; `judge` then gets the step and its line."""

    def __init__(self, log: Log, clock: Clock, config: Experiment, done: int, judge: Callable[[int, dict[str, Any]], None]):
        self.log, self.clock, self.judge = log, clock, judge
        self.stops = config.train.on_nonfinite == "stop"
        columns = (TextColumn("step {task.completed:>5}/{task.total}"), BarColumn(), TextColumn("loss {task.fields[loss]:.4f}"),
                   TextColumn("{task.fields[rate]:,.0f} tokens/s"), TimeRemainingColumn())
        self.bar = Progress(*columns, disable=not config.run.progress)
        self.task = self.bar.add_task("", total=config.train.steps, completed=done, loss=float("nan"), rate=0.0)
        self.pending: tuple[int, dict[str, Any], bool] | None = None

    def __enter__(self) -> "Recorder":
        self.bar.start()
        self.clock.restart()
        return self

    def __exit__(self, *_) -> None:
        self.bar.stop()
        self.log.close()

    def push(self, step: int, values: dict[str, Any], timed: bool) -> None:
        """Takes the metrics of a step, on the device; `timed` unless something else than the step ran with it."""
        self.settle()
        self.pending = step, values, timed

    def settle(self) -> None:
        """Waits for the step handed over last and writes its metrics. Raises Diverged where they are not finite and must be."""
        if self.pending is None:
            return
        (step, values, timed), self.pending = self.pending, None
        values = jax.device_get(values)
        line = self.log.write(step, values)
        seconds = self.clock.step()
        if not timed:
            self.clock.restart()
        elif seconds:
            self.log.clock(step, {"clock/step_seconds": seconds, "clock/tokens_per_second": self.clock.tokens_per_step / seconds})
        if "train/loss" in values:
            self.bar.update(self.task, completed=step + 1, loss=float(values["train/loss"]), rate=self.clock.tokens_per_second() or 0.0)
        for key in FINITE:
            if self.stops and key in values and not np.isfinite(values[key]):
                raise Diverged(step, f"{key} is {line[key]}")
        self.judge(step, line)
