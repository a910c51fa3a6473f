"""Curves over layers, steps and axes, from metrics written by hand: their points, exponents and growth, and what is left out."""

import math

import numpy as np
import pytest

from configs.schema import Experiment
from configs.sweep import Axis, Curve, seeds, values, variants
from tests.train.ablation.sweeps import report_here, write_results
from train.ablation import curves, figures
from train.ablation.collect import Table, collect
from train.ablation.statistics import interval
from train.ablation.tables import conclusion

STEPS = 4
DOUBLE = 2.0**-52
FITTED = 100 * DOUBLE
"""Error of an exponent: logarithms below 8, each off by an ulp, over a spread of the abscissa of at least log 2."""

PLACEMENT = variants("placement", pre={}, post={"model.norm.placement": "post"})
DEPTH = values("model.depth", 2, 4, 16)


def metrics(config: Experiment, of_step, stop: int | None = None) -> list[dict]:
    """A line for each step up to `stop`: a held-out loss that falls from 3 to 2, and what `of_step` says."""
    steps = config.train.steps
    return [{"step": step, "eval/loss": 3 - step / steps} | of_step(step) for step in range(steps + 1)][:stop]


def collected(tmp_path, axes: tuple[Axis, ...], lines) -> Table:
    return collect(write_results(tmp_path, axes, lines, changes={"train.steps": STEPS, "optim.warmup": 1}))


def only(table: Table, curve: Curve) -> curves.Line:
    """The curve's one line."""
    (line,) = curves.lines(table, curve).values()
    return line


EXPONENTS = (-0.5, 0.0, 1.0, 2.5)
OF_SEEDS = (0.5, 1.0, 2.0)


@pytest.fixture(scope="module")
def depths(tmp_path_factory):
    """Three depths, in no order, and three seeds; statistics that are power laws of the depth, or never could be."""
    def of(config):
        depth, seed = config.model.depth, config.train.seed
        laws = {f"law/{p}": (2 + seed) * depth**p for p in EXPONENTS}
        return metrics(config, lambda step: laws | {"law/of_seeds": depth ** OF_SEEDS[seed], "negative": -depth, "zero": depth - 2})

    return collected(tmp_path_factory.mktemp("depths"), (values("model.depth", 16, 2, 4), seeds(3)), of)


@pytest.mark.parametrize("exponent", EXPONENTS)
def test_a_power_law_gives_its_exponent(exponent, depths):
    """Of values c depth^p, with another c for each seed, the exponent is p, and last over first the ratio of the depths to p."""
    line = only(depths, Curve(f"law/{exponent}", over="model.depth"))
    assert line.law == pytest.approx((exponent,) * 3, abs=20 * FITTED)  # the bounds: Student's quantile 4.3 times the spread of the fits
    assert line.growth == pytest.approx((8**exponent,) * 3, rel=20 * FITTED)


def test_an_exponent_has_the_interval_of_its_seeds(depths):
    """Seeds that grow as depth^0.5, depth^1 and depth^2 have Student's interval of these three."""
    line = only(depths, Curve("law/of_seeds", over="model.depth"))
    assert line.law == pytest.approx(interval(np.asarray(OF_SEEDS)), abs=20 * FITTED)


def test_the_conclusion_tells_exponents(tmp_path):
    """Of a curve over an axis the conclusion has a line with the exponent of each variant; of one that has none, no line."""
    of = lambda config: metrics(config, lambda step: {"x": config.model.depth ** (2 if config.model.norm.placement == "post" else 1)})
    wanted = (Curve("x", over="model.depth"), Curve("x", over="step"), Curve("x", over="placement"))
    table = collect(write_results(tmp_path, (PLACEMENT, DEPTH), of, wanted, {"train.steps": STEPS, "optim.warmup": 1}))
    (line,) = (line for line in conclusion(table) if "exponent" in line)
    assert line == ("the mean over layers of x over model.depth, at the end: exponent 1.0000 (no interval) in pre; "
                    "2.0000 (no interval) in post")


@pytest.mark.parametrize("key", ["negative", "zero"])
def test_no_exponent_without_a_logarithm(key, depths):
    """Values that are not all positive have neither exponent nor growth."""
    line = only(depths, Curve(key, over="model.depth"))
    assert line.law is None and line.growth is None


def test_points_rise_whatever_their_order_in_the_axis(depths):
    """An axis of numbers is drawn by number, so that last over first is the largest over the smallest."""
    line = only(depths, Curve("law/1.0", over="model.depth"))
    assert line.x.tolist() == [2, 4, 16] and line.names == ("2", "4", "16")
    assert line.values.tolist() == [[2 * depth, 3 * depth, 4 * depth] for depth in (2, 4, 16)]


