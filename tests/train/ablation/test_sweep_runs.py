"""A tiny sweep from its file to its report, and what it says where something is amiss."""

import base64
import csv
import itertools
import json
import math
import re
import shutil

import jax
import pytest

from configs.load import read_json
from tests.train.ablation.sweeps import ablate_here, edit, final, refused, report_here, summary, tree, write_sweep, write_text
from tests.train.processes import lines_of
from train.ablation import curves
from train.ablation.collect import collect
from train.programs import programs_of

NAME = "tiny_sweep"
MEMBERS = [f"placement={placement},learning_rate={rate},seed={seed}"
           for placement, rate, seed in itertools.product(("pre", "post"), ("0.01", "0.1"), (0, 1))]
CURVES = """Curve("probe.grad_norm", over="layer", step="first"), Curve("eval/loss", over="step"), Curve("train/los", over="step"),
    Curve("activation_rms.resid.post", over="placement", layer="last"),"""
FIGURES = {"loss", "sensitivity", "logits", "activation_rms_resid_post", "grad_norm", "attention_logit_max", "attention_entropy",
           "probe.grad_norm_over_layer_mean_first", "eval_loss_over_step_mean_last", "activation_rms.resid.post_over_placement_last_last"}


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return write_text(tmp_path_factory.mktemp("source"))


@pytest.fixture(scope="module")
def swept(source, tmp_path_factory):
    """(sweep file, root, how it ended, how many programs were compiled)."""
    folder = tmp_path_factory.mktemp("sweep")
    file = write_sweep(folder, source, curves=CURVES)
    programs_of.cache_clear()
    done = ablate_here(file, "--root", folder / "runs")
    return file, folder / "runs", done, programs_of.cache_info().misses


@pytest.fixture
def copy(swept, tmp_path):
    """(sweep file, root) of a copy of the finished sweep, to be spoilt."""
    shutil.copytree(swept[1], tmp_path / "runs")
    return swept[0], tmp_path / "runs"


@pytest.fixture(scope="module")
def reported(swept, tmp_path_factory):
    """(folder, how the report ended)."""
    root = tmp_path_factory.mktemp("report") / "runs"
    shutil.copytree(swept[1], root)
    return root / NAME, report_here(root / NAME)


def test_every_member_is_run_to_its_end(swept):
    """Each combination has a run directory with a completed summary and a line for every step; the sweep ends with status 0."""
    _, root, done, _ = swept
    assert done.status == 0, done.err
    for name in MEMBERS:
        assert summary(root / NAME / name)["status"] == "completed"
        assert [line["step"] for line in lines_of(root / NAME / name)] == list(range(7))
    assert {path.parent.name for path in (root / NAME).glob("*/summary.json")} == set(MEMBERS)


def test_each_structure_is_compiled_once(swept):
    """Eight members of two structures compile twice: rates and seeds share."""
    assert swept[3] == 2


def test_members_are_the_runs_they_are_called(swept):
    """Rate and seed reach the run: pairs of one seed start from one loss at init, seeds and rates end at losses of their own."""
    losses = {name: final(swept[1] / NAME / name) for name in MEMBERS}
    assert len({end for end, _ in losses.values()}) == len(MEMBERS)
    for placement, seed in itertools.product(("pre", "post"), (0, 1)):
        assert len({losses[f"placement={placement},learning_rate={rate},seed={seed}"][1] for rate in ("0.01", "0.1")}) == 1


def test_a_finished_sweep_runs_nothing(copy):
    """Asked again, the sweep shows every member completed, and no file of any member changes."""
    file, root = copy
    before = tree(root)
    done = ablate_here(file, "--root", root)
    after = tree(root)
    assert done.status == 0 and done.out.count("completed") == len(MEMBERS)
    assert {path: of for path, of in after.items() if not path.endswith("sweep.json")} == {
        path: of for path, of in before.items() if not path.endswith("sweep.json")}
    assert all(after[path][0] == before[path][0] for path in after)


def test_a_dry_run_writes_nothing(swept, tmp_path):
    """A dry run shows a row for each member and leaves no folder behind."""
    done = ablate_here(swept[0], "--root", tmp_path / "runs", "--dry-run")
    assert done.status == 0 and done.out.count("seed=") == len(MEMBERS) and not list(tmp_path.iterdir())


