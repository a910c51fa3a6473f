"""What is written: the family, its keys and its tensors; and models that no family can hold are refused by name."""

import json

import numpy as np
import pytest

from configs.load import UserError
from models import parameters
from models.huggingface import load, save
from models.huggingface.canonical import differences
from models.huggingface.checkpoint import CONFIG, WEIGHTS, expressed
from models.huggingface.families import FAMILIES
from tests.models.huggingface.exports import EXPRESSED, GEMMA, HEAD, MIXTURE, built, of_llama
from tests.models.huggingface.folders import FOLDERS, header, keys_of


@pytest.mark.parametrize("name", FOLDERS)
def test_an_export_has_the_tensors_of_the_published_file(name, tmp_path):
    """Each family's export has exactly the tensors of its reference checkpoint: names, types and shapes."""
    model, transformer = load(FOLDERS[name])
    assert save(tmp_path / "there", model, transformer, keys_of(name)["model_type"]) == keys_of(name)["model_type"]
    assert header(tmp_path / "there" / WEIGHTS) == header(FOLDERS[name] / WEIGHTS)


def test_every_family_is_written():
    """The cases below have every family."""
    assert {family for _, family in EXPRESSED.values()} == FAMILIES.keys()


@pytest.mark.parametrize("case", EXPRESSED)
def test_a_model_of_ours_is_written_as_its_family_and_comes_back(case, tmp_path):
    """The first family that can hold the model is the expected one; load gives back the same model and the same parameters to the bit."""
    model, transformer = built(case)
    assert save(tmp_path / "there", model, transformer) == EXPRESSED[case][1]
    again, loaded = load(tmp_path / "there")
    assert differences(model, again) == {}
    by_layer = lambda of: {(row.local_path, layer): parameters.values(of)[row.path][() if layer is None else index]
                           for row in parameters.table(of) for index, layer in enumerate(row.layers or (None,))}
    ours, theirs = by_layer(transformer), by_layer(loaded)
    assert ours.keys() == theirs.keys()
    assert all(np.asarray(ours[key]).tobytes() == np.asarray(theirs[key]).tobytes() for key in ours)


