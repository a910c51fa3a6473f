"""What a training step takes on a mesh that is not here: compiled ahead of time for as many virtual devices, never run."""

import re
from collections import Counter
from typing import NamedTuple

import jax
import numpy as np

from configs.knobs import replace
from configs.schema import Experiment
from models.stack import REMATS
from train.mesh import make_mesh
from train.state import make_plan
from train.step import make_step

COLLECTIVES = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute")
WIDTHS = {"pred": 1, "s8": 1, "u8": 1, "bf16": 2, "f16": 2, "s16": 2, "f32": 4, "s32": 4, "u32": 4, "f64": 8, "s64": 8, "u64": 8}


class Ahead(NamedTuple):
    """Bytes on each device, and collectives of one step as {kind: (how many, bytes that each device receives)}."""

    parameters: int
    optimizer: int
    activations: dict[str, int]
    collectives: dict[str, tuple[int, int]]

    @property
    def sheet(self) -> tuple[str, tuple[str, str], list[tuple[str, str]]]:
        """As a table: title, columns, rows."""
        rows = [("parameters", f"{self.parameters:,} bytes"), ("optimiser", f"{self.optimizer:,} bytes")]
        rows += [(f"temporaries, train.remat = {remat}", f"{size:,} bytes") for remat, size in self.activations.items()]
        rows += [(f"{kind}, in one step", f"{count:,} times, {size:,} bytes") for kind, (count, size) in self.collectives.items()]
        return "On each device, from the compiler", ("what", "how much"), rows


def ahead(config: Experiment) -> Ahead:
    """Compiles the quiet step for the config's mesh with each remat policy; collectives are those of the config's own."""
    mesh = make_mesh(config.mesh)
    activations, collectives, plan = {}, {}, make_plan(config, mesh)
    for remat in REMATS:
        compiled = step(replace(config, {"train.remat": remat}), mesh)
        activations[remat] = compiled.memory_analysis().temp_size_in_bytes
        if remat == config.train.remat:
            collectives = collectives_of(compiled.as_text())
    shapes = plan.shapes()
    return Ahead(on_device(shapes.parameters), on_device(shapes.optimizer), activations, collectives)


def step(config: Experiment, mesh: jax.sharding.Mesh):
    """The compiled quiet step of a config."""
    plan = make_plan(config, mesh)
    return make_step(plan, loud=False).lower(plan.shapes(), plan.tokens(config.data.batch)).compile()


def on_device(shapes) -> int:
    """Bytes of a tree of arrays on one device."""
    return sum(int(np.prod(leaf.sharding.shard_shape(leaf.shape))) * leaf.dtype.itemsize for leaf in jax.tree.leaves(shapes))


def collectives_of(program: str) -> dict[str, tuple[int, int]]:
    """The collectives in the text of a compiled program, those in a loop as often as it turns: {kind: (how many, bytes)}."""
    bodies = {match[1]: match[2] for match in re.finditer(r"^(?:ENTRY )?%?([\w.-]+) \(.*?\{\n(.*?)^\}", program, re.M | re.S)}
    entry = re.search(r"^ENTRY %?([\w.-]+)", program, re.M)[1]
    counts: Counter[str] = Counter()
    sizes: Counter[str] = Counter()

    def visit(name: str, times: int) -> None:
        for line in bodies.get(name, "").splitlines():
            found = re.search(rf"= (\(.*?\)|\S+) ({'|'.join(COLLECTIVES)})(?:-start)?\(", line)
            if found:
                counts[found[2]] += times
                sizes[found[2]] += times * bytes_of(found[1])
            loop = re.search(r"\bwhile\(.*body=%?([\w.-]+)", line)
            turns = re.search(r'"known_trip_count":\{"n":"(\d+)"\}', line)
            if loop:
                visit(loop[1], times * (int(turns[1]) if turns else 1))
            for called in re.findall(r"(?:calls|to_apply|true_computation|false_computation)=%?([\w.-]+)", line):
                visit(called, times)

    visit(entry, 1)
    return {kind: (counts[kind], sizes[kind]) for kind in COLLECTIVES if counts[kind]}


def bytes_of(shape: str) -> int:
    """Bytes of a shape such as f32[8,16]{1,0}, or of a tuple of such."""
    arrays = re.findall(r"(\w+)\[([\d,]*)\]", shape)
    return sum(WIDTHS.get(kind, 0) * int(np.prod([int(size) for size in sizes.split(",") if size] or [1])) for kind, sizes in arrays)
