"""Between run directories and checkpoints of the Hugging Face format."""

import dataclasses
from pathlib import Path

from configs.knobs import replace
from configs.load import UserError
from configs.schema import Experiment, Mesh
from models.huggingface import save
from models.huggingface.checkpoint import load_config
from train import directory
from train.checkpoint import Checkpoints
from train.mesh import make_mesh
from train.source import transformer_in
from train.state import make_plan
from train.warm_start import start


def to_huggingface(source: Path, destination: Path, family: str | None) -> str:
    """Writes the newest sound checkpoint of a run in the Hugging Face format and returns its model_type."""
    transformer = transformer_in(source, make_mesh(Mesh()), print)
    return save(destination, transformer.config, transformer, family)


def to_run(source: Path, destination: Path) -> None:
    """Makes a run directory with a checkpoint of step 0 from a checkpoint of the Hugging Face format; its other knobs are the defaults.

    Raises UserError where the model cannot be trained here (a vocabulary below 256).
    """
    model, _ = load_config(source)
    try:
        sequence = min(Experiment().data.sequence, model.context or Experiment().data.sequence)
        config = dataclasses.replace(replace(Experiment(), {
            "init.from": str(source.absolute()), "run.root": str(destination.parent), "run.name": destination.name,
            "data.sequence": sequence}), model=model)
    except ValueError as error:
        raise UserError(f"{source}: {error}") from error
    plan = make_plan(config, make_mesh(config.mesh))
    state = start(plan, plan.fresh(), None, print)
    claimed, _ = directory.claim(config)
    directory.describe(claimed, directory.conditions_here(config), None)
    checkpoints = Checkpoints(claimed / "checkpoints", config)
    checkpoints.save(0, state, None)
    checkpoints.finish()
    checkpoints.close()
