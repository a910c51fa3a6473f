"""Which attention kernel each layer of a run gets: `auto` is resolved once, here, from the sequence and the platform."""

import jax

from configs.knobs import replace
from configs.model import Model
from configs.schema import Experiment
from models.kernels import choose


def kernels(config: Experiment) -> list[str]:
    """The row of KERNELS in force in each layer, on the devices here."""
    return [choose(layer.attention.kernel, config.data.sequence, jax.default_backend()) for layer in config.model.layers]


def resolved(config: Experiment) -> Model:
    """The model with the kernel of each layer said outright; the config itself, and so its fingerprint, keeps the word of its user."""
    said = tuple(f"{layer}: attention.kernel={kernel}" for layer, kernel in enumerate(kernels(config)))
    return replace(config.model, {"overrides": (*config.model.overrides, *said)})
