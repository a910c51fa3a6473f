"""What a report says of results written by hand: winners, captions, starts, and numbers that are none."""

import math
import re

import numpy as np
import pytest

from configs.schema import Experiment
from configs.sweep import Axis, seeds, values, variants, zipped
from tests.train.ablation.sweeps import CONDITIONS, edit, refused, report_here, write_results
from train.ablation import figures, tables
from train.ablation.collect import Table, collect
from train.ablation.statistics import compare, interval, sensitivity

STEPS = 4
PLACEMENT = variants("placement", pre={}, post={"model.norm.placement": "post"})
RATE = values("optim.learning_rate", 0.1, 0.2)


def losses(of):
    """Lines of a run whose held-out loss is 3 at its start and `of(config)` at its end; where that is None it diverges at step 2."""
    def lines(config: Experiment) -> list[dict]:
        end, steps = of(config), config.train.steps
        panel = {"attention_logit_max": [1.0, 2.0]}
        if end is None:
            return [{"step": 0, "eval/loss": 3.0} | panel, {"step": 1} | panel, {"step": 2, "train/loss": "NaN"}]
        between = [{"step": step} | panel for step in range(1, steps)]
        return [{"step": 0, "eval/loss": 3.0} | panel, *between, {"step": steps, "eval/loss": end}]

    return lines


def written(tmp_path, axes: tuple[Axis, ...], of, changes: dict | None = None, **of_summary):
    return write_results(tmp_path, axes, losses(of), changes={"train.steps": STEPS, "optim.warmup": 1} | (changes or {}), **of_summary)


def collected(tmp_path, *arguments, **named) -> Table:
    return collect(written(tmp_path, *arguments, **named))


def test_the_best_rate_is_the_variants_own(tmp_path):
    """A variant's loss, its runs and its rate are those of the one rate with the least mean over seeds: not of each seed's luckiest."""
    end = {0.1: (2.0, 1.0), 0.2: (1.25, 1.25)}
    table = collected(tmp_path, (PLACEMENT, RATE, seeds(2)), lambda config: end[config.optim.learning_rate][config.train.seed])
    assert tables.best(table, "pre").tolist() == [1.25, 1.25]
    assert [run.rate for run in table.at_best_rate("pre")] == [0.2, 0.2]
    assert f"| pre | {interval(np.asarray([1.25, 1.25]))} | 0.2 |" in tables.variant_table(table)


def test_a_rate_at_which_a_seed_diverged_counts_its_loss_at_init(tmp_path):
    """A run that diverged enters means and sensitivities with its loss at init, 3."""
    end = {0.1: (2.0, 2.5), 0.2: (1.0, None)}
    table = collected(tmp_path, (PLACEMENT, RATE, seeds(2)), lambda config: end[config.optim.learning_rate][config.train.seed])
    assert table.losses("pre").tolist() == [[2.0, 2.5], [1.0, 3.0]]
    assert tables.sensitivities(table)["pre"].tolist() == [0.5, 0.25]
    assert tables.best(table, "pre").tolist() == [1.0, 3.0]
    assert tables.diverged(table).splitlines()[2:] == ["| pre | 0.2 | 1 | 2 |", "| post | 0.2 | 1 | 2 |"]


@pytest.mark.parametrize("axes", [
    (variants("recipe", slow={"optim.learning_rate": 0.1}, fast={"optim.learning_rate": 0.2, "optim.warmup": 2}), seeds(2)),
    (zipped(RATE, values("optim.warmup", 1, 2)), seeds(2)),
], ids=["variants", "zipped"])
def test_variants_may_bring_their_own_rate(axes, tmp_path):
    """Where no axis sweeps the learning rate alone, variants of different rates are compared as they are, each at its own."""
    table = collected(tmp_path, axes, lambda config: 2 - config.optim.learning_rate)
    assert len(table.rates) == 1 and table.whole.all()
    rows = tables.variant_table(table).splitlines()[2:]
    assert [row.split(" | ")[2] for row in rows] == ["0.1", "0.2"] and "LR sensitivity" not in tables.variant_table(table)
    assert tables.conclusion(table)[0].startswith(f"lowest held-out loss: **{table.variants[1]}**, 1.8000 ")


def test_many_comparisons_are_owned_up_to(tmp_path):
    """Of three variants the conclusion tells that each interval is for one comparison; of two it need not."""
    said = lambda folder, axis: "\n".join(tables.conclusion(collected(folder, (axis, seeds(2)), lambda _: 2.0)))
    assert "are for one comparison; here are 2" in said(tmp_path / "three", values("train.z_loss", 0.0, 0.5, 1.0))
    assert "are for one comparison" not in said(tmp_path / "two", PLACEMENT)


