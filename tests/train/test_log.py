"""What a run writes: metrics.jsonl and TensorBoard events, read back."""

import contextlib
import json
import re

import numpy as np
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.custom_scalar import layout_pb2
from tensorboard.plugins.hparams import metadata as hparams
from tensorboard.util import tensor_util

from configs.load import from_json
from tests.train.processes import lines_of, strict_json
from tests.train.small import small
from train.instruments import HISTOGRAM, known_keys
from train.log import METRICS, Log, keep_before, read_lines

DEPTH = 12
draw = np.random.default_rng(0)
values = lambda *shape: (draw.normal(size=shape) * 10.0 ** draw.integers(-20, 20, shape)).astype(np.float32)

PANEL = {
    "train/loss": np.float32(3.25),
    "train/grad_norm": np.float32(1 / 3),
    "train/skipped": np.int32(3),
    "grad_norm": values(DEPTH),
    "activation_rms.resid.mid": values(DEPTH),
    "attention_entropy": values(DEPTH),
    "attention_entropy.heads": values(DEPTH, 4),
    "attention_logit_max": values(DEPTH),
    "grad_norm.norm": [None, *values(DEPTH - 1)],
    "probe.attention_entropy": values(DEPTH),
    f"probe.{HISTOGRAM}": np.stack([np.concatenate(([-1.0, 2.0], np.arange(30) + layer)) for layer in range(DEPTH)]).astype(np.float32),
    "probe.query_norm.heads": [None, *(values(2 + layer % 2) for layer in range(1, DEPTH))],
}


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """(directory, config, events) of a log with two lines."""
    directory, config = tmp_path_factory.mktemp("run"), small({"model.depth": DEPTH, "run.name": "small"})
    log = Log(directory, config, None)
    log.write(0, PANEL)
    log.write(5, {"train/loss": np.float32(2.0)})
    log.clock(5, {"clock/step_seconds": 0.5})
    log.close()
    events = EventAccumulator(str(directory), size_guidance={"tensors": 0, "scalars": 0}).Reload()
    return directory, config, events


def as_read(value):
    """What JSON makes of an array."""
    if isinstance(value, list):
        return [None if x is None else as_read(x) for x in value]
    return np.asarray(value, np.float32).tolist()


@pytest.mark.parametrize("key", [key for key in PANEL if not key.endswith(HISTOGRAM)])
def test_a_line_gives_every_float32_back(written, key):
    """metrics.jsonl holds each number to the last bit of its float32, lists by layer and by head, null where a layer has none."""
    line = lines_of(written[0])[0]

    def compare(found, expected):
        if isinstance(expected, list):
            assert len(found) == len(expected)
            for x, y in zip(found, expected, strict=True):
                compare(x, y)
        else:
            assert found is None if expected is None else np.float32(found) == np.float32(expected)

    assert line["step"] == 0
    compare(line[key], as_read(PANEL[key]))


def test_a_histogram_is_written_with_its_edges(written):
    """A layer's histogram is its smallest and largest value and the counts between them."""
    line = lines_of(written[0])[0]
    assert line[f"probe.{HISTOGRAM}"][3] == {"low": -1, "high": 2, "counts": list(range(3, 33))}


