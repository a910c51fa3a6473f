"""`python -m scripts.describe` tells of the model that would be trained."""

import re
import sys

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