def test_layers_are_counted_from_one(tmp_path):
    """A statistic that is the square of the layer's number, the first being 1, has exponent 2, at init and at the end."""
    of = lambda config: metrics(config, lambda step: {"x": [(step + 1) * layer**2 for layer in range(1, 7)]})
    table = collected(tmp_path, (PLACEMENT, seeds(2)), of)
    for when, factor in (("first", 1), ("last", STEPS + 1)):
        found = curves.lines(table, Curve("x", over="layer", step=when))
        assert list(found) == ["pre", "post"]
        for line in found.values():
            assert line.x.tolist() == [1, 2, 3, 4, 5, 6] and line.names == ("1", "2", "3", "4", "5", "6")
            assert line.values.T.tolist() == [[factor * layer**2 for layer in range(1, 7)]] * 2
            assert line.law.mean == pytest.approx(2, abs=FITTED) and line.growth.mean == 36


@pytest.mark.parametrize(("layer", "expected"), [("first", [math.nan] * 5), ("last", [0, 2, 4, 6, 8]), ("mean", [0, 1.5, 3, 4.5, 6]),
                                                 ("max", [0, 2, 4, 6, 8])])
def test_a_layer_without_the_statistic_counts_nowhere(layer, expected, tmp_path):
    """Over the steps: one layer, or the mean or the largest of those that have the statistic; the first has none here."""
    of = lambda config: metrics(config, lambda step: {"x": [None, step, 2 * step]})
    line = only(collected(tmp_path, (seeds(2),), of), Curve("x", over="step", layer=layer))
    assert line.x.tolist() == [0, 0.25, 0.5, 0.75, 1]
    np.testing.assert_array_equal(line.values, np.asarray([expected, expected]).T)


def test_no_exponent_through_two_points(tmp_path):
    """Any two points lie on a power law: they have a growth and no exponent."""
    of = lambda config: metrics(config, lambda step: {"x": config.model.depth})
    line = only(collected(tmp_path, (values("model.depth", 2, 4),), of), Curve("x", over="model.depth"))
    assert line.law is None and line.growth.mean == 2


def test_an_axis_of_words_stands_in_its_order(tmp_path):
    """Labels that are no numbers keep the order of the axis, have their names in figure and table, and no exponent."""
    axis = variants("kind", soft={"train.z_loss": 1.0}, none={}, hard={"train.z_loss": 5.0})
    of = lambda config: metrics(config, lambda step: {"x": 1 + config.train.z_loss})
    curve = Curve("x", over="kind")
    found = curves.lines(collected(tmp_path, (axis,), of), curve)
    line = found["all"]
    assert line.x.tolist() == [0, 1, 2] and line.values[:, 0].tolist() == [2, 1 + 1e-4, 6] and line.law is None
    head, _ = curves.told(curve, found)
    assert head[:4] == ["variant", "soft", "none", "hard"]
    (axes,) = figures.curve(curve, found).axes
    assert [tick.get_text() for tick in axes.get_xticklabels()] == ["soft", "none", "hard"]


def test_seeds_keep_their_columns_where_members_are_missing(tmp_path):
    """A member without a result leaves a gap in its own seed, which then has no exponent; no other seed's value slips into its place."""
    def of(config):
        missing = (config.model.depth, config.train.seed) == (2, 0)
        return [] if missing else metrics(config, lambda step: {"x": config.model.depth ** (2 - config.train.seed)})

    line = only(collected(tmp_path, (DEPTH, seeds(2)), of), Curve("x", over="model.depth"))
    np.testing.assert_array_equal(line.values, [[np.nan, 2], [16, 4], [256, 16]])
    assert line.law.mean == pytest.approx(1, abs=FITTED) and line.growth.mean == 8 and line.mean.tolist() == [2, 10, 136]


def test_a_run_that_diverged_has_no_end(tmp_path):
    """A shorter run leaves the curve over the steps where it stopped, has a value at init, and none at the end."""
    stop = {0: None, 1: 3}  # the last line that seed 1 wrote is that of step 2
    of = lambda config: metrics(config, lambda step: {"x": [1 + step, 5 + step]}, stop[config.train.seed])
    table = collected(tmp_path, (seeds(2),), of)
    over = only(table, Curve("x", over="step", layer="last"))
    np.testing.assert_array_equal(over.values, [[5, 5], [6, 6], [7, 7], [8, np.nan], [9, np.nan]])
    assert over.mean.tolist() == [5, 6, 7, 8, 9] and over.growth.mean == 9 / 5
    assert only(table, Curve("x", over="layer", step="first")).values.shape == (2, 2)
    assert only(table, Curve("x", over="layer", step="last")).values.tolist() == [[5], [9]]
    np.testing.assert_array_equal(only(table, Curve("x", over="train.seed")).values, [[7, np.nan], [np.nan, np.nan]])