@pytest.mark.parametrize("logit", ["NaN", "Infinity", None])
def test_a_variant_that_always_diverged_is_reported(logit, tmp_path):
    """Where every run of a variant diverged, whatever its largest logit, there is a report, with figures, that lists them."""
    folder = written(tmp_path, (PLACEMENT, RATE), lambda config: None if config.model.norm.placement == "post" else 2.0,
                     largest_attention_logit=logit)
    done = report_here(folder)
    assert done.status == 0, done.err
    text = (folder / "report.md").read_text()
    row = next(line for line in text.split("## Variants")[1].splitlines() if line.startswith("| post |"))
    assert row.startswith("| post | 3.0000 (no interval) | 0.1 | 0.0000 ")
    assert f" | {'not logged' if logit in ('NaN', None) else f'{float(logit):.3g}'} | " in row
    assert text.split("## Runs that diverged")[1].split("##")[0].count("| post |") == 2
    assert "post: higher by 1.0000 (no interval); one seed cannot show a difference" in text


def test_a_loss_that_is_no_number_is_a_loss_at_init(tmp_path):
    """A run that went to its end with a loss that is no number (its updates were skipped) counts as one that learnt nothing."""
    table = collected(tmp_path, (PLACEMENT,), lambda config: "NaN" if config.model.norm.placement == "post" else 2.0)
    assert table.losses("post").tolist() == [[3.0]] and math.isinf(table.of("post")[0].loss)


def test_what_is_not_finite_has_no_interval():
    """Means, differences and sensitivities of losses that are infinite even at init are told as such, without a warning."""
    lost, mixed = np.asarray([math.inf, math.inf]), np.asarray([math.inf, 1.0])
    assert interval(lost).mean == math.inf and "no interval" in str(interval(lost)) and interval(lost).verdict == "not finite"
    assert compare(np.ones(2), mixed).verdict == compare(lost, lost).verdict == "not finite"
    assert sensitivity(lost) == sensitivity(mixed) == math.inf


def test_a_run_that_diverged_ends_where_it_did_in_the_heat_map(tmp_path):
    """A heat map spans the schedule; a run that diverged half-way fills the first half, one that ended all of it."""
    table = collected(tmp_path, (PLACEMENT,), lambda config: None if config.model.norm.placement == "post" else 2.0)
    shown = {variant: tables.best_run(table, variant) for variant in table.variants}
    figure = figures.heatmaps(shown, "attention-logit max", "attention_logit_max", True)
    for axes, end in zip(figure.axes, (1.0, 0.5), strict=False):
        (mesh,) = axes.collections
        edges = mesh.get_coordinates()[0, :, 0]
        assert axes.get_xlim() == (0, 1) and (edges[0], edges[-1]) == (0, end)


@pytest.mark.parametrize(("axis", "told"), [
    (values("optim.eps", 1e-8, 1e-6), "optim.eps (1e-08, 1e-06)"),
    (variants("placement", pre={"model.norm.placement": "pre"}, post={"model.norm.placement": "post"}),
     "placement, model.norm.placement (pre, post)"),
    (variants("placement", before={}, after={"model.norm.placement": "post"}),
     "placement, model.norm.placement (before: the base; after: post)"),
    (variants("recipe", plain={}, both={"optim.clip": None, "train.z_loss": 0.5}),
     "recipe (plain: the base; both: optim.clip = None, train.z_loss = 0.5)"),
], ids=["a knob", "its values", "other names", "several knobs"])
def test_an_axis_is_told_by_what_it_sets(axis, told, tmp_path):
    """A caption tells each point of an axis by the knobs that it sets, once."""
    table = collected(tmp_path, (axis,), lambda _: 2.0)
    assert tables.axis_told(table.axes[0]) == told and told in tables.caption(table)


AUTO = {"model.init.kind": "auto"}
BRANCHES = ["attention.k", "attention.out", "attention.q", "attention.v", "mlp.down", "mlp.up"]
DEEPNORM = variants("placement", post={"model.norm.placement": "post"}, deepnorm={"model.norm.placement": "deepnorm"})


@pytest.mark.parametrize(("axis", "changes", "unequal"), [
    (PLACEMENT, {}, []), (DEEPNORM, {}, []), (values("model.width", 16, 32), {}, []), (values("model.depth", 2, 4), {}, []),
    (DEEPNORM, AUTO, BRANCHES),  # normal against Xavier
    (values("model.depth", 2, 4), {"model.init.kind": "scaled"}, ["attention.out", "mlp.down"]),
    (values("model.depth", 2, 4), AUTO | {"model.norm.placement": "deepnorm"}, ["attention.out", "attention.v", "mlp.down", "mlp.up"]),
    (values("model.init.std", 0.02, 0.1), {}, ["embed"]),
    (variants("norm", w={}, one_plus={"model.norm.scale": "1+w"}), {}, ["norm.final.scale", "norm.scale"]),
], ids=["post", "deepnorm", "width", "depth", "deepnorm, own init", "depth, scaled", "depth, deepnorm", "std", "1+w"])
def test_weights_that_start_unequal_are_named(axis, changes, unequal, tmp_path):
    """The roles named are those whose initial scale is not the same in every variant: none under an init that knows no variant."""
    told = tables.unequal_start(collected(tmp_path, (axis,), lambda _: 2.0, changes=changes))
    except_for = f", except {', '.join(unequal)}, whose scale is the variant's own" if unequal else ""
    assert told == "weights of one name and shape start equal" + except_for