def test_what_is_not_finite_is_spelled(tmp_path):
    """NaN and infinities are the texts NaN, Infinity and -Infinity, in lists too: each line is JSON as its standard has it."""
    log = Log(tmp_path, small(), None)
    log.write(3, {"train/loss": np.float32(np.nan), "grad_norm": np.asarray([1.5, np.inf, -np.inf], np.float32),
                  "attention_sink.heads": [None, np.asarray([np.nan, 1.0], np.float32)]})
    log.close()
    (text,) = (tmp_path / METRICS).read_text().splitlines()
    assert strict_json(text) == {"step": 3, "train/loss": "NaN", "grad_norm": [1.5, "Infinity", "-Infinity"],
                                 "attention_sink.heads": [None, ["NaN", 1]]}
    events = EventAccumulator(str(tmp_path)).Reload()
    assert np.isnan(events.Scalars("train/loss")[0].value) and events.Scalars("grad_norm/layer_01")[0].value == np.inf
    assert float(strict_json(text)["grad_norm"][2]) == -np.inf  # the texts are those that float() reads


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_histogram_of_what_is_not_finite_is_a_line_but_no_picture(value, tmp_path):
    """Of logits that are not finite the line spells the edges, and TensorBoard is given no histogram: the log goes on without a warning."""
    with contextlib.closing(Log(tmp_path, small(), None)) as log:
        log.write(0, {f"probe.{HISTOGRAM}": np.asarray([[-1.0, value, *[1] * 30], [-1.0, 1.0, *[1] * 30]], np.float32)})
    assert float(lines_of(tmp_path)[0][f"probe.{HISTOGRAM}"][0]["high"]) == pytest.approx(value, nan_ok=True)
    assert [tag for tag in EventAccumulator(str(tmp_path)).Reload().Tags()["tensors"] if "layer" in tag] == [f"probe.{HISTOGRAM}/layer_01"]


SCALARS = ["train/loss", "train/grad_norm", "grad_norm/layer_00", "attention_entropy/layer_01", "activation_rms.resid.mid/layer_11",
           "probe.attention_entropy/layer_00", "worst/attention_entropy", "worst/attention_logit_max", "worst/probe.attention_entropy",
           "clock/step_seconds"]


@pytest.mark.parametrize("tag", SCALARS)
def test_scalars_have_their_tags(written, tag):
    """Each statistic is a section, each layer a tag in it; numbers of the whole run, the worst layers and the clock have sections too."""
    assert tag in written[2].Tags()["scalars"]


def test_scalars_are_the_numbers_of_the_lines(written):
    """A tag holds the number that metrics.jsonl has for that layer, at its step."""
    events = written[2]
    for layer in range(DEPTH):
        (event,) = events.Scalars(f"grad_norm/layer_{layer:02}")
        assert (event.step, np.float32(event.value)) == (0, PANEL["grad_norm"][layer])
    assert [(event.step, event.value) for event in events.Scalars("train/loss")] == [(0, 3.25), (5, 2.0)]
    assert np.float32(events.Scalars("worst/attention_entropy")[0].value) == PANEL["attention_entropy"].min()
    assert np.float32(events.Scalars("worst/attention_logit_max")[0].value) == PANEL["attention_logit_max"].max()


def test_twelve_layers_stand_in_order(written):
    """Sorted as texts, the labels of twelve layers are in the order of the layers; a layer without the statistic has no tag."""
    labels = lambda key: sorted(tag for tag in written[2].Tags()["scalars"] if tag.startswith(f"{key}/"))
    assert labels("grad_norm") == [f"grad_norm/layer_{layer:02}" for layer in range(DEPTH)]
    assert labels("grad_norm.norm") == [f"grad_norm.norm/layer_{layer:02}" for layer in range(1, DEPTH)]


def test_heads_are_not_drawn(written):
    """Values per head are in metrics.jsonl alone."""
    tags = written[2].Tags()
    assert not [tag for kind in ("scalars", "tensors") for tag in tags[kind] if "heads" in tag]
    assert "attention_entropy.heads" in lines_of(written[0])[0]


def test_histograms_are_drawn_by_layer(written):
    """TensorBoard's histogram of a layer has 30 bins from the smallest to the largest logit and all of its counts."""
    (event,) = written[2].Tensors(f"probe.{HISTOGRAM}/layer_03")
    table = tensor_util.make_ndarray(event.tensor_proto)
    np.testing.assert_allclose(table[:, 0], -1 + 0.1 * np.arange(30))
    np.testing.assert_allclose(table[:, 1], -1 + 0.1 * np.arange(1, 31))
    np.testing.assert_array_equal(table[:, 2], np.arange(30) + 3)
    assert written[2].SummaryMetadata(f"probe.{HISTOGRAM}/layer_03").plugin_data.plugin_name == "histograms"


