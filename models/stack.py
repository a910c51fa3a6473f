"""The list of layers as scanned segments.

Equal repeats of a unit of layers form a segment; its parameters are stored stacked over the repeats, and it runs as one
`jax.lax.scan` or unrolled, with the same numbers, traced once either way. Scanned, compile time does not grow with depth; checkpoints do
not depend on the choice. What differs from layer to layer (residual factors, edits, probes, keys) enters the scan as an input.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from configs.model import Layer as LayerConfig
from configs.model import Model
from models.attention import Attention
from models.mlp import Mlp
from models.moe import Moe
from models.moe.balance import Routing
from models.norms import PLACEMENTS, Factors, Residual, factors, slots
from models.precision import Operands
from models.projection import PRODUCT
from models.taps import Tap, Taps

UNROLLED = 8
"""`model.stack` = "auto" unrolls a segment of at most so many repeats: faster on a CPU by 1.15 at 6 layers, and compiles as fast."""

KEEP_PRODUCTS = jax.checkpoint_policies.save_from_both_policies(
    jax.checkpoint_policies.dots_saveable, jax.checkpoint_policies.save_only_these_names(PRODUCT)
)

REMATS: dict[str, Callable] = {
    "none": lambda body: body,
    "dots": lambda body: jax.checkpoint(body, policy=KEEP_PRODUCTS),
    "full": jax.checkpoint,
}
"""What the backward pass keeps of a unit of layers."""


class Layer(nnx.Module):
    """Attention and MLP (or a mixture), each a residual branch; in a parallel placement both read the same input."""

    def __init__(self, config: LayerConfig, width: int, rows: int, operands: Operands):
        self.parallel = PLACEMENTS[config.norm.placement].parallel
        attention_slots, mlp_slots = slots(config.norm)
        self.attention_residual = Residual(config.norm, attention_slots, width)
        self.attention = Attention(config, width, rows, operands)
        self.mlp_residual = Residual(config.norm, mlp_slots, width)
        self.mlp = Mlp(config.mlp, width, operands) if config.moe.experts is None else Moe(config, width, operands)

    def __call__(
        self, x: Float[Array, "b t d"], positions: Int[Array, "t"], scale: Factors, tap: Tap, counted: Bool[Array, "b t"] | None = None,
        key: Array | None = None,
    ) -> tuple[Float[Array, "b t d"], Routing | None]:
        """The stream after the layer, and of a mixture its routing."""
        x = tap("resid.pre", x)
        z = self.attention_residual.enter(x, scale)
        y = tap("attn.out", self.attention(tap("attn.in", z), positions, tap))
        x = tap("resid.mid", self.attention_residual.leave(x, y, scale))
        z = z if self.parallel else self.mlp_residual.enter(x, scale)
        z = tap("mlp.in", z)
        y, routing = self.mlp(z, tap, counted=counted, key=key) if isinstance(self.mlp, Moe) else (self.mlp(z, tap), None)
        scale = scale._replace(alpha=1.0) if self.parallel else scale
        return tap("resid.post", self.mlp_residual.leave(x, tap("mlp.out", y), scale)), routing


class Segment(nnx.Module):
    """`repeats` times the layers of `unit`, the first of them layer `start`; the parameters of unit[j] are stacked over the repeats."""

    def __init__(self, unit: Sequence[LayerConfig], start: int, repeats: int, model: Model, rows: int, operands: Operands):
        self.start, self.repeats = start, repeats
        self.unroll = model.stack == "unroll" or (model.stack == "auto" and repeats <= UNROLLED)
        stacked = lambda leaf: jax.ShapeDtypeStruct((repeats, *leaf.shape), leaf.dtype)
        self.unit = nnx.List([jax.tree.map(stacked, Layer(config, model.width, rows, operands)) for config in unit])
        for layer in self.unit:
            for _, variable in nnx.iter_graph(layer):
                if isinstance(variable, nnx.Param):
                    variable.set_metadata(axes=("layers", *variable.get_metadata()["axes"]))

    @property
    def layers(self) -> range:
        return range(self.start, self.start + self.repeats * len(self.unit))

    def __call__(self, x, positions, scale: Factors, taps: Taps, inputs: dict, counted, keys, remat: str):
        """The stream after the segment, and for each layer of the unit its records and its routing, stacked over the repeats."""

        def body(x, slices):
            unit, scale, inputs, keys = slices
            found = []
            for index, layer in enumerate(unit):
                of_layer = lambda tree, index=index: jax.tree.map(lambda leaf: leaf[index], tree)
                tap = Tap(taps, of_layer(inputs))
                x, routing = layer(x, positions, of_layer(scale), tap, counted, of_layer(keys))
                found.append((tap.records, routing))
            return x, found

        body = REMATS[remat](body)
        mine = slice(self.layers.start, self.layers.stop)
        by_repeat = lambda leaf: leaf[mine].reshape(self.repeats, len(self.unit), *leaf.shape[1:])
        slices = (self.unit, *jax.tree.map(by_repeat, (scale, inputs, keys)))
        if not self.unroll:
            return jax.lax.scan(body, x, slices)
        body, found = jax.jit(body), []  # traced once for all repeats; the compiler inlines the calls
        for repeat in range(self.repeats):
            x, of_repeat = body(x, jax.tree.map(lambda leaf, repeat=repeat: leaf[repeat], slices))
            found.append(of_repeat)
        return x, jax.tree.map(lambda *leaves: jnp.stack(leaves), *found)


class Stack(nnx.Module):
    """All layers, as segments."""

    def __init__(self, model: Model, rows: int, operands: Operands):
        layers = model.layers
        self.segments = nnx.List(
            [Segment(layers[start : start + period], start, repeats, model, rows, operands) for start, period, repeats in segments(layers)]
        )
        self.factors = Factors(*zip(*(factors(layer.norm, index, len(layers)) for index, layer in enumerate(layers)), strict=True))

    def __call__(self, x: Float[Array, "b t d"], positions: Int[Array, "t"], taps: Taps, counted, key: Array | None, remat: str):
        """The stream after the last layer, the records of each site in layer order, and the routing of each layer."""
        parts: dict[str, list] = {}
        inputs, depth = taps.inputs(), len(self.factors.gain)
        routings: list[Routing | None] = [None] * depth
        if any(leaf.shape[:1] != (depth,) for leaf in jax.tree.leaves(inputs)):
            raise ValueError(f"edits and probes at the sites of the layers need a leading axis of {depth} layers")
        scale = Factors(*(jnp.asarray(factor, x.dtype) for factor in self.factors))
        keys = None if key is None else jax.vmap(functools.partial(jax.random.fold_in, key))(jnp.arange(depth))
        for segment in self.segments:
            x, found = segment(x, positions, scale, taps, inputs, counted, keys, remat)
            for index, (records, routing) in enumerate(found):
                layers = segment.layers[index :: len(segment.unit)]
                for site, value in records.items():
                    parts.setdefault(site, []).append((layers, value))
                for repeat, layer in enumerate(layers):
                    routings[layer] = jax.tree.map(lambda leaf, repeat=repeat: leaf[repeat], routing)
        return x, {site: in_layer_order(of_site, depth) for site, of_site in parts.items()}, routings


def segments(layers: Sequence[LayerConfig]) -> list[tuple[int, int, int]]:
    """(start, period, repeats) of each segment: at each start the period that covers most layers by repeating, the shortest of those."""
    found, start = [], 0
    while start < len(layers):
        best = (1, 1)
        for period in range(1, (len(layers) - start) // 2 + 1):
            unit, repeats = layers[start : start + period], 1
            while layers[start + repeats * period : start + (repeats + 1) * period] == unit:
                repeats += 1
            if repeats > 1 and period * repeats > best[0] * best[1]:
                best = (period, repeats)
        found.append((start, *best))
        start += best[0] * best[1]
    return found


def in_layer_order(parts: list[tuple[Sequence[int], Any]], depth: int):
    """Values of some layers each, stacked, as one sequence by layer: arrays [layers, …] where every layer has the same shapes, else a
    list with one entry per layer, None where a layer has no value."""
    layers = [layer for of_part, _ in parts for layer in of_part]
    shapes = {(jax.tree.structure(value), *(leaf.shape[1:] for leaf in jax.tree.leaves(value))) for _, value in parts}
    if len(shapes) > 1 or len(layers) < depth:
        by_layer: list = [None] * depth
        for of_part, value in parts:
            for index, layer in enumerate(of_part):
                by_layer[layer] = jax.tree.map(lambda leaf, index=index: leaf[index], value)
        return by_layer
    joined = jax.tree.map(lambda *leaves: jnp.concatenate(leaves), *(value for _, value in parts))
    if layers == sorted(layers):
        return joined
    order = jnp.asarray(sorted(range(depth), key=layers.__getitem__))
    return jax.tree.map(lambda leaf: leaf[order], joined)
