"""A model in tables: what changes from layer to layer, its parameters, the contract of each norm, its sites; and two models compared."""

import dataclasses
import re
from collections.abc import Iterator
from typing import NamedTuple

from configs.knobs import diff, flatten
from configs.model import Layer, Model
from models import init, moe
from models.huggingface.canonical import differences
from models.norms import contracts
from models.parameters import counts, table
from models.stack import Segment
from models.taps import SITES
from models.transformer import Transformer


def warnings(model: Model) -> list[str]:
    """Lines about parts of a model that fight, or whose numbers do not mean what they seem to."""
    return [line for line in (init.warning(model), *moe.warnings(model.layers)) if line]


class Sheet(NamedTuple):
    """A table: its title, the names of its columns, its rows."""

    title: str
    columns: tuple[str, ...]
    rows: list[tuple]


def sheets(model: Transformer) -> Iterator[Sheet]:
    """Layers as segments, the common layer, parameters by role, norms, sites."""
    config, rows = model.config, table(model)
    common = Layer(**{knob.name: getattr(config, knob.name) for knob in dataclasses.fields(Layer)})
    segments = [segment(of, config, common) for of in model.stack.segments]
    yield Sheet("Layers, as segments", ("layers", "the places of the repeating unit"), segments)
    yield Sheet("The common layer", ("knob", "value"), list(flatten(common).items()))
    of_role = {role: [row for row in rows if role in (row.role, "total")] for role in counts(rows)}

    def shapes(role: str) -> str:
        found = {row.part_shape for row in of_role[role]}
        return "" if role == "total" else ", ".join(" x ".join(map(str, shape)) for shape in sorted(found))

    numbers = [(role, sum(len(row.layers or "1") for row in of_role[role]), shapes(role), f"{n:,}") for role, n in counts(rows).items()]
    yield Sheet("Parameters", ("role", "arrays", "shape of each", "numbers"), numbers)
    yield Sheet("Norms", ("where", "contract", "layers"), contracts(model))
    yield Sheet("Sites", ("site", "axes", "meaning"), [(name, site.axes, site.meaning) for name, site in SITES.items()])


def segment(of: Segment, config: Model, common: Layer) -> tuple[str, str]:
    """The layers of a segment, and what each layer of its unit has otherwise than the common one."""

    def place(index: int) -> str:
        changes = diff(config.layers[of.start + index], common)
        return f"+{index}: " + (", ".join(f"{knob} = {value!r}" for knob, (_, value) in changes.items()) or "as below")

    how = "unrolled" if of.unroll else "scanned"
    return f"{of.layers[0]} to {of.layers[-1]}: {len(of.unit)} x {of.repeats}, {how}", "\n".join(map(place, range(len(of.unit))))


def compared(first: Transformer, second: Transformer) -> Iterator[Sheet]:
    """Where two models differ: in knobs that reach the numbers, in the contracts of norms, in parameters by role."""
    by_knob: dict[tuple, list[str]] = {}
    for knob, (ours, theirs) in differences(first.config, second.config).items():
        match = re.fullmatch(r"layer (\d+)\.(.*)", knob)
        by_knob.setdefault((match[2] if match else knob, repr(ours), repr(theirs)), []).append(match[1] if match else "frame")
    yield Sheet("Knobs", ("knob", "first", "second", "layers"), [(*key, ", ".join(where)) for key, where in by_knob.items()])
    norms = [{(place, layers): words for place, words, layers in contracts(model)} for model in (first, second)]
    places = dict.fromkeys((*norms[0], *norms[1]))
    rows = [(place, layers, *(of.get((place, layers), "") for of in norms)) for place, layers in places]
    yield Sheet("Norms", ("where", "layers", "first", "second"), [row for row in rows if row[2] != row[3]])
    numbers = [counts(table(model)) for model in (first, second)]
    roles = dict.fromkeys((*numbers[0], *numbers[1]))
    yield Sheet("Parameters", ("role", "first", "second"), [(role, *(f"{of.get(role, 0):,}" for of in numbers)) for role in roles
                                                            if numbers[0].get(role) != numbers[1].get(role)])
