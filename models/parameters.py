"""Parameters: how one is declared, and the table of a model's parameters by path, role and layer.

A model is built without values (its parameters hold shapes); `models.init` fills them in. Outside the model its parameters are
one flat dictionary {"stack.segments.0.unit.0.attention.q.weight": array}, so that masks, sharding, statistics and checkpoints
are loops over a dictionary.
"""

import math
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from flax import nnx

from configs.model import Model


def parameter(shape, role: str, axes: tuple[str | None, ...], *, constant: float | None = None, fan=None) -> nnx.Param:
    """A parameter without its value.

    `role` is its row in the parameter table ("attention.q"), `axes` the logical axes that `models.sharding` maps to the mesh,
    `constant` the initial value of norms and biases, `fan` the (inputs, outputs) of a product that is drawn at random.
    """
    return nnx.Param(jax.ShapeDtypeStruct(tuple(shape), jnp.float32), role=role, axes=axes, constant=constant, fan=fan)


@dataclass(frozen=True)
class Row:
    """One parameter: where it is, what it is for, and which layers it holds (None: it belongs to the frame)."""

    path: str
    role: str
    shape: tuple[int, ...]
    axes: tuple[str | None, ...]
    layers: tuple[int, ...] | None
    constant: float | None
    fan: tuple[int, int] | None

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def places(self) -> tuple[tuple[int | None, tuple[int, ...]], ...]:
        """(layer, index of its part) of each layer that it holds; of the frame (None, ())."""
        return ((None, ()),) if self.layers is None else tuple((layer, (index,)) for index, layer in enumerate(self.layers))

    @property
    def part_shape(self) -> tuple[int, ...]:
        """The shape of one layer's part; of the frame, the whole."""
        return self.shape if self.layers is None else self.shape[1:]

    @property
    def local_path(self) -> str:
        """The path inside its layer, the same whatever segment the layer is in."""
        return self.path if self.layers is None else self.path.split(".unit.", 1)[1].split(".", 1)[1]

    @property
    def group(self) -> str:
        """The coarse role by which decay masks and statistics go, one of configs.schema.ParameterGroup."""
        return group(self.role)


def group(role: str) -> str:
    if role.endswith(".bias"):
        return "norm" if role.startswith("norm") else "qk_norm" if role.startswith("qk_norm") else "bias"
    return "sinks" if role == "attention.sinks" else role.split(".")[0]


def dotted(path: tuple) -> str:
    return ".".join(map(str, path))


def table(model: nnx.Module) -> list[Row]:
    """The parameter table of a transformer, in the order of its paths."""
    rows = []
    for path, variable in nnx.to_flat_state(nnx.state(model, nnx.Param)):
        layers = None
        if path[:2] == ("stack", "segments"):
            segment = model.stack.segments[path[2]]
            layers = tuple(range(segment.start + path[4], segment.start + segment.repeats * len(segment.unit), len(segment.unit)))
        meta = variable.get_metadata()
        shape = tuple(variable.get_value().shape)
        rows.append(Row(dotted(path), meta["role"], shape, meta["axes"], layers, meta["constant"], meta["fan"]))
    return rows


def values(model: nnx.Module) -> dict[str, jax.Array]:
    """The model's parameters as a flat dictionary."""
    return {dotted(path): variable.get_value() for path, variable in nnx.to_flat_state(nnx.state(model, nnx.Param))}


def bind(model: nnx.Module, parameters: dict[str, jax.Array]) -> nnx.Module:
    """A copy of the model that holds these values: the inverse of `values`."""
    graph, state = nnx.split(model)
    nested: dict = {}
    for path, _ in nnx.to_flat_state(state):
        node = nested
        for key in path[:-1]:
            node = node.setdefault(key, {})
        node[path[-1]] = parameters[dotted(path)]
    return nnx.merge(graph, nested)


def counts(rows: list[Row]) -> dict[str, int]:
    """Number of parameters by role, and in all under "total"."""
    by_role: dict[str, int] = {}
    for row in rows:
        by_role[row.role] = by_role.get(row.role, 0) + row.size
    return by_role | {"total": sum(by_role.values())}


def flops_per_token(model: Model, rows: list[Row], sequence: int) -> float:
    """Floating-point operations of one training token: 3 (2 P + 4 h k c summed over layers).

    P counts the weights that a token is multiplied with (the head, tied or not, and of the experts its top_k included; the look-ups of
    embedding and positions not), c is the mean number of keys that a query sees under its causal window; the backward pass costs twice
    the forward one. Norms, softmax and activations are not counted. Source: Kaplan et al. 2020, arXiv 2001.08361, section 2.1, with
    exact causal attention.
    """
    products = sum(row.size * active(model, row) for row in rows if row.fan is not None and row.role not in ("embed", "positions"))
    if model.tied:
        products += model.vocab * model.width
    attention = 0.0
    for layer in model.layers:
        window = min(layer.attention.window or sequence, sequence)
        seen = window * (window + 1) / 2 + (sequence - window) * window
        k = layer.attention.width_of_head(model.width)
        attention += 4 * layer.attention.heads * k * seen / sequence
    return 3 * (2 * products + attention)


def active(model: Model, row: Row) -> float:
    """The share of a parameter that one token meets: of a mixture's experts top_k."""
    if row.role not in ("moe.up", "moe.gate", "moe.down"):
        return 1.0
    moe = model.layers[row.layers[0]].moe
    return moe.top_k / moe.experts
