"""The files of a checkpoint: what is loaded is what is there, what is saved comes back to the bit, and damage is told in one line."""

import json

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file

from configs.load import UserError
from models import parameters
from models.huggingface import load, save
from models.huggingface.canonical import canonical
from models.huggingface.checkpoint import CONFIG, INDEX, WEIGHTS
from tests.models.huggingface.folders import FOLDERS, copy, header, keys_of, store

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)


def bits(transformer) -> dict[str, tuple]:
    """The type and the bytes of each parameter."""
    values = {path: np.asarray(value) for path, value in parameters.values(transformer).items()}
    return {path: (value.dtype, value.tobytes()) for path, value in values.items()}


@pytest.mark.parametrize("shard_bytes", [10**9, 20_000], ids=["one file", "shards"])
@pytest.mark.parametrize("name", FOLDERS)
def test_what_is_saved_comes_back_to_the_bit(name, shard_bytes, tmp_path):
    """Load, save, load: the same parameters and the same canonical config, from one file or from shards with an index."""
    model, transformer = load(FOLDERS[name])
    save(tmp_path / "there", model, transformer, keys_of(name)["model_type"], shard_bytes)
    shards = sorted(path.name for path in (tmp_path / "there").glob("*.safetensors"))
    assert (shards == [WEIGHTS]) == (shard_bytes > 20_000) != (tmp_path / "there" / INDEX).exists()
    again, loaded = load(tmp_path / "there")
    assert canonical(again) == canonical(model) and bits(loaded) == bits(transformer)


def test_an_index_tells_where_each_tensor_is(tmp_path):
    """The weight map has every tensor, in the shard that holds it; total_size is that of all tensors; no shard is larger than was asked."""
    model, transformer = load(FOLDERS["llama"])
    save(tmp_path / "there", model, transformer, shard_bytes=30_000)
    index = json.loads((tmp_path / "there" / INDEX).read_text())
    held = {tensor: path.name for path in (tmp_path / "there").glob("*.safetensors") for tensor in header(path)}
    assert index["weight_map"] == held and index["metadata"]["total_size"] == sum(len(raw) for _, raw in bits(transformer).values())
    sizes = {file: sum(x.nbytes for x in load_file(tmp_path / "there" / file).values()) for file in set(held.values())}
    assert len(sizes) > 3 and max(sizes.values()) <= 30_000


def halved(tensors):
    return {name: tensor.astype(BFLOAT16) for name, tensor in tensors.items()}


def test_bfloat16_is_read_exactly_and_saved_as_it_is(tmp_path):
    """Loaded in float32 a bfloat16 file has exactly its values; loaded in bfloat16 and saved, it is the same file."""
    folder = copy("qwen3", tmp_path, tensors=halved)
    model, wide = load(folder)
    _, narrow = load(folder, "bfloat16")
    for path, value in parameters.values(wide).items():
        assert value.dtype == np.float32
        np.testing.assert_array_equal(np.asarray(value), np.asarray(parameters.values(narrow)[path]).astype(np.float32))
    save(tmp_path / "there", model, narrow, "qwen3")
    ours, theirs = (load_file(place / WEIGHTS) for place in (tmp_path / "there", folder))
    assert ours.keys() == theirs.keys() and all(ours[name].dtype == BFLOAT16 == theirs[name].dtype for name in ours)
    assert all(ours[name].tobytes() == theirs[name].tobytes() for name in ours)
    assert json.loads((tmp_path / "there" / CONFIG).read_text())["dtype"] == "bfloat16"


def test_gpt2_is_read_as_it_was_published(tmp_path):
    """Without the prefix `transformer.`, and with the buffers of the causal mask."""
    def published(tensors):
        masks = {f"h.{layer}.attn.bias": np.tril(np.ones((1, 1, 128, 128), np.float32)) for layer in range(3)}
        return {name.removeprefix("transformer."): tensor for name, tensor in tensors.items()} | masks

    assert bits(load(copy("gpt2", tmp_path, tensors=published))[1]) == bits(load(FOLDERS["gpt2"])[1])