def test_the_config_is_a_text(written):
    """The page of texts shows the config, whole: read back it is the config."""
    _, config, events = written
    text = events.Tensors("config")[0].tensor_proto.string_val[0].decode()
    assert events.SummaryMetadata("config").plugin_data.plugin_name == "text"
    assert from_json(text.removeprefix("```json\n").removesuffix("```")) == config


def test_the_knobs_are_hyperparameters(written):
    """The page of hyperparameters has every knob with its value."""
    content = hparams.parse_session_start_info_plugin_data(
        written[2].SummaryMetadata("_hparams_/session_start_info").plugin_data.content)
    assert content.hparams["model.depth"].number_value == DEPTH
    assert content.hparams["model.norm.placement"].string_value == "pre"
    assert content.hparams["model.tied"].bool_value is True


def layout(events) -> layout_pb2.Layout:
    found = layout_pb2.Layout()
    found.ParseFromString(events.Tensors("custom_scalars__config__")[0].tensor_proto.string_val[0])
    return found


def test_the_layout_draws_each_statistic_in_one_chart(written):
    """Each per-layer tag is in exactly one chart, together with the other layers of its statistic and nothing else; and each statistic
    that is known has a chart, on the training batch and on the probe batch."""
    events = written[2]
    charts = {chart.title: chart.multiline.tag for category in layout(events).category for chart in category.chart}
    assert set(charts) == set(known_keys()) | {f"probe.{key}" for key in known_keys()}
    for tag in events.Tags()["scalars"]:
        if "/layer_" in tag:
            holding = [title for title, patterns in charts.items() for pattern in patterns if re.search(pattern, tag)]
            assert holding == [tag.split("/layer_")[0]]
    assert len(charts) == sum(len(category.chart) for category in layout(events).category)


def test_a_line_stands_before_the_log_is_closed(tmp_path):
    """A line is in the file as soon as it is written: a killed process loses none."""
    log = Log(tmp_path, small(), None)
    log.write(0, {"train/loss": np.float32(1.0)})
    assert lines_of(tmp_path) == [{"step": 0, "train/loss": 1}]
    log.close()


BROKEN = {
    "whole": "",
    "half a line": '{"step": 7, "train/lo',
    "half a number": '{"step": 7, "train/loss": 1.2',
    "zeros": "\0" * 40,
}


@pytest.mark.parametrize("tail", BROKEN)
def test_later_and_broken_lines_are_dropped(tail, tmp_path):
    """Continued at a step, the file keeps the lines before it to the byte, and nothing of that step, later, or half written."""
    path = tmp_path / METRICS
    line = lambda step: json.dumps({"step": step, "train/loss": 1 / (step + 3), "x": [None, 1, "NaN", 1e-30]}) + "\n"
    path.write_text("".join(map(line, range(7))) + BROKEN[tail])
    assert [found["step"] for found in read_lines(path)] == list(range(7))
    keep_before(path, 5)
    assert path.read_text() == "".join(map(line, range(5)))


def test_a_continued_log_purges_what_was_drawn_twice(tmp_path):
    """Continued at step 2, TensorBoard shows of step 2 and later what the second log wrote, each step once."""
    for continued, steps, loss in ((None, range(4), 1.0), (2, range(2, 5), 2.0)):
        log = Log(tmp_path, small(), continued)
        for step in steps:
            log.write(step, {"train/loss": np.float32(loss)})
        log.close()
        for path in set(tmp_path.glob("events.*")) - {tmp_path / "events.out.tfevents.1"}:  # read in the order of their names
            path.rename(tmp_path / f"events.out.tfevents.{1 if continued is None else 2}")
    shown = [(event.step, event.value) for event in EventAccumulator(str(tmp_path)).Reload().Scalars("train/loss")]
    assert shown == [(0, 1.0), (1, 1.0), (2, 2.0), (3, 2.0), (4, 2.0)]
    assert [line["train/loss"] for line in lines_of(tmp_path)] == [1, 1, 2, 2, 2]
