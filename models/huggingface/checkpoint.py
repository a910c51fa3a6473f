"""Load and save checkpoints of the Hugging Face format: a config.json, and safetensors in one file or in shards with an index."""

import json
import os
import re
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from configs.knobs import nearest, replace
from configs.load import UserError, first_line, read_json
from configs.model import DEEPEST, Model
from models import parameters
from models.huggingface.canonical import differences, shortened, told
from models.huggingface.families import FAMILIES, Family
from models.huggingface.keys import read_config, with_layers, write_config
from models.huggingface.weights import Weight, fill, lay_out, outputs
from models.parameters import Row, bind, table
from models.transformer import Transformer

CORES = os.cpu_count() or 1
CONFIG, WEIGHTS, INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"
UNNAMED = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))
"""The reference library takes ids of the published model's tokenizer where these are absent."""
DTYPES = {"float32": np.dtype(np.float32), "float64": np.dtype(np.float64), "bfloat16": np.dtype(ml_dtypes.bfloat16)}


def load(directory: str | Path, dtype: str = "float32") -> tuple[Model, Transformer]:
    """The model in a directory: its config and a transformer that holds its values in `dtype`.

    Raises UserError for a family, a key, a value or a tensor that is not known, missing, or of another shape than the config asks for.
    """
    directory = Path(directory)
    model, family = load_config(directory)
    transformer = Transformer(model)
    return model, bind(transformer, load_parameters(directory, family, table(transformer), dtype))


def load_config(directory: Path) -> tuple[Model, Family]:
    """The config of a directory and its family."""
    config = read_json(directory / CONFIG)
    name = config.get("model_type")
    return from_keys(family_of(name, f"{directory / CONFIG}: "), config), FAMILIES[name]


def family_of(name: Any, where: str = "") -> Family:
    """The family of a model_type. Raises UserError, with the nearest, for one that is not known."""
    if not isinstance(name, str) or name not in FAMILIES:
        raise UserError(f"{where}model_type {name!r} is not known; {nearest(str(name), FAMILIES)}")
    return FAMILIES[name]


def from_keys(family: Family, config: dict[str, Any]) -> Model:
    """The model that a family's config.json describes. Raises UserError for keys that are missing, unknown, or have a value without meaning
    here."""
    for key in ("num_hidden_layers", "n_layer"):
        if isinstance(config.get(key), int) and config[key] > DEEPEST:
            raise UserError(f"config.json: {key} = {config[key]}: must be at most {DEEPEST}")
    try:
        return replace(Model(), with_layers(read_config(family.keys, family.always, config)))
    except KeyError as error:
        raise UserError(f"config.json: has no {error.args[0]!r}, which {config['model_type']} needs") from error
    except (ValueError, TypeError, ArithmeticError, AttributeError, LookupError, RecursionError) as error:
        raise UserError(f"config.json: {first_line(error)}") from error


def load_parameters(directory: Path, family: Family, rows: list[Row], dtype: str, shardings=None) -> dict[str, jax.Array]:
    """The parameters in a directory, by path, laid out as `shardings` says. Each tensor is read once, in the order of its file, and each
    parameter moved once."""
    if dtype not in DTYPES:
        raise UserError(f"dtype {dtype!r} is not supported; {nearest(dtype, DTYPES)}")
    if dtype == "float64" and not jax.config.jax_enable_x64:
        raise UserError("dtype float64 needs jax_enable_x64")
    places = tensors_of(family, rows)
    try:
        host = {row.path: np.empty(row.shape, DTYPES[dtype]) for row in rows}
    except (MemoryError, ValueError) as error:
        raise UserError(f"{directory}: the model that {CONFIG} describes does not fit into memory: {first_line(error)}") from error
    missing, tied = set(places), {}

    def put(name: str, tensor: np.ndarray) -> None:
        weight, parts = places[name]
        sizes = [outputs(row, weight.form) for row, _ in parts]
        try:
            divided = list(weight.parts(tensor, sizes))
        except (ValueError, IndexError) as error:
            raise UserError(f"{name}: has shape {tensor.shape}, which cannot be divided into its {len(parts)} parts") from error
        for (row, at), part in zip(parts, divided, strict=True):
            fill(host[row.path][at], part, weight.form, row.fan, name)

    with ThreadPoolExecutor(CORES) as pool:  # one tensor is read while those before it are laid out
        under_way: deque[Future] = deque()
        for name, tensor in tensors(directory):
            name = spelled(name, family, places)
            if name in places:
                if name not in missing:
                    raise UserError(f"{directory}: tensor {name!r} is there twice")
                under_way.append(pool.submit(put, name, tensor))
                missing.discard(name)
            elif name == "lm_head.weight":
                tied[name] = tensor
            elif not any(re.fullmatch(pattern, name) for pattern in family.buffers):
                raise UserError(f"{directory}: tensor {name!r} has no place in the model that {CONFIG} describes; {nearest(name, places)}")
            while len(under_way) > CORES:
                under_way.popleft().result()
        for done in under_way:
            done.result()
    if missing:
        raise UserError(f"{directory}: {len(missing)} tensors are missing, such as {min(missing)!r}")
    if any(not np.array_equal(tensor.astype(DTYPES[dtype]), host["embed"]) for tensor in tied.values()):
        raise UserError(f"{directory}: has an lm_head.weight that is not the embedding, though tie_word_embeddings is true")
    place = lambda path: jax.device_put(host.pop(path), None if shardings is None else shardings[path])
    return {path: place(path) for path in list(host)}


