"""Steps of a run repeated to the bit: from its newest sound checkpoint before them, with its own batches and its own programs."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from jaxtyping import Array, Int

from configs.load import UserError, read_json
from train import directory as run_directory
from train.checkpoint import Checkpoints, Report
from train.data.batches import held_out_batch, training_batches
from train.data.corpus import Corpus, read
from train.mesh import make_mesh
from train.optim import numbers
from train.programs import Programs, make_programs
from train.state import Plan, State, make_plan
from train.warm_start import start


@dataclass(frozen=True)
class Replay:
    """What repeats the steps of a run: its plan, its programs, its batch by step, its checkpoints (None: it has none) and the state before
    its first step. What is done is told through `report`."""

    plan: Plan
    programs: Programs
    batch: Callable[[int], Int[Array, "b t"]]
    checkpoints: Checkpoints | None
    fresh: Callable[[], State]
    report: Report

    def before(self, step: int) -> tuple[int, State]:
        """The newest step at or before this one that needs no repeating, and the state there. Raises UserError where the checkpoints are
        damaged, or one that is on its way to the disk cannot be written."""
        if self.checkpoints is None:
            return 0, self.fresh()
        self.checkpoints.finish()
        return self.checkpoints.restore(self.plan.shapes(), self.report, at_most=step) or (0, self.fresh())

    def advance(self, state: State, first: int, last: int) -> State:
        """The state after the steps from `first` up to `last`, which is not taken; the one before is donated."""
        for step in range(first, last):
            state, _ = self.programs.training(step)(state, self.batch(step))
        return state

    def at(self, step: int) -> State:
        """The state after `step` updates."""
        saved, state = self.before(step)
        self.report(f"repeats {step - saved} steps from step {saved}")
        return self.advance(state, saved, step)


def open_run(directory: Path, report: Report) -> tuple[Replay, Corpus]:
    """A run directory, read alone, and its text. Raises UserError where it holds none, or where its text is no longer the one it saw."""
    config = run_directory.config_of(directory)
    plan, corpus = make_plan(config, make_mesh(config.mesh)), read(config.data.source)
    check_text(directory, corpus)
    probe_batch = held_out_batch(corpus, config.data, plan.mesh, config.instruments.probe_batch)
    programs, folder = make_programs(plan), directory / "checkpoints"
    fresh = lambda: start(plan, programs.fresh(config.train.seed, numbers(config.optim)), probe_batch, report)
    checkpoints = Checkpoints(folder, config, read_only=True) if folder.is_dir() else None
    batch = training_batches(corpus, config.data, config.train.seed, plan.mesh)
    return Replay(plan, programs, batch, checkpoints, fresh, report), corpus


def check_text(directory: Path, corpus: Corpus) -> None:
    """Raises UserError where conditions.json tells of another text than this one."""
    path = directory / run_directory.CONDITIONS
    seen = read_json(path).get("corpus", {}) if path.exists() else {}
    if seen.get("sha256", corpus.sha256) != corpus.sha256:
        raise UserError(f"data.source = {corpus.source!r}: is not the text that {directory} was trained on "
                        f"(SHA-256 {corpus.sha256[:12]}… here, {seen['sha256'][:12]}… there)")