@pytest.mark.parametrize("name", ["llama_bias_tied", "gemma2", "gpt2"])
def test_a_tied_head_that_is_stored_must_be_the_embedding(name, tmp_path):
    """Equal to the embedding it is accepted; another would have to be ignored, so it is refused."""
    embed = "transformer.wte.weight" if name == "gpt2" else "model.embed_tokens.weight"
    with_head = lambda by: lambda tensors: tensors | {"lm_head.weight": by * tensors[embed]}
    assert bits(load(copy(name, tmp_path / "same", tensors=with_head(1)))[1]) == bits(load(FOLDERS[name])[1])
    with pytest.raises(UserError, match=r"lm_head\.weight that is not the embedding, though tie_word_embeddings is true"):
        load(copy(name, tmp_path / "other", tensors=with_head(2)))


UP = "model.layers.1.mlp.up_proj.weight"
TENSORS = {
    "missing": (lambda tensors: {name: x for name, x in tensors.items() if name != UP}, f"1 tensors are missing, such as '{UP}'"),
    "extra": (lambda tensors: tensors | {"model.extra": tensors[UP]}, "tensor 'model.extra' has no place in the model"),
    "of another shape": (lambda tensors: tensors | {UP: tensors[UP][:-1]}, rf"{UP}: has shape \(71, 48\); the config asks for \(72, 48\)"),
    "turned": (lambda tensors: tensors | {UP: tensors[UP].T}, rf"{UP}: has shape \(48, 72\); the config asks for \(72, 48\)"),
    "twice": (lambda tensors: tensors | {"norm.weight": tensors["model.norm.weight"]}, "'model.norm.weight' is there twice"),
}


@pytest.mark.parametrize("case", TENSORS)
def test_tensors_that_do_not_fit_are_named(case, tmp_path):
    """A tensor that is missing, too many, there twice or of another shape is an error with its name."""
    change, said = TENSORS[case]
    with pytest.raises(UserError, match=said) as error:
        load(copy("llama", tmp_path, tensors=change))
    assert "\n" not in str(error.value)


def cut(folder):
    (folder / WEIGHTS).write_bytes((folder / WEIGHTS).read_bytes()[:-1000])


def in_shards(folder, index=None):
    """Moves the weights into two shards, the second of which is then lost."""
    tensors = load_file(folder / WEIGHTS)
    names = sorted(tensors)
    store(folder / "a.safetensors", {name: tensors[name] for name in names[::2]})
    weight_map = {name: f"{'ab'[i % 2]}.safetensors" for i, name in enumerate(names)}
    (folder / WEIGHTS).unlink()
    (folder / INDEX).write_text(index or json.dumps({"weight_map": weight_map}))


DAMAGE = {
    "truncated": (cut, f"{WEIGHTS} cannot be read"),
    "no weights": (lambda folder: (folder / WEIGHTS).unlink(), f"{WEIGHTS} cannot be read"),
    "a lost shard": (in_shards, "b.safetensors cannot be read"),
    "a damaged index": (lambda folder: in_shards(folder, "{"), f"{INDEX} cannot be read"),
    "an index of nothing": (lambda folder: in_shards(folder, "{}"), "tensors are missing"),
    "no config": (lambda folder: (folder / CONFIG).unlink(), f"{CONFIG} cannot be read"),
    "a damaged config": (lambda folder: (folder / CONFIG).write_text("{"), f"{CONFIG} cannot be read"),
    "a list for a config": (lambda folder: (folder / CONFIG).write_text("[]"), f"{CONFIG} cannot be read: it holds no JSON object"),
}


@pytest.mark.parametrize("case", DAMAGE)
def test_damage_is_told_with_the_name_of_the_file(case, tmp_path):
    """A file that is cut, lost or no JSON ends in one line that names it, not in a traceback."""
    harm, said = DAMAGE[case]
    folder = copy("llama", tmp_path)
    harm(folder)
    with pytest.raises(UserError, match=said) as error:
        load(folder)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(("dtype", "said"), [("float64", "needs jax_enable_x64"), ("float23", "perhaps you meant 'float32'")])
def test_a_precision_that_cannot_be_had_is_refused(dtype, said):
    """float64 without jax_enable_x64 would be float32 in silence."""
    with pytest.raises(UserError, match=said):
        load(FOLDERS["llama"], dtype)
