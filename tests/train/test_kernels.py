"""The kernel that each layer of a run gets, and the table of kernels."""

import json
import re
import sys

import jax
import pytest

import scripts.kernels
from configs.load import fingerprint
from models.kernels import DENSE, KERNELS
from tests.train.small import plan_of, small
from train.directory import conditions_here
from train.kernel_table import Table, measure
from train.kernels import kernels

SHORT, LONG = DENSE["cpu"], DENSE["cpu"] + 1


@pytest.mark.parametrize(("sequence", "chosen"), ((SHORT, "dense"), (LONG, "chunked")))
def test_auto_is_resolved_once(sequence, chosen):
    """The plan's model names the kernel of each layer, what a layer asked for and else what the rule says; conditions.json has the list.
    The config, its fingerprint and so its run directory are the same on every platform."""
    config = small({"data.sequence": sequence, "model.depth": 3, "model.overrides": ("1: attention.kernel=pallas",)})
    plan, expected = plan_of(config), [chosen, "pallas", chosen]
    assert [layer.attention.config.kernel for segment in plan.model.stack.segments for layer in segment.unit] == expected
    assert kernels(config) == expected
    assert json.loads(json.dumps(conditions_here(config)))["kernels"] == expected
    assert plan.config == config and fingerprint(plan.config) == fingerprint(config)


def test_equal_layers_stay_one_segment():
    """Naming the kernels parts no segment: equal layers are still scanned as one."""
    assert [segment.repeats for segment in plan_of(small({"model.depth": 12})).model.stack.segments] == [12]


WORDS = ["scripts.kernels", "--lengths", "24", "--tokens", "48", "--heads", "2", "--kv-heads", "1", "--head-width", "8", "--rounds", "1"]


def test_the_table(monkeypatch, capsys):
    """`python -m scripts.kernels` prints the device, and for each length and kernel both times, the errors and what it gives; all agree."""
    monkeypatch.setattr(sys, "argv", [*WORDS, "--window", "5"])
    with jax.numpy_dtype_promotion("standard"):  # JAX's own attention mixes types
        assert scripts.kernels.main() == 0
    told, *rows = [line for line in capsys.readouterr().out.splitlines() if line]
    assert re.search(r"\(cpu\), jax \d.*2 heads of 8 over 1, window 5, bfloat16", told)
    cells = [[cell.strip() for cell in row.strip("|").split("|")] for row in rows[2:]]
    assert [row[:2] for row in cells] == [["2 x 24", kernel] for kernel in ("dense", "chunked", "library", "pallas")]
    for row in cells:
        assert all(float(milliseconds) > 0 for milliseconds in row[2:4])
        assert row[7] == "yes"
    assert [row[8] for row in cells] == ["max lse entropy sink", "max lse entropy sink", "", "max lse entropy sink"]


def test_what_is_not_run_is_told(monkeypatch, capsys):
    """Logits above the limit leave out the kernels that would hold them; a kernel that fails is told beside the others; one that
    disagrees ends the command with status 1."""
    def broken(*arrays, **options):
        raise NotImplementedError("not on this device\nand more")

    wrong = lambda *arrays, **options: (lambda out, stats: (1.1 * out, stats))(*KERNELS["chunked"](*arrays, **options))
    monkeypatch.setitem(KERNELS, "pallas", broken)
    monkeypatch.setattr(sys, "argv", [*WORDS, "--logits", "0"])
    assert scripts.kernels.main() == 0
    rows = capsys.readouterr().out.splitlines()[-4:]
    assert ["logits above 0 GiB" in row for row in rows] == [True, False, True, False]
    assert rows[3] == "| 2 x 24 | pallas | NotImplementedError: not on this device |"
    monkeypatch.setitem(KERNELS, "pallas", wrong)
    assert scripts.kernels.main() == 1
    assert [" NO " in row for row in capsys.readouterr().out.splitlines()[-4:]] == [False, False, False, True]


def test_no_length_is_begun_out_of_time():
    """Once the time is over, each row says so."""
    rows = list(measure(Table(lengths=(16, 32), kernels=("dense", "pallas"), seconds=-1.0)))
    assert [(row["length"], row["kernel"], row["failed"]) for row in rows] == [
        (length, kernel, "out of time") for length in (16, 32) for kernel in ("dense", "pallas")]