REFUSED = {  # changes to a Llama: what the message names
    "none": ({"norm.placement": "none"}, "norm.placement = 'none' here, 'pre' there"),
    "post": ({"norm.placement": "post"}, "norm.placement = 'post' here, 'pre' there"),
    "deepnorm": ({"norm.placement": "deepnorm"}, "norm.placement = 'deepnorm' here, 'pre' there"),
    "layernorm_scaling": ({"norm.placement": "layernorm_scaling"}, "norm.placement = 'layernorm_scaling' here, 'pre' there"),
    "hybrid": (HEAD | {"norm.placement": "hybrid", "attention.qk_norm.values": True}, "norm.placement = 'hybrid' here, 'pre' there"),
    "mix": ({"norm.placement": "mix"}, "norm.placement = 'mix' here, 'pre' there"),
    "parallel": ({"norm.placement": "parallel"}, "norm.placement = 'parallel' here, 'pre' there"),
    "slots by hand": ({"norm.mlp_slots": ("in", "out")}, r"norm.mlp_slots = \('in', 'out'\) here, \('in',\) there \(layers 0, 1, 2\)"),
    "residual factor": ({"norm.alpha": 2.0}, r"norm.alpha = 2.0 here, 1.0 there"),
    "no final norm": ({"norm.final": False}, "norm.final = False here, True there"),
    "final norm": ({"pattern": ("norm.eps=1e-2",)}, "norm.eps = 0.003 here, 0.01 there"),
    "norm of another kind": ({"norm.kind": "dyt"}, "norm.kind = 'dyt' here, 'rms' there"),
    "eps outside the root": ({"norm.eps_position": "outside"}, "norm.eps_position = 'outside' here, 'inside' there"),
    "a bias of the norm": ({"norm.bias": True}, "norm.bias = True here, False there"),
    "sandwich with w": (GEMMA | {"norm.scale": "w"}, "norm.scale = 'w' here, '1\\+w' there"),
    "QK-norm l2": ({"attention.qk_norm.kind": "l2"}, "attention.qk_norm.kind = 'l2' here, 'head' there"),
    "QK-norm per head": ({"attention.qk_norm.kind": "head_each"}, "attention.qk_norm.kind = 'head_each' here, 'head' there"),
    "QK-norm after RoPE": (HEAD | {"attention.qk_norm.position": "after"}, "attention.qk_norm.position = 'after' here, 'before' there"),
    "eps of the QK-norm": (HEAD | {"attention.qk_norm.norm.eps": 1e-6}, "attention.qk_norm.norm.eps = 1e-06 here, 0.003 there"),
    "two windows": ({"pattern": ("attention.window=4", "attention.window=8")}, r"attention.window = 8 here, 4 there \(layers 1\)"),
    "scale of scores": ({"attention.scale": 0.3}, "attention.scale = 0.3 here"),
    "scale that is no whole number": (GEMMA | {"attention.scale": 20.5**-0.5}, "attention.scale = 0.2208"),
    "biases of keys alone": ({"attention.bias": ("k",)}, r"attention.bias = \('k',\) here"),
    "interleaved": ({"rope.layout": "interleaved"}, "rope.layout = 'interleaved' here, 'half' there"),
    "ntk": ({"rope.scaling.kind": "ntk", "rope.scaling.factor": 2.0}, "rope.scaling.kind = 'ntk' here, 'none' there"),
    "two bases": ({"overrides": ("2: rope.theta=100.0",)}, r"rope.theta = 100.0 here, 500.0 there \(layers 2\)"),
    "no positions": ({"rope.theta": None}, "rope.theta = None here"),
    "a scaled embedding": ({"embedding_scale": 2.0}, "embedding_scale = 2.0 here, None there"),
    "a narrow layer": ({"overrides": ("0: mlp.width=16",)}, r"mlp.width = 24 here, 16 there \(layers 1, 2\)"),
    "no gate": ({"mlp.gated": False}, "mlp.gated = False here, True there"),
    "shared experts": (MIXTURE | {"moe.shared": 1}, "moe.shared = 1 here, 0 there"),
    "groups of experts": (MIXTURE | {"moe.groups": 2, "moe.group_top_k": 1}, "moe.groups = 2 here, None there"),
    "experts that choose": (MIXTURE | {"moe.choice": "expert", "moe.normalise": False}, "moe.choice = 'expert' here, 'token' there"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_model_that_no_family_can_hold_is_refused(case):
    """The message names the nearest family, and the knob with both values, once for all layers that have it."""
    changes, said = REFUSED[case]
    with pytest.raises(UserError, match=f"no family can express this model; the nearest is [a-z0-9_]+: .*{said}") as error:
        expressed(of_llama(changes), None)
    assert "\n" not in str(error.value) and str(error.value).count(" here, ") <= 4


AS = {
    "window in llama": ({"attention.window": 4}, "llama", "attention.window = 4 here, None there"),
    "partial rotary in llama": ({"rope.fraction": 0.5}, "llama", "rope.fraction = 0.5 here, 1.0 there"),
    "five heads in llama": ({"attention.heads": 5, "attention.kv_heads": 1, "attention.head_width": 8}, "llama", "must divide hidden_size"),
    "llama in gpt2": ({}, "gpt2", "cannot be written as gpt2"),
    "a family that is none": ({}, "lama", "perhaps you meant 'llama'"),
}


@pytest.mark.parametrize("case", AS)
def test_a_family_that_is_asked_for_and_cannot_hold_the_model_is_refused(case):
    """Asked for by name, a family says what it lacks; none is taken in its place."""
    changes, family, said = AS[case]
    with pytest.raises(UserError, match=said):
        expressed(of_llama(changes), family)


def test_nothing_is_overwritten(tmp_path):
    """A directory that holds something is refused, and left as it is; so is a file."""
    model, transformer = load(FOLDERS["llama"])
    (tmp_path / "file").write_text("mine")
    for place in (tmp_path, tmp_path / "file"):
        with pytest.raises(UserError, match="not an empty directory"):
            save(place, model, transformer)
    assert [path.name for path in tmp_path.iterdir()] == ["file"] and (tmp_path / "file").read_text() == "mine"


def test_no_config_is_written_before_the_weights(tmp_path, monkeypatch):
    """What was not written to the end has no config.json, and the error names the file."""
    model, transformer = load(FOLDERS["llama"])
    (tmp_path / "there").mkdir()
    (tmp_path / "there").chmod(0o500)
    monkeypatch.setattr("models.huggingface.checkpoint.save_file", full_disk)
    with pytest.raises(UserError, match=f"{WEIGHTS} cannot be written: .*no space"):
        save(tmp_path / "there", model, transformer)
    assert not (tmp_path / "there" / CONFIG).exists()


def full_disk(*_, **__):
    from safetensors import SafetensorError

    raise SafetensorError("I/O error: no space left on device")


def test_no_token_of_another_tokenizer_is_named(tmp_path):
    """The reference library takes the ids of the published tokenizer where a config names none; here there is no such token."""
    model, transformer = load(FOLDERS["phi3"])
    save(tmp_path / "there", model, transformer)
    keys = json.loads((tmp_path / "there" / CONFIG).read_text())
    assert keys["pad_token_id"] is None and keys["eos_token_id"] is None and keys["bos_token_id"] is None