def test_the_report_is_whole(reported):
    """The report ends with status 0 and leaves two texts, a table, and a PNG for each figure, under each the difference of the configs,
    what runs share, and the conditions."""
    folder, done = reported
    assert done.status == 0, done.err
    assert {path.stem for path in folder.glob("*.png")} == FIGURES
    assert all(path.read_bytes().startswith(b"\x89PNG\r\n\x1a\n") for path in folder.glob("*.png"))
    text = (folder / "report.md").read_text()
    captions = dict(re.findall(r"!\[[^]]*\]\(([\w.]+)\.png\)\n\n\*(.*)\*$", text, re.M))
    assert captions.keys() == FIGURES
    for caption in captions.values():
        assert "8 runs of 6 steps x 4 x 16 bytes, compared at equal fractions of their schedules." in caption
        assert ("They differ in nothing but (checked): placement, model.norm.placement (pre: the base; post); "
                "optim.learning_rate (0.01, 0.1); train.seed (0, 1).") in caption
        assert "Runs of one seed share the order of the data, the held-out text, the probe batch; weights of one name" in caption
        assert f"float32, jax {jax.__version__}, commit " in caption
    assert "Does a tiny sweep run?" in text and not re.search(r"\bnan\b", text)


def test_the_page_needs_no_network(reported):
    """The page refers to nothing outside itself, and its pictures are the PNG files to the byte."""
    folder, _ = reported
    page = (folder / "report.html").read_text()
    references = re.findall(r"""(?:src|href|srcset|data|poster)\s*=\s*["']([^"']*)["']""", page)
    prefix = "data:image/png;base64,"
    assert len(references) == len(FIGURES) and all(reference.startswith(prefix) for reference in references)
    assert {base64.b64decode(reference.removeprefix(prefix)) for reference in references} == {
        path.read_bytes() for path in folder.glob("*.png")}
    assert not re.search(r"<script|<link|@import|url\(", page) and 'name="viewport"' in page
    assert page.count("<table>") == len(re.findall(r"^\| --- \|", (folder / "report.md").read_text(), re.M)) == 5  # three are of curves


