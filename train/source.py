"""What a directory holds that a model can be taken from: a run, or a checkpoint of the Hugging Face format."""

import dataclasses
from pathlib import Path

import jax

from configs.knobs import replace
from configs.load import UserError, read_json
from configs.model import Model
from configs.schema import Experiment, Mesh
from models.huggingface.checkpoint import load_config, load_parameters
from models.parameters import bind, table
from models.sharding import parameter_shardings
from models.transformer import Transformer
from train.checkpoint import Checkpoints
from train.directory import CONFIG, config_of
from train.state import make_plan


def model_in(directory: Path) -> Model:
    """The model of a run directory or a Hugging Face directory. Raises UserError where it is neither."""
    return config_of(directory).model if is_run(directory) else load_config(directory)[0]


def is_run(directory: Path) -> bool:
    """Whether a directory holds a run's config (else a model_type). Raises UserError where it has no config.json."""
    return "model_type" not in read_json(directory / CONFIG)


def transformer_in(directory: Path, mesh: jax.sharding.Mesh, report) -> Transformer:
    """The model of a directory with its values in float32, laid out on a mesh: of a run those of its newest sound checkpoint (a damaged one
    is told through `report`). Raises UserError where there is none."""
    if not is_run(directory):
        model, family = load_config(directory)
        transformer = Transformer(model)
        rows = table(transformer)
        return bind(transformer, load_parameters(directory, family, rows, "float32", parameter_shardings(rows, mesh)))
    config = elsewhere(config_of(directory), Mesh(**mesh.shape))
    plan = make_plan(config, mesh)
    if not (directory / "checkpoints").is_dir():
        raise UserError(f"{directory} holds no checkpoint")
    checkpoints = Checkpoints(directory / "checkpoints", config, read_only=True)
    found = checkpoints.restore(plan.shapes(), report)
    checkpoints.close()
    if found is None:
        raise UserError(f"{directory} holds no checkpoint")
    return bind(plan.model, found[1].parameters)


def elsewhere(config: Experiment, mesh: Mesh) -> Experiment:
    """A run's config on another mesh, its batches such that the mesh divides them: of its model and optimiser nothing changes."""
    shares = mesh.data * mesh.fsdp * mesh.expert
    return replace(config, {f"mesh.{axis}": size for axis, size in dataclasses.asdict(mesh).items()} | {
        "data.batch": shares, "train.accumulate": 1, "instruments.probe_batch": shares})