def tensors(directory: Path) -> Iterator[tuple[str, np.ndarray]]:
    """Each tensor of a directory, in the order of its file. Raises UserError where a file is missing or damaged."""
    for name in shards_of(directory) if (directory / INDEX).exists() else [WEIGHTS]:
        try:
            with safe_open(directory / name, framework="np") as file:
                for key in file.offset_keys():
                    yield key, file.get_tensor(key)
        except (OSError, SafetensorError, ValueError, TypeError, LookupError, AttributeError) as error:  # the last four: of strange types
            raise UserError(f"{directory / name} cannot be read: {first_line(error)}") from error


def shards_of(directory: Path) -> list[str]:
    """The files that the index of a directory names. Raises UserError for one that does not lie in it."""
    weight_map = read_json(directory / INDEX).get("weight_map", {})
    if not isinstance(weight_map, dict):
        raise UserError(f"{directory / INDEX} cannot be read: its weight_map is no JSON object")
    for name in weight_map.values():
        if not isinstance(name, str) or not name.endswith(".safetensors") or Path(name).name != name or "\0" in name:
            raise UserError(f"{directory / INDEX}: {name!r} is not the name of a .safetensors file beside it")
    return sorted(set(weight_map.values()))


def spelled(name: str, family: Family, places: dict) -> str:
    """A tensor's name with the prefix that some files leave out."""
    return family.optional + name if name not in places and family.optional + name in places else name


def tensors_of(family: Family, rows: list[Row]) -> dict[str, tuple[Weight, list[tuple[Row, tuple[int, ...]]]]]:
    """Each tensor that the parameters are stored as: its row of the family's table, and for each path the parameter and where in it.

    Raises UserError for a parameter that the family has no tensor for.
    """
    held = {(row.local_path, layer): (row, at) for row in rows for layer, at in row.places}
    places, left = {}, set(held)
    for weight in family.weights:
        for layer in sorted({layer for _, layer in held if layer is not None}) if "{layer}" in weight.name else (None,):
            keys = [(path, layer) for path in weight.paths]
            if not all(key in held for key in keys):
                continue
            left.difference_update(keys)
            parts = [held[key] for key in keys]
            for expert in range(parts[0][0].shape[1]) if "{expert}" in weight.name else (None,):
                of_expert = () if expert is None else (expert,)
                places[weight.name.format(layer=layer, expert=expert)] = weight, [(row, at + of_expert) for row, at in parts]
    if left:
        path, layer = min(left, key=str)
        raise UserError(f"{family.architecture} has no tensor for {path}{'' if layer is None else f' of layer {layer}'}")
    return places


def save(directory: str | Path, model: Model, transformer: Transformer, family: str | None = None, shard_bytes: int = 5 * 10**9) -> str:
    """Writes a checkpoint that the reference library loads, and returns its model_type: `family`, or the first that can hold the model.

    The config is written last: a directory without one was not written to the end. Raises UserError where the directory holds something,
    where a file cannot be written, and where no family can express the model, with the nearest one and what it lacks.
    """
    directory, rows = Path(directory), table(transformer)
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise UserError(f"{directory} is there already and not an empty directory; choose another")
    name, keys = expressed(model, family)
    places, values = tensors_of(FAMILIES[name], rows), parameters.values(transformer)
    host = {path: np.asarray(jax.device_get(value)) for path, value in values.items()}
    shards, size = [{}], 0
    for tensor, (weight, parts) in places.items():
        whole = np.ascontiguousarray(weight.joined([lay_out(host[row.path][at], weight.form, row.fan) for row, at in parts]))
        if size + whole.nbytes > shard_bytes and shards[-1]:
            shards, size = [*shards, {}], 0
        shards[-1][tensor], size = whole, size + whole.nbytes
    keys["dtype"] = str(host["embed"].dtype)
    directory.mkdir(parents=True, exist_ok=True)
    files = [WEIGHTS] if len(shards) == 1 else [f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors" for i in range(len(shards))]
    for file, shard in zip(files, shards, strict=True):
        try:
            save_file(shard, directory / file, metadata={"format": "pt"})
        except SafetensorError as error:
            raise UserError(f"{directory / file} cannot be written: {error}") from error
    if len(shards) > 1:
        weight_map = {tensor: file for file, shard in zip(files, shards, strict=True) for tensor in shard}
        index = {"metadata": {"total_size": sum(whole.nbytes for shard in shards for whole in shard.values())}, "weight_map": weight_map}
        (directory / INDEX).write_text(json.dumps(index, indent=1) + "\n")
    (directory / CONFIG).write_text(json.dumps(keys, indent=1) + "\n")
    return name


def expressed(model: Model, family: str | None) -> tuple[str, dict[str, Any]]:
    """The family and the keys that describe the model: keys that read back as the same model."""
    lacking: dict[str, list[str]] = {}
    for name in FAMILIES if family is None else (family,):
        of = family_of(name)
        keys = {"model_type": name, "architectures": [of.architecture], **UNNAMED, **write_config(of.keys, model)}
        try:
            lacking[name] = told(differences(model, from_keys(of, keys)))
        except UserError as error:
            if family is not None:
                raise UserError(f"this model cannot be written as {name}: {error}") from error
            continue
        if not lacking[name]:
            return name, keys
    rows = table(Transformer(model))
    closest = min(lacking, key=lambda name: (not holds(FAMILIES[name], rows), len(lacking[name])))
    raise UserError(f"no family can express this model; the nearest is {closest}: {shortened(lacking[closest])}" if family is None else
                    f"this model cannot be written as {closest}: {shortened(lacking[closest])}")


def holds(family: Family, rows: list[Row]) -> bool:
    """Whether a family has a tensor for every parameter."""
    try:
        return bool(tensors_of(family, rows))
    except UserError:
        return False