def test_fractions_are_compared_not_steps(tmp_path):
    """Runs of 4 and of 8 steps in which a statistic is 1 + its fraction of the schedule have one column of the table for each fraction."""
    axis = values("train.steps", 4, 8)
    of = lambda config: metrics(config, lambda step: {"x": 1 + step / config.train.steps})
    curve = Curve("x", over="step")
    found = curves.lines(collected(tmp_path, (axis, seeds(2)), of), curve)
    assert {variant: line.x.tolist() for variant, line in found.items()} == {
        "4": [0, 0.25, 0.5, 0.75, 1], "8": [0, 0.125, 0.25, 0.375, 0.5, 0.625, 0.75, 0.875, 1]}
    head, rows = curves.told(curve, found)
    told = [1 + float(name.removeprefix("at ")) for name in head if name.startswith("at ")]
    assert len(told) == 7 and (told[0], told[-1]) == (1, 2)
    for row in rows:
        assert [float(cell) for cell in row[1:8]] == pytest.approx(told, abs=5e-4)  # four digits are written


def test_shallow_models_end_where_they_end(tmp_path):
    """Of models of 2, 4 and 16 layers the table names layers of the deepest and leaves those blank that a shallower one has not."""
    of = lambda config: metrics(config, lambda step: {"x": [layer + 1 for layer in range(config.model.depth)]})
    curve = Curve("x", over="layer")
    head, rows = curves.told(curve, curves.lines(collected(tmp_path, (DEPTH,), of), curve))
    named = [int(name.removeprefix("layer ")) for name in head if name.startswith("layer ")]
    assert (named[0], named[-1], len(named)) == (1, 16, 7)
    for depth, row in zip((2, 4, 16), rows, strict=True):
        assert [cell and float(cell) for cell in row[1:8]] == [layer if layer <= depth else "" for layer in named]


def test_each_variant_is_drawn_at_its_best_rate(tmp_path):
    """Of each variant the runs at the rate of its least mean loss are drawn; a rate at which one seed diverged counts its loss at init."""
    loss = {("pre", 0.1): (2.0, 2.0), ("pre", 0.2): (1.0, None), ("post", 0.1): (2.5, 2.5), ("post", 0.2): (1.0, 2.0)}

    def of(config):
        rate, end = config.optim.learning_rate, loss[config.model.norm.placement, config.optim.learning_rate][config.train.seed]
        lines = metrics(config, lambda step: {"x": rate})
        return lines[:2] if end is None else [*lines[:-1], lines[-1] | {"eval/loss": end}]

    # pre: 2.0 on average at 0.1, (1 + 3) / 2 = 2.0 at 0.2 as well, and the first of equals is taken; post: 2.5 and 1.5
    table = collected(tmp_path, (PLACEMENT, values("optim.learning_rate", 0.1, 0.2), seeds(2)), of)
    found = curves.lines(table, Curve("x", over="step"))
    assert {variant: set(line.values.ravel().tolist()) for variant, line in found.items()} == {"pre": {0.1}, "post": {0.2}}
    over_rates = curves.lines(table, Curve("x", over="optim.learning_rate", step="first"))
    assert all(line.values.tolist() == [[0.1, 0.1], [0.2, 0.2]] for line in over_rates.values())


def test_what_no_run_logged_as_numbers_has_no_line(tmp_path):
    """A statistic that is missing, or is not a number or one number per layer, has no line over layers, steps or an axis."""
    logged = {"attention_entropy": [1.0, 2.0], "attention_entropy.heads": [[1.0, 2.0], [3.0, 4.0]], "probe.histogram": [{"low": 0.0}, None]}
    table = collected(tmp_path, (PLACEMENT,), lambda config: metrics(config, lambda step: logged))
    for over in ("layer", "step", "placement"):
        assert curves.lines(table, Curve("attention_entropy", over=over))
        for key in ("attention_entropi", "attention_entropy.heads", "probe.histogram"):
            assert curves.lines(table, Curve(key, over=over)) == {}


def test_a_report_says_what_no_run_logged(tmp_path):
    """The report of a sweep with a misspelt curve is made, says so under the curve's heading, and tells the nearest statistic."""
    of = lambda config: metrics(config, lambda step: {"attention_entropy": [1.0, 2.0]})
    folder = write_results(tmp_path, (PLACEMENT,), of, (Curve("attention_entropi", over="step"), Curve("attention_entropy", over="layer")))
    done = report_here(folder)
    assert done.status == 0, done.err
    text = (folder / "report.md").read_text()
    section = text.split("## The mean over layers of attention_entropi over the steps\n")[1].split("##")[0]
    assert "No run logged attention_entropi" in section and "'attention_entropy'" in section
    assert "## The layers' attention_entropy, at the end" in text and "| layer 1 | layer 2 | last / first |" in text


@pytest.mark.parametrize(("curve", "expected"), [
    (Curve("grad_norm", over="model.depth", layer="last", step="first"), "the last layer's grad_norm over model.depth, at init"),
    (Curve("grad_norm", over="kappa", layer="max"), "the largest over layers of grad_norm over kappa, at the end"),
    (Curve("grad_norm", over="layer", layer="first"), "the layers' grad_norm, at the end"),
    (Curve("eval/loss", over="step"), "the runs' eval/loss over the steps"),
])
def test_titles(curve, expected):
    """A title tells which layer, over what, and when."""
    assert curves.title(curve) == expected
