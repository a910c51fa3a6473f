"""Small runs in this process, over a text of their own."""

from pathlib import Path

from configs.schema import Experiment
from tests.train.small import small, text_of
from train.loop import run

QUIET = {"train.steps": 14, "instruments.every": 3, "instruments.probe_every": None, "eval.every": None, "eval.batches": 1,
         "checkpoint.every": 4, "checkpoint.keep": 20, "run.progress": False, "run.compilation_cache": None}


def experiment(folder: Path, name: str, changes: dict[str, object] | None = None) -> Experiment:
    """The small experiment as the run `name` in a folder, which gets a text if it has none."""
    text = folder / "text.txt"
    if not text.exists():
        text.write_text(text_of(4000))
    return small(QUIET | {"data.source": str(text), "run.root": str(folder), "run.name": name} | (changes or {}))


def trained(config: Experiment, status: int = 0) -> Path:
    """The directory of a run that ended with a status."""
    assert run(config) == status
    return Path(config.run.root) / config.run.name