def test_the_table_has_the_summaries_numbers(reported):
    """results.csv has one row for each member, with its labels and the numbers of its summary, digit for digit."""
    folder, _ = reported
    with (folder / "results.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    names = [f"placement={row['placement']},learning_rate={row['optim.learning_rate']},seed={row['train.seed']}" for row in rows]
    assert sorted(names) == sorted(MEMBERS)
    for name, row in zip(names, rows, strict=True):
        of = summary(folder / name)
        assert row["status"] == "completed" and int(row["step"]) == 6 and int(row["parameters"]) == of["parameters"]["total"]
        for key in ("eval_loss", "initial_eval_loss", "best_eval_loss", "train_loss", "largest_attention_logit", "flops_per_token"):
            assert float(row[key]) == of[key]
        assert float(row["eval_loss"]) == final(folder / name)[0]


def test_the_winner_and_the_sensitivities(reported):
    """Winner, its loss and each sensitivity are those computed from the metrics: min(loss, loss at init), mean over seeds, at the rate at
    which that is least."""
    folder, done = reported
    capped = {name: min(final(folder / name)) for name in MEMBERS}
    swept = lambda placement, seed: [capped[f"placement={placement},learning_rate={rate},seed={seed}"] for rate in ("0.01", "0.1")]
    mean = lambda values: math.fsum(values) / len(values)
    best = {placement: min(map(mean, zip(*(swept(placement, seed) for seed in (0, 1)), strict=True))) for placement in ("pre", "post")}
    winner = min(best, key=best.get)
    assert f"lowest held-out loss: **{winner}**, {best[winner]:.4f} " in done.out
    (loser,) = best.keys() - {winner}
    assert f"{loser}: higher by {best[loser] - best[winner]:.4f} " in done.out
    text = (folder / "report.md").read_text()
    for placement in ("pre", "post"):
        of_seeds = [mean(swept(placement, seed)) - min(swept(placement, seed)) for seed in (0, 1)]
        row = next(line for line in text.splitlines() if line.startswith(f"| {placement} | {best[placement]:.4f} "))
        assert f"| {mean(of_seeds):.4f} [" in row


def test_the_curves_are_the_metrics(reported):
    """Over layers, steps and placements a curve has, to the digit, what metrics.jsonl says of the runs at each placement's best rate, one
    column per seed; what no run logged has none, and the report says so."""
    folder, _ = reported
    table = collect(folder)
    by_layer, by_step, nothing, by_placement = (curves.lines(table, curve) for curve in table.curves)
    assert nothing == {} and "No run logged train/los" in (folder / "report.md").read_text()
    for index, placement in enumerate(("pre", "post")):
        name = "placement={},learning_rate={},seed={}".format
        rate = min(("0.01", "0.1"), key=lambda rate, of=placement: sum(min(final(folder / name(of, rate, seed))) for seed in (0, 1)))
        runs = [lines_of(folder / name(placement, rate, seed)) for seed in (0, 1)]
        assert by_layer[placement].x.tolist() == [1, 2]
        assert by_layer[placement].values.T.tolist() == [lines[0]["probe.grad_norm"] for lines in runs]
        assert by_step[placement].x.tolist() == [0, 0.5, 1]
        assert by_step[placement].values.T.tolist() == [[lines[step]["eval/loss"] for step in (0, 3, 6)] for lines in runs]
        last = [lines[3]["activation_rms.resid.post"][-1] for lines in runs]  # of the last loud step
        assert by_placement["all"].values[index].tolist() == last and by_placement["all"].names == ("pre", "post")


@pytest.mark.parametrize("command", ["ablate", "report"])
def test_a_config_edited_by_hand_is_told(copy, command):
    """A member whose config.json was changed is refused with the knob and both values, and nothing is overwritten."""
    file, root = copy
    edit(root / NAME / MEMBERS[3] / "config.json", "train", "z_loss", 0.5)
    before = tree(root)
    done = ablate_here(file, "--root", root) if command == "ablate" else report_here(root / NAME)
    refused(done, MEMBERS[3], "train.z_loss", "0.5", "0.0001")
    assert tree(root) == before


@pytest.mark.parametrize("command", ["ablate", "report"])
def test_a_damaged_config_is_told(copy, command):
    """A member whose config.json was cut short is refused with its place, and nothing is overwritten."""
    file, root = copy
    path = root / NAME / MEMBERS[3] / "config.json"
    path.write_text(path.read_text()[:200])
    before = tree(root)
    refused(ablate_here(file, "--root", root) if command == "ablate" else report_here(root / NAME), MEMBERS[3])
    assert tree(root) == before


def test_another_corpus_is_told(copy):
    """Members that saw different text are not compared; the difference is told, and no report is written."""
    _, root = copy
    edit(root / NAME / MEMBERS[5] / "conditions.json", "corpus", "sha256", "0" * 64)
    before = tree(root)
    refused(report_here(root / NAME), MEMBERS[5], "corpus", "0" * 64)
    assert tree(root) == before


def test_a_knob_outside_the_axes_is_told(copy):
    """Members that differ in a knob which no axis declares are not compared; the knob is named, and no report is written."""
    _, root = copy
    plan = read_json(root / NAME / "sweep.json")
    edit(root / NAME / "sweep.json", "axes", [axis for axis in plan["axes"] if axis["name"] != "placement"])
    before = tree(root)
    refused(report_here(root / NAME), "model.norm.placement", "pre", "post")
    assert tree(root) == before


def test_a_plan_that_lacks_a_part_is_told(copy):
    """A sweep.json without one of its parts is refused by both commands with the part's name, and nothing is overwritten."""
    file, root = copy
    plan = read_json(root / NAME / "sweep.json")
    (root / NAME / "sweep.json").write_text(json.dumps({key: value for key, value in plan.items() if key != "members"}))
    before = tree(root)
    refused(report_here(root / NAME), "sweep.json", "members")
    refused(ablate_here(file, "--root", root), "sweep.json", "members")
    assert tree(root) == before


def test_a_folder_without_a_sweep_is_told(source, tmp_path):
    """A report over a folder that holds no sweep ends with status 2 and writes nothing there."""
    refused(report_here(tmp_path), str(tmp_path))
    refused(report_here(tmp_path / "absent"), "absent")
    assert not list(tmp_path.iterdir())


def test_a_sweep_without_results_is_told(copy):
    """A report over a sweep of which no member has finished ends with status 2 and writes nothing."""
    _, root = copy
    for path in (root / NAME).glob("*/summary.json"):
        path.unlink()
    before = tree(root)
    refused(report_here(root / NAME), NAME, "8")
    assert tree(root) == before


def test_another_sweep_of_the_name_is_told(copy, source, tmp_path):
    """A sweep of the same name with other members leaves the folder as it is."""
    _, root = copy
    other = write_sweep(tmp_path, source, changes={"optim.eps": 1e-6})
    before = tree(root)
    assert ablate_here(other, "--root", root).status == 2
    assert tree(root) == before


def test_a_report_of_part_of_a_sweep(copy):
    """Where members are missing the report lists them, compares what can be paired, and says nan nowhere."""
    _, root = copy
    lost = [name for name in MEMBERS if "placement=pre" in name and "seed=1" in name]
    for name in lost:
        (root / NAME / name / "summary.json").unlink()
    done = report_here(root / NAME)
    assert done.status == 0, done.err
    text = (root / NAME / "report.md").read_text()
    assert all(name in text for name in lost) and not re.search(r"\bnan\b", text + done.out)
