"""`python -m scripts.describe` tells of the model that would be trained."""

import re
import sys
from pathlib import Path

import pytest

import scripts.describe
from configs.load import load
from models.taps import SITES
from tests.train.small import plan_of
from train.command_line import parse_experiment

CASES = {
    "tiny": (),
    "rich": ("--model.depth", "6", "--model.norm.kind", "layer", "--model.norm.bias", "True", "--model.attention.qk-norm.kind", "head",
             "--model.attention.bias", "q", "out", "--model.attention.sinks", "--model.attention.kv-heads", "2", "--model.tied", "False",
             "--model.mlp.gated", "--model.norm.placement", "sandwich", "--model.overrides", "2: mlp.width=64"),
}


@pytest.fixture(params=CASES)
def described(request, capsys, monkeypatch):
    """(config, the text that describe prints, one line each)."""
    monkeypatch.setattr(sys, "argv", ["scripts.describe", "tiny", *CASES[request.param]])
    monkeypatch.setattr(scripts.describe.console, "width", 400)
    assert scripts.describe.main() == 0
    config, _ = parse_experiment("scripts.describe", "", ["tiny", *CASES[request.param]])
    return config, capsys.readouterr().out


def cells(text: str, title: str) -> list[list[str]]:
    """The rows of the table under a title."""
    rows = []
    for line in re.split(rf"^{title} *\n", text, flags=re.M)[1].splitlines()[1:]:
        if line.startswith("└"):
            return rows
        parts = [cell.strip() for cell in re.split(r"[│┃]", line)]
        if len(parts) > 2:
            rows.append(parts[1:-1])
    raise AssertionError(f"table {title!r} does not end")


def test_the_parameter_table_counts_the_model(described):
    """The numbers by role, biases and norm gains among them, are the sizes of the arrays that would be trained; so is their total."""
    config, text = described
    plan = plan_of(config)
    sizes = {path: leaf.size for path, leaf in plan.shapes().parameters.items()}
    counted = {row[0]: int(row[-1].replace(",", "")) for row in cells(text, "Parameters")[1:] if row[0]}
    by_role: dict[str, int] = {}
    for row in plan.rows:
        by_role[row.role] = by_role.get(row.role, 0) + sizes[row.path]
    assert counted == by_role | {"total": sum(sizes.values())}


def test_the_difference_from_base_is_told(described):
    """Every knob that differs from the base is listed with both values, and no other."""
    config, text = described
    rows = {row[0]: row[1:] for row in cells(text, "Changes from base")[1:]}
    assert rows["model.init.kind"] == ["auto", "fan_in"]
    assert ("model.depth" in rows) == (config.model.depth != load("base").model.depth)


def test_every_layer_is_in_one_segment(described):
    """The segments cover the layers from the first to the last."""
    config, text = described
    found = [re.match(r"(\d+)(?:\D+(\d+))?:", row[0]).groups() for row in cells(text, "Layers, as segments")[1:] if row[0]]
    spans = [(int(first), int(last or first)) for first, last in found]
    assert [layer for first, last in spans for layer in range(first, last + 1)] == list(range(config.model.depth))


def test_every_site_and_every_norm_is_told(described):
    """The table of sites is the one the taps know; each norm's contract is one line, with its epsilon and its place."""
    config, text = described
    assert [row[0] for row in cells(text, "Sites")[1:]] == list(SITES)
    norms = cells(text, "Norms")[1:]
    assert len(norms) >= 3 and all("1e-06" in row[1] for row in norms)
    assert any("layer, centred" in row[1] for row in norms) == (config.model.norm.kind == "layer")


PARITY = Path(__file__).parent.parent / "data" / "parity"


def described_here(capsys, monkeypatch, *places) -> str:
    monkeypatch.setattr(sys, "argv", ["scripts.describe", *map(str, places)])
    monkeypatch.setattr(scripts.describe.console, "width", 400)
    assert scripts.describe.main() == 0
    return capsys.readouterr().out


def test_a_checkpoint_tells_its_contract(capsys, monkeypatch):
    """Of a published checkpoint: Gemma's scale as an offset from one, its eps of 3e-3, and four norms around the branches of each layer."""
    text = described_here(capsys, monkeypatch, PARITY / "gemma2")
    norms = {row[0]: row[1:] for row in cells(text, "Norms")[1:] if row[0]}
    around = {f"{branch}_residual.norm_{slot}" for branch in ("attention", "mlp") for slot in ("in", "branch")}
    assert norms.keys() == around | {"norm"}
    assert all("sqrt(m + 0.003), scale 1+w" in contract for contract, _ in norms.values())


def test_two_checkpoints_tell_where_they_differ(capsys, monkeypatch):
    """OLMo 2 against Gemma 2: slots, scale form, QK-norm over all heads, windows of single layers; and nothing that they share."""
    text = described_here(capsys, monkeypatch, PARITY / "olmo2", PARITY / "gemma2")
    knobs = {row[0]: row[1:] for row in cells(text, "Knobs")[1:] if row[0]}
    assert knobs["norm.scale"] == ["'w'", "'1+w'", "frame, 0, 1, 2"] and knobs["attention.qk_norm.kind"][:2] == ["'whole'", "'none'"]
    assert knobs["attention.window"] == ["None", "8", "0, 2"]
    assert not {"norm.kind", "norm.eps", "depth", "vocab"} & knobs.keys()
    norms = {row[0]: row for row in cells(text, "Norms")[1:] if row[0]}
    assert "over all heads" in norms["attention.q_norm"][2] and norms["attention.q_norm"][3] == ""


def test_a_checkpoint_does_not_differ_from_itself(capsys, monkeypatch):
    text = described_here(capsys, monkeypatch, PARITY / "qwen3", PARITY / "qwen3")
    assert text.splitlines() == [f"{title}: no difference" for title in ("Knobs", "Norms", "Parameters")]
