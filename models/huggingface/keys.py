"""Rows between the keys of a config.json and our knobs, each read in both directions.

A row reads a config into {knob: value}, tells which keys it understood, and writes a model back into keys. What one layer has and another
has not goes under `LAYERS`, as a list with a dictionary for each layer.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from configs.knobs import flatten, nearest
from configs.load import UserError
from configs.model import Model

LAYERS = "layers"
Knobs = dict[str, Any]
Config = Mapping[str, Any]


@dataclass(frozen=True)
class Row:
    """`keys`: all that it understands; `read` and `write`: the two directions; `unused`: the keys change no number. A key that is not
    written keeps the reader's default."""

    keys: tuple[str, ...]
    read: Callable[[Config], Knobs]
    write: Callable[[Model], Config]
    unused: bool = False


REQUIRED = object()
"""The default of a key that must be there: the reference library takes another value in each family, or has none."""


@functools.lru_cache(maxsize=1)
def knobs_of(model: Model) -> Knobs:
    """The knobs of the frame and of the first layer: what holds in every layer, if the model can be written at all."""
    return flatten(model) | flatten(model.layers[0])


def same(key: str, *knobs: str, default: Any = REQUIRED) -> Row:
    """The key's value is that of each of the knobs."""

    def read(config: Config) -> Knobs:
        if key not in config and default is REQUIRED:
            raise UserError(f"config.json: has no {key!r}, which sets {knobs[0]}; {nearest(key, config)}")
        return dict.fromkeys(knobs, config.get(key, default))

    return Row((key,), read, lambda model: {key: knobs_of(model)[knobs[0]]})


def choice(key: str, knob: str, values: Mapping[Any, Any], default: Any = REQUIRED) -> Row:
    """The key's value stands for the knob's by a table; another value is refused."""

    def read(config: Config) -> Knobs:
        value = config.get(key, None if default is REQUIRED else default)
        if value not in values:
            raise UserError(f"config.json: {key} = {value!r} is not supported; known are {', '.join(map(repr, values))}")
        return {knob: values[value]}

    def write(model: Model) -> Config:
        back, ours = {ours: theirs for theirs, ours in reversed(values.items())}, knobs_of(model)[knob]
        return {key: back[ours]} if ours in back else {}

    return Row((key,), read, write)


def only(key: str, *values: Any) -> Row:
    """The key must have one of these values, or be absent; it is not written."""

    def read(config: Config) -> Knobs:
        if config.get(key, values[0]) not in values:
            raise UserError(f"config.json: {key} = {config[key]!r} is not supported; known are {', '.join(map(repr, values))}")
        return {}

    return Row((key,), read, lambda model: {})


def unused(*keys: str) -> Row:
    """Keys that change no number of the forward pass: of training, generation, or bookkeeping."""
    return Row(keys, lambda config: {}, lambda model: {}, unused=True)


def derived(read: Callable[[Config], Knobs], *keys: str, write: Callable[[Model], Config] = lambda model: {}) -> Row:
    """Knobs that follow from other keys by a rule."""
    return Row(keys, read, write)


def inverse_square_root(key: str, knob: str) -> Row:
    """The knob is key ** -1/2, the key a whole number."""

    def write(model: Model) -> Config:
        knobs = knobs_of(model)
        k = knobs["attention.head_width"] or model.width // knobs["attention.heads"]
        return {key: round((knobs[knob] or k**-0.5) ** -2)}

    return Row((key,), lambda config: {knob: config[key] ** -0.5}, write)


def quantization(config: Config) -> Knobs:
    if config.get("quantization_config") is not None:
        method = config["quantization_config"].get("quant_method", "no quant_method")
        raise UserError(f"config.json: has a quantization_config ({method}): quantized weights are not read; store them as bfloat16 first")
    return {}


def common(*, tied: bool) -> tuple[Row, ...]:
    """What every family has; `tied`: what an absent tie_word_embeddings means in the reference library."""
    return (
        unused("architectures", "model_type", "transformers_version", "torch_dtype", "dtype", "_name_or_path", "bos_token_id",
               "eos_token_id", "pad_token_id", "use_cache", "cache_implementation", "initializer_range", "attention_dropout",
               "hidden_dropout", "resid_pdrop", "embd_pdrop", "attn_pdrop", "output_router_logits", "router_aux_loss_coef",
               "output_attentions", "output_hidden_states", "return_dict", "auto_map", "_attn_implementation"),
        derived(quantization, "quantization_config"),
        same("vocab_size", "vocab"),
        same("tie_word_embeddings", "tied", default=tied),
    )


def read_config(rows: Sequence[Row], always: Knobs, config: Config) -> Knobs:
    """The knobs of a config.json by a family's rows. Raises UserError for a key that no row understands."""
    known = {key for row in rows for key in row.keys}
    for key, value in config.items():
        if key not in known:
            raise UserError(f"config.json: {key} = {value!r} is not known for {config['model_type']}; {nearest(key, known)}")
    knobs: Knobs = dict(always)
    for row in rows:
        for knob, value in row.read(config).items():
            if knob == LAYERS and LAYERS in knobs:
                value = [ours | theirs for ours, theirs in zip(knobs[LAYERS], value, strict=True)]
            knobs[knob] = value
    return knobs


def write_config(rows: Sequence[Row], model: Model) -> dict[str, Any]:
    """The keys of a model by a family's rows, as far as they can be written."""
    return {key: value for row in rows for key, value in row.write(model).items()}


def with_layers(knobs: Knobs) -> Knobs:
    """The knobs with what differs between layers as `pattern` (where it repeats) or `overrides`."""
    layers = knobs.pop(LAYERS, None)
    if layers is None:
        return knobs
    names = dict.fromkeys(name for layer in layers for name in layer)
    shared = {name: layers[0][name] for name in names if all(name in layer and layer[name] == layers[0][name] for layer in layers)}
    texts = [" ".join(f"{name}={spelled(value)}" for name, value in layer.items() if name not in shared) for layer in layers]
    knobs |= shared
    if not any(texts):
        return knobs
    period = next(p for p in range(1, len(texts) + 1) if all(texts[i] == texts[i % p] for i in range(len(texts))))
    if period <= len(texts) // 2:
        return knobs | {"pattern": tuple(texts[:period])}
    return knobs | {"overrides": tuple(f"{index}: {text}" for index, text in enumerate(texts) if text)}


def spelled(value: Any) -> str:
    """A value as a layer change takes it: without spaces."""
    return value if isinstance(value, str) else repr(value).replace(" ", "")
