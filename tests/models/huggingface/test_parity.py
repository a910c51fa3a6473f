"""The comparison finds the first place where a conversion went wrong, and says so."""

import shutil
import sys

import jax
import numpy as np
import pytest

import scripts.parity
from configs.load import UserError
from models.huggingface.parity import compare
from tests.models.huggingface.folders import COMPLETE, FOLDERS, copy

LAYER = "model.layers.1."
FAULTS = {  # folder, tensor: the layer and site at which it shows first
    "out": ("llama", f"{LAYER}self_attn.o_proj.weight", 1, "attn.out"),
    "query": ("llama", f"{LAYER}self_attn.q_proj.weight", 1, "attention probabilities"),
    "gain of a QK-norm": ("qwen3", f"{LAYER}self_attn.k_norm.weight", 1, "attention probabilities"),
    "gain before the MLP": ("llama", f"{LAYER}post_attention_layernorm.weight", 1, "mlp.out"),
    "gain after attention": ("olmo2", f"{LAYER}post_attention_layernorm.weight", 1, "mlp.out"),
    "router": ("mixtral", f"{LAYER}block_sparse_moe.gate.weight", 1, "router.logits"),
    "selection": ("minimax_m2", f"{LAYER}block_sparse_moe.e_score_correction_bias", 1, "router.weights"),
    "embedding": ("llama", "model.embed_tokens.weight", 0, "resid.pre"),
    "final gain": ("llama", "model.norm.weight", None, "resid.final"),
    "head": ("llama", "lm_head.weight", None, "logits"),
}


def damaged(name: str, tensor: str, to):
    """A copy of a folder, with the complete arrays where they are at hand, in which one tensor is reversed along its first axis."""
    folder = copy(name, to, tensors=lambda tensors: tensors | {tensor: np.flip(tensors[tensor], 0)})
    if COMPLETE.is_dir():
        shutil.copyfile(COMPLETE / name / "reference.npz", folder / "reference.npz")
    return folder


def run(capsys, monkeypatch, *words) -> tuple[int, str]:
    """The status and the last line of `python -m scripts.parity`."""
    monkeypatch.setattr(sys, "argv", ["scripts.parity", *map(str, words)])
    try:
        return scripts.parity.main(), capsys.readouterr().out
    finally:
        jax.config.update("jax_enable_x64", False)


@pytest.mark.parametrize("fault", FAULTS)
def test_the_first_site_is_named(fault, tmp_path):
    """One wrong tensor shows first at the site that reads it, in its layer; without the complete arrays, in the logits."""
    name, tensor, layer, site = FAULTS[fault]
    first = next(row for row in compare(damaged(name, tensor, tmp_path)) if not row.holds)
    assert (first.layer, first.site) == ((layer, site) if COMPLETE.is_dir() else (None, "logits"))


def test_the_command_says_where_and_ends_with_status_one(tmp_path, capsys, monkeypatch):
    """A person who debugs a conversion reads the case, the site and the layer in the last line."""
    status, told = run(capsys, monkeypatch, damaged("llama", f"{LAYER}self_attn.o_proj.weight", tmp_path))
    where = "attn.out of layer 1" if COMPLETE.is_dir() else "logits of the frame"
    assert status == 1 and f"departs first in the short case at {where}" in told


@pytest.mark.parametrize(("dtype", "within"), [("float32", 5e-5), ("float64", 1e-10)])
def test_the_command_ends_with_status_zero_where_all_agree(dtype, within, capsys, monkeypatch):
    """The last line counts the arrays and tells the largest difference."""
    status, told = run(capsys, monkeypatch, FOLDERS["llama"], "--dtype", dtype)
    assert status == 0 and "all 1 arrays agree" in told and float(told.split()[-1]) < within


IDS = np.zeros((1, 4), np.int32)
REFERENCES = {
    "missing": (None, "reference.npz cannot be read"),
    "damaged": (b"PK no archive", "reference.npz cannot be read"),
    "of another model": ({"input_ids": IDS, "logits_f64": np.zeros((1, 4, 7))}, r"logits has shape \(1, 4, 7\) there"),
    "without logits": ({"input_ids": IDS}, "holds nothing to compare"),
    "without ids": ({"logits_f64": np.zeros((1, 4, 96))}, "holds nothing to compare"),
}


@pytest.mark.parametrize("case", REFERENCES)
def test_a_reference_that_is_none_is_refused(case, tmp_path):
    """Nothing agrees with nothing: a reference that is missing, damaged, empty or of another model is an error in one line."""
    held, said = REFERENCES[case]
    folder = copy("llama", tmp_path)
    (folder / "reference.npz").unlink()
    if isinstance(held, bytes):
        (folder / "reference.npz").write_bytes(held)
    elif held is not None:
        np.savez(folder / "reference.npz", **held)
    with pytest.raises(UserError, match=said):
        compare(folder)