@pytest.mark.parametrize(("axis", "kept", "length"), [
    (PLACEMENT, "the order of the data, the held-out text, the probe batch;", "4 steps x 8 x 8 bytes"),
    (values("train.steps", 4, 8), "the order of the data, the held-out text, the probe batch;", "4 or 8 steps x 8 x 8 bytes"),
    (values("eval.batches", 1, 2), "the order of the data, the probe batch;", "4 steps x 8 x 8 bytes"),
    (values("data.batch", 8, 16), "the probe batch;", "4 steps x 8 or 16 x 8 bytes"),
    (values("data.sequence", 8, 4), "neither the order of the data nor the held-out text;", "4 steps x 8 x 8 or 4 bytes"),
    (values("train.dtype", "float32", "bfloat16"), "the order of the data, the held-out text, the probe batch;", "float32 or bfloat16"),
], ids=lambda value: value.name if isinstance(value, Axis) else "")
def test_a_caption_claims_what_runs_share_and_no_more(axis, kept, length, tmp_path):
    """Batch size and sequence length change what is read and when; a caption then says so, and tells each length and precision."""
    caption = tables.caption(collected(tmp_path, (axis, seeds(2)), lambda _: 2.0))
    assert f"Runs of one seed share {kept}" in caption and length in caption


def test_conditions_that_differ_are_all_told(tmp_path):
    """Members that ran on two kinds of device and two versions have both in the caption and among the conditions."""
    folder = written(tmp_path, (PLACEMENT,), lambda _: 2.0)
    edit(folder / "placement=post" / "conditions.json", "devices", "8 gpu (gpu)")
    edit(folder / "placement=post" / "conditions.json", "versions", {"jax": "0.1"})
    table = collect(folder)
    assert f"{CONDITIONS['devices']} or 8 gpu (gpu), float32, jax 0.0 or 0.1" in tables.caption(table)
    assert f"| devices | {CONDITIONS['devices']} or 8 gpu (gpu) |" in tables.conditions(table)


def test_a_bar_in_a_label_stays_in_its_cell(tmp_path):
    """A variant's name may hold what separates the cells of a table."""
    axis = variants("recipe", **{"a|b": {}, "c": {"train.z_loss": 0.5}})
    folder = written(tmp_path, (axis,), lambda _: 2.0)
    assert report_here(folder).status == 0
    assert "<td>a|b</td>" in (folder / "report.html").read_text()


def test_no_seed_in_common_is_told(tmp_path):
    """Where no seed has a result of every variant, there is nothing to pair, and a line that says so."""
    def of(config):
        return losses(lambda _: 2.0)(config) if (config.model.norm.placement == "pre") == (config.train.seed == 0) else []

    refused(report_here(write_results(tmp_path, (PLACEMENT, seeds(2)), of, changes={"train.steps": STEPS, "optim.warmup": 1})),
            "no seed has a result of every variant", "2 members are missing")


def test_a_changed_default_is_told_as_such(tmp_path):
    """A member whose config is to the knob what was planned, under another fingerprint, was planned by code with other defaults: the line
    says so, and does not ask for something to be restored."""
    folder = written(tmp_path, (PLACEMENT,), lambda _: 2.0)
    edit(folder / "sweep.json", "members", "placement=post", "fingerprint", "0" * 12)
    refused(report_here(folder), "placement=post", "restore it")
    (folder / "configs").mkdir()
    (folder / "configs" / "placement=post.json").write_text((folder / "placement=post" / "config.json").read_text())
    refused(report_here(folder), "placement=post", "a default has changed")


def test_means_are_over_the_seeds_that_pair(tmp_path):
    """A caption says over how many seeds losses are averaged, those of which no member is missing, and how many there are elsewhere."""
    def of(config):
        missing = (config.model.norm.placement, config.optim.learning_rate, config.train.seed) == ("post", 0.1, 2)
        return [] if missing else losses(lambda _: 2.0)(config)

    changes = {"train.steps": STEPS, "optim.warmup": 1}
    folder = write_results(tmp_path, (PLACEMENT, RATE, seeds(3)), of, changes=changes, largest_attention_logit=2.0)
    assert report_here(folder).status == 0
    text = (folder / "report.md").read_text()
    said = dict(re.findall(r"\]\((\w+)\.png\)\n\n\*Mean over (\d) seeds", text))
    assert (said["loss"], said["logits"]) == ("2", "3") and "## Members without a result\n\n1: " in text
