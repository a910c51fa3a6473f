"""Directories that a model can be taken from: runs with one checkpoint, and checkpoints of the Hugging Face format, with random values."""

import dataclasses
from pathlib import Path

import jax.numpy as jnp
import numpy as np

from configs.load import to_json
from configs.schema import Experiment
from models.huggingface import save
from models.parameters import bind
from tests.models.reference import random_values
from tests.train.small import plan_of
from train.checkpoint import Checkpoints
from train.directory import CONFIG
from train.loss import next_token_loss

LLAMA = {"model.mlp.kind": "silu", "model.mlp.gated": True}
"""What makes the small model one that a family can hold."""


def values_of(config: Experiment) -> dict[str, jnp.ndarray]:
    return random_values(plan_of(config).rows, "float32")


def a_checkpoint(folder: Path, config: Experiment, values=None) -> Path:
    """The model of a config in the Hugging Face format."""
    plan = plan_of(config)
    save(folder, config.model, bind(plan.model, values_of(config) if values is None else values))
    return folder


def a_run(folder: Path, config: Experiment, values=None) -> Path:
    """A run directory whose one checkpoint, of step 3, holds these values."""
    folder.mkdir(parents=True)
    (folder / CONFIG).write_text(to_json(config))
    state = dataclasses.replace(plan_of(config).fresh(), step=jnp.int32(3), parameters=values_of(config) if values is None else values)
    checkpoints = Checkpoints(folder / "checkpoints", config)
    checkpoints.save(3, state, None)
    checkpoints.finish()
    checkpoints.close()
    return folder


KINDS = {"Hugging Face": a_checkpoint, "run": a_run}


def by_layer(rows, values) -> dict[tuple, np.ndarray]:
    """Parameters by (path inside the layer, layer), whatever segments the layers are in."""
    return {(row.local_path, layer): np.asarray(values[row.path] if layer is None else values[row.path][index])
            for row in rows for index, layer in enumerate(row.layers or (None,))}


def loss_of(transformer, tokens) -> float:
    return float(next_token_loss(transformer(tokens[:, :-1]).logits, tokens[:, 1:]).cross_entropy)
