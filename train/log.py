"""What a run writes: metrics.jsonl, the source of truth, and TensorBoard events drawn from it."""

import hashlib
import json
import os
import re
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from tensorboard.compat.proto import types_pb2
from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary, SummaryMetadata
from tensorboard.compat.proto.tensor_pb2 import TensorProto
from tensorboard.compat.proto.tensor_shape_pb2 import TensorShapeProto
from tensorboard.plugins.custom_scalar import layout_pb2
from tensorboard.plugins.custom_scalar import metadata as custom_scalars
from tensorboard.plugins.histogram import metadata as histograms
from tensorboard.plugins.hparams import summary_v2 as hparams
from tensorboard.plugins.text import metadata as texts
from tensorboard.summary.writer.event_file_writer import EventFileWriter
from tensorboard.util import tensor_util

from configs.knobs import flatten
from configs.load import to_json
from configs.schema import Experiment
from train.directory import write
from train.instruments import HISTOGRAM, headline, known_keys

METRICS = "metrics.jsonl"

HEADLINE = ("eval/loss", "train/loss", "worst/attention_logit_max", "worst/grad_norm")
"""What the hyperparameter table shows of a run."""

CHARTS: dict[str, str] = {
    "gradients": r"(grad_norm|activation_grad_rms)",
    "attention": r"(attention|query|key)",
    "router": r"router",
    "activations": r"activation_(rms|max)",
    "parameters and updates": r"(param_rms|update)",
}
"""Categories of the custom-scalars page, by the names of their statistics; each has a twin on the probe batch."""


class Log:
    """The writer of one run directory. Of a run continued at step s it first drops what was written for s and later."""

    def __init__(self, directory: Path, config: Experiment, continued: int | None):
        if continued is not None:
            keep_before(directory / METRICS, continued)
        self.lines = (directory / METRICS).open("ab")
        self.digest = hashlib.sha256((directory / METRICS).read_bytes())
        """Of all lines so far."""
        self.events = EventFileWriter(str(directory))
        if continued is not None:
            self.event(continued, session_log=SessionLog(status=SessionLog.START))
        if not continued:
            self.describe(config)

    def write(self, step: int, values: Mapping[str, Any]) -> dict[str, Any]:
        """One line of metrics.jsonl and its events: numbers under their key, per-layer values as <key>/layer_<index>. Returns them as
        plain numbers."""
        values = {key: plain(key, value) for key, value in values.items()}
        line = line_of(step, values).encode()
        self.lines.write(line)
        self.lines.flush()
        self.digest.update(line)
        summary = []
        for key, value in (values | headline(values)).items():
            if key.endswith(HISTOGRAM):
                finite = [(layer, of) for layer, of in enumerate(value) if of is not None and np.isfinite([of["low"], of["high"]]).all()]
                summary += [histogram_value(f"{key}/layer_{layer:02}", of) for layer, of in finite]
            elif isinstance(value, list):
                numbers = [(layer, x) for layer, x in enumerate(value) if isinstance(x, float)]
                summary += [Summary.Value(tag=f"{key}/layer_{layer:02}", simple_value=x) for layer, x in numbers]
            else:
                summary.append(Summary.Value(tag=key, simple_value=value))
        self.event(step, summary=Summary(value=summary))
        return values

    def clock(self, step: int, values: Mapping[str, float]) -> None:
        """Times, to TensorBoard alone: metrics.jsonl holds only what a repeated run repeats."""
        self.event(step, summary=Summary(value=[Summary.Value(tag=key, simple_value=value) for key, value in values.items()]))

    def describe(self, config: Experiment) -> None:
        """The config as text, as hyperparameters, and the layout that draws all layers of a statistic in one chart."""
        self.put("config", string(f"```json\n{to_json(config)}```".encode()), texts.create_summary_metadata("config", ""))
        knobs = {key: value if isinstance(value, (bool, int, float, str)) else str(value) for key, value in flatten(config).items()}
        metrics = [hparams.Metric(tag) for tag in HEADLINE]
        self.event(0, summary=hparams.hparams_config_pb([hparams.HParam(knob) for knob in knobs], metrics))
        self.event(0, summary=hparams.hparams_pb(knobs, trial_id=config.run.name))
        plugin = SummaryMetadata.PluginData(plugin_name=custom_scalars.PLUGIN_NAME)
        charts = string(layout(config.model.mixture).SerializeToString())
        self.put(custom_scalars.CONFIG_SUMMARY_TAG, charts, SummaryMetadata(plugin_data=plugin))

    def put(self, tag: str, tensor: TensorProto, metadata: SummaryMetadata) -> None:
        self.event(0, summary=Summary(value=[Summary.Value(tag=tag, tensor=tensor, metadata=metadata)]))

    def event(self, step: int, **content) -> None:
        self.events.add_event(Event(step=step, wall_time=time.time(), **content))

    def flush(self) -> None:
        """Everything written so far is on the disk afterwards."""
        self.events.flush()
        os.fsync(self.lines.fileno())

    def close(self) -> None:
        self.flush()
        self.events.close()
        self.lines.close()


