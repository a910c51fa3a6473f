"""The same models in float64, where a convention cannot hide behind rounding, and at every site."""

import pytest

from models.huggingface.parity import compare
from tests.models.huggingface.folders import COMPLETE, FOLDERS, keys_of, model_of, where_complete
from tests.models.huggingface.test_forward import assert_logits_agree

pytestmark = pytest.mark.usefixtures("x64")


@pytest.mark.parametrize("name", FOLDERS)
def test_logits_agree_in_float64(name):
    """In float64 logits are within 1e-10: what was left in float32 is rounding (the eps of `olmo` moves logits by no more than 6e-4)."""
    assert_logits_agree(name, "float64", 1e-10)


@where_complete
@pytest.mark.parametrize("name", FOLDERS)
def test_every_site_agrees(name):
    """Residual stream, attention probabilities, branch outputs, router logits and choices agree in every layer, read through taps."""
    found, layers = compare(COMPLETE / name, "float64"), model_of(keys_of(name)).layers
    assert all(row.holds for row in found), [row for row in found if not row.holds]
    of_layer = lambda site: {row.layer for row in found if row.site == site and row.case == "short"}
    for site in ("resid.pre", "attention probabilities", "attn.out", "mlp.out"):
        assert of_layer(site) == set(range(len(layers))), site
    assert of_layer("router.logits") == of_layer("router.weights") == {i for i, of in enumerate(layers) if of.moe.experts is not None}
    assert of_layer("resid.post") == {len(layers) - 1} and of_layer("resid.final") == of_layer("logits") == {None}
