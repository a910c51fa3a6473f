"""The reference library reads what is written here, and takes keys that are not there as they are taken here.

Runs where the extra `parity` is installed: pip install -e '.[dev,parity]'.
"""

import json
import warnings

import jax.numpy as jnp
import numpy as np
import pytest

from configs.load import UserError
from models.huggingface import load, save
from models.huggingface.canonical import differences
from models.huggingface.checkpoint import family_of
from tests.models.huggingface.exports import EXPRESSED, built
from tests.models.huggingface.folders import ABSENT, FOLDERS, LEGACY, changed, keys_of, model_of

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(scope="module")
def library():
    """(torch, transformers), or a skip."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = [pytest.importorskip(name, reason=f"{name}, of the extra `parity`, is not here") for name in ("torch", "transformers")]
    found[1].logging.set_verbosity_error()
    return found


def logits_there(library, directory, tokens: np.ndarray) -> np.ndarray:
    """What the reference library computes from a directory, in float32; it must find every tensor, and nothing else."""
    torch, transformers = library
    model, found = transformers.AutoModelForCausalLM.from_pretrained(
        directory, attn_implementation="eager", experts_implementation="eager", dtype=torch.float32, output_loading_info=True)
    assert not any(found[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys")), found
    with torch.no_grad():
        return model.eval()(torch.as_tensor(np.array(tokens))).logits.numpy()


@pytest.mark.parametrize("name", FOLDERS)
def test_a_checkpoint_saved_again_has_the_same_logits_there(library, name, tmp_path):
    """A folder that is loaded and saved, as its own family and as the first that can hold it, gives the reference's logits there."""
    reference, (model, transformer) = np.load(FOLDERS[name] / "reference.npz"), load(FOLDERS[name])
    for family in (keys_of(name)["model_type"], None):
        directory = tmp_path / (family or "first")
        save(directory, model, transformer, family)
        assert np.abs(logits_there(library, directory, reference["input_ids"]) - reference["logits_f64"]).max() < 5e-5, family
        if "long_input_ids" in reference:
            tail = logits_there(library, directory, reference["long_input_ids"])[:, -16:]
            assert np.abs(tail - reference["long_logits_f64_tail"]).max() < 5e-5, family


@pytest.mark.parametrize("case", EXPRESSED)
def test_a_model_of_ours_has_the_same_logits_there(library, case, tmp_path):
    """Models that no folder has (windows above some layer, none in Gemma, a dense first layer, heads that do not divide the width) give
    their own logits there: 5e-5 is some hundred roundings of logits near 1."""
    model, transformer = built(case)
    save(tmp_path / "there", model, transformer)
    tokens = np.random.default_rng(0).integers(0, model.vocab, (2, 24))
    assert np.abs(logits_there(library, tmp_path / "there", tokens) - np.asarray(transformer(jnp.asarray(tokens)).logits)).max() < 5e-5


@pytest.mark.parametrize(("name", "file"), [(name, "config.json") for name in FOLDERS] + [(name, "config_legacy.json") for name in LEGACY])
def test_an_absent_key_means_what_it_means_there(library, name, file):
    """Where a key is taken out, the config is refused, or it is the model that the reference library makes of it (but for the context)."""
    keys = keys_of(name, file)
    known = {key for row in family_of(keys["model_type"]).keys for key in row.keys}
    for key in keys.keys() - {"model_type"}:
        less = changed(keys, {key: ABSENT})
        try:
            ours = model_of(less)
        except UserError:
            continue
        whole = library[1].CONFIG_MAPPING[keys["model_type"]].from_dict(json.loads(json.dumps(less)))
        theirs = {key: value for key, value in json.loads(whole.to_json_string(use_diff=False)).items() if key in known}
        assert differences(ours, model_of(theirs)).keys() <= {"context"}, key