def line_of(step: int, values: Mapping[str, Any]) -> str:
    """The line of metrics.jsonl for plain numbers."""
    return json.dumps({"step": step} | {key: spelled(value) for key, value in values.items()}, allow_nan=False) + "\n"


def string(value: bytes) -> TensorProto:
    return TensorProto(dtype=types_pb2.DT_STRING, string_val=[value], tensor_shape=TensorShapeProto())


def plain(key: str, value):
    """Host arrays as floats and lists, nine significant digits: enough to give a float32 back exactly."""
    if isinstance(value, list):
        return [None if x is None else plain(key, x) for x in value]
    array = np.asarray(value)
    if array.ndim:
        if key.endswith(HISTOGRAM) and array.ndim == 1:
            low, high, *counts = map(float, array)
            return {"low": low, "high": high, "counts": counts}
        return [plain(key, x) for x in array]
    return float(f"{float(array):.9g}")


def spelled(value):
    """JSON has no word for numbers that are not finite: they are written as the texts NaN, Infinity and -Infinity."""
    if isinstance(value, list):
        return [spelled(x) for x in value]
    if isinstance(value, dict):
        return {key: spelled(x) for key, x in value.items()}
    if isinstance(value, float) and not np.isfinite(value):
        return {"nan": "NaN", "inf": "Infinity", "-inf": "-Infinity"}[str(value)]
    return int(value) if isinstance(value, float) and value.is_integer() and abs(value) < 2**53 else value


def histogram_value(tag: str, found: Mapping[str, Any]) -> Summary.Value:
    edges = np.linspace(found["low"], found["high"], len(found["counts"]) + 1)
    table = tensor_util.make_tensor_proto(np.stack((edges[:-1], edges[1:], found["counts"]), -1))
    return Summary.Value(tag=tag, tensor=table, metadata=histograms.create_summary_metadata(tag, ""))


def layout(mixture: bool) -> layout_pb2.Layout:
    """The custom-scalars page: a chart per statistic with a line per layer; `mixture`: those of mixtures of experts too."""
    categories = []
    for prefix, title in (("", ""), ("probe.", "probe batch: ")):
        for name, pattern in CHARTS.items():
            keys = [prefix + key for key in known_keys(mixture) if re.match(pattern, key)]
            lines = lambda key: layout_pb2.MultilineChartContent(tag=[rf"^{re.escape(key)}/layer_\d+$"])
            charts = [layout_pb2.Chart(title=key, multiline=lines(key)) for key in keys]
            if charts:
                categories.append(layout_pb2.Category(title=title + name, chart=charts, closed=bool(prefix)))
    return layout_pb2.Layout(category=categories)


def sound_lines(path: Path) -> Iterator[tuple[bytes, dict[str, Any]]]:
    """Each line of a metrics.jsonl and what it holds, up to the first that is broken or half written."""
    for line in path.read_bytes().splitlines() if path.exists() else []:
        try:
            held = json.loads(line)
        except (ValueError, RecursionError):
            return
        if not isinstance(held, dict) or not isinstance(held.get("step"), int):
            return
        yield line + b"\n", held


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The lines of a metrics.jsonl; a half-written last line is left out."""
    return [held for _, held in sound_lines(path)]


def lines_before(path: Path, step: int) -> bytes:
    """The lines that tell of the steps before this one."""
    return b"".join(line for line, held in sound_lines(path) if held["step"] < step)


def digest_before(path: Path, step: int) -> str:
    """The SHA-256 of those lines."""
    return hashlib.sha256(lines_before(path, step)).hexdigest()


def keep_before(path: Path, step: int) -> None:
    """Drops the lines of `step` and later and whatever is broken, in one replacement of the file."""
    write(path, lines_before(path, step))
