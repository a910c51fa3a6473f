"""The stack: segments, and that scanning, unrolling and rematerialisation change no number and no order."""

import collections
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.extend.core import jaxprs_in_params

from configs.attention import Attention
from configs.model import Layer
from models import parameters
from models.stack import REMATS, in_layer_order, segments
from models.taps import Edit, Probe, Taps
from models.transformer import Transformer
from tests.models.reference import assert_close, build, roundings, tiny, tokens

KINDS = [Layer(attention=Attention(window=window)) for window in (1, 2, 3)]


@settings(deadline=None, database=None, derandomize=True)
@given(st.lists(st.sampled_from(KINDS), max_size=14))
def test_segments_cover_the_layers_in_order(layers):
    """Unrolling the segments gives the list of layers back; no segment is empty."""
    found = segments(layers)
    assert [layer for start, period, repeats in found for layer in layers[start : start + period] * repeats] == layers
    assert [start for start, _, _ in found] == [sum(p * r for _, p, r in found[:n]) for n in range(len(found))]


@settings(deadline=None, database=None, derandomize=True)
@given(st.lists(st.sampled_from(KINDS), min_size=1, max_size=4), st.integers(2, 4))
def test_a_pure_repeat_is_one_segment(unit, repeats):
    """Any unit repeated from the first layer to the last is one segment, with the shortest unit that does it."""
    layers = unit * repeats
    [(start, period, count)] = segments(layers)
    shortest = min(n for n in range(1, len(unit) + 1) if len(layers) % n == 0 and layers[:n] * (len(layers) // n) == layers)
    assert (start, period, count) == (0, shortest, len(layers) // shortest)


@pytest.mark.parametrize(("changes", "expected"), (
    ({"depth": 26, "pattern": ("attention.window=4",) * 5 + ("",)}, [(0, 6, 4), (24, 1, 2)]),  # Gemma 3, 26 layers
    ({"depth": 9, "overrides": ("0: mlp.width=8",)}, [(0, 1, 1), (1, 1, 8)]),  # a different first layer
    ({"depth": 8, "norm.placement": "mix"}, [(0, 1, 2), (2, 1, 6)]),
    ({"depth": 8, "norm.placement": "layernorm_scaling"}, [(0, 1, 8)]),  # factors by layer are inputs, not structure
    ({"depth": 1}, [(0, 1, 1)]),
))
def test_known_stacks(changes, expected):
    """Gemma's five to one, a dense first layer, Mix-LN and LayerNorm Scaling group as (start, period, repeats)."""
    assert segments(tiny(changes).layers) == expected


MIXED = {"depth": 5, "pattern": ("attention.window=3 norm.placement=sandwich", ""), "norm.placement": "layernorm_scaling"}
MODES = [(stack, remat) for stack in ("unroll", "scan") for remat in REMATS]


@functools.cache
def everything(stack: str, remat: str):
    """Loss, gradients, records and probes of one model, run in one of the ways."""
    model = tiny(MIXED | {"stack": stack})
    module, _, values = build(model)
    weight = jnp.asarray(np.random.default_rng(1).standard_normal((2, 8, model.vocab)))
    rms = lambda x: jnp.sqrt(jnp.mean(x**2))

    @jax.jit
    @functools.partial(jax.value_and_grad, argnums=(0, 1), has_aux=True)
    def run(values, carriers):
        taps = Taps(record={"resid.post": rms, "attn.entropy": lambda x: x.mean((0, 1)), "resid.final": rms},
                    edits={"mlp.out": Edit(jnp.linspace(0.5, 1.5, 5), jnp.zeros(5))},
                    probes={site: Probe(carrier, rms) for site, carrier in carriers.items()})
        out = parameters.bind(module, values)(tokens(), taps=taps, remat=remat)
        return (weight * out.logits).mean(), out.records

    return model, run(values, {"attn.out": jnp.zeros(5), "resid.pre": jnp.zeros(5), "embed": jnp.zeros(())})


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize(("stack", "remat"), MODES[1:])
def test_scanned_unrolled_and_rematerialised(stack, remat):
    """Loss, gradients, records and probes are the same scanned or unrolled, whatever the backward pass recomputes."""
    model, expected = everything(*MODES[0])
    _, found = everything(stack, remat)
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    jax.tree.map(lambda a, b: assert_close(a, b, 3 * roundings(model)), found, expected)


@pytest.mark.parametrize("stack", ("scan", "unroll"))
def test_parameters_do_not_depend_on_the_way(stack):
    """Scanned or unrolled, a model has the same parameters, stacked: checkpoints serve both."""
    rows = lambda stack: parameters.table(Transformer(tiny(MIXED | {"stack": stack})))
    assert rows(stack) == rows("auto")


def operations(jaxpr) -> collections.Counter:
    """How often a program names each operation: in what it calls once per call, in the body of a loop once."""
    found = collections.Counter(equation.primitive.name for equation in jaxpr.eqns)
    return sum((operations(inner) for equation in jaxpr.eqns for inner in jaxprs_in_params(equation.params)), found)


@pytest.mark.parametrize("operands", ("float32", "bfloat16"))
@pytest.mark.parametrize("stack", ("scan", "unroll"))
def test_what_remat_recomputes(stack, operands):
    """Under `full` the gradient repeats every product of a layer but the last, whose result no gradient needs; under `dots`, none;
    both repeat the cheap functions."""
    model = tiny({"stack": stack, "attention.softcap": 5.0})
    module = Transformer(model, operands=operands)
    arguments = {row.path: jax.ShapeDtypeStruct(row.shape, "float32") for row in parameters.table(module)}
    bodies = 1 if stack == "scan" else model.depth

    def program(remat):
        loss = lambda values: parameters.bind(module, values)(tokens(), remat=remat).logits.sum()
        return operations(jax.make_jaxpr(jax.grad(loss))(arguments).jaxpr)

    counts = {remat: program(remat) for remat in REMATS}
    products, caps = ({remat: counts[remat][name] for remat in REMATS} for name in ("dot_general", "tanh"))
    assert products["dots"] == products["none"]
    assert products["full"] == products["none"] + 7 * bodies  # q, k, v, scores, values, out, up
    assert caps == {"none": bodies, "dots": 2 * bodies, "full": 2 * bodies}


ORDERS = {"plain": {}, "period 2": {"pattern": ("", "attention.window=4")}, "period 5": {"pattern": ("attention.window=4",) * 4 + ("",)},
          "odd one out": {"overrides": ("7: attention.window=4",)}, "reversed": {"pattern": ("attention.window=4", "")}}


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("stack", ("scan", "unroll"))
@pytest.mark.parametrize("order", ORDERS)
def test_records_are_in_layer_order(order, stack):
    """A constant planted behind each of 12 layers is read at the entry of the next: edits, layers and records have one order."""
    depth = 12
    module, _, _ = build(tiny(ORDERS[order] | {"depth": depth, "stack": stack}))
    planted = jnp.arange(1.0, depth + 1)
    taps = Taps(record={"resid.pre": jnp.max, "resid.post": jnp.min, "resid.mid": lambda x: x[0, 0, :2]},
                edits={"resid.post": Edit(jnp.zeros(depth), planted)})
    records = module(tokens(), taps=taps).records
    np.testing.assert_array_equal(records["resid.pre"][1:], planted[:-1])
    np.testing.assert_array_equal(records["resid.post"], planted)
    assert records["resid.mid"].shape == (depth, 2)


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("stack", ("scan", "unroll"))
def test_layers_of_different_shapes(stack):
    """Where layers differ in heads or width, a record is a list with one entry a layer, each that of its own layer."""
    model = tiny({"depth": 4, "overrides": ("1: attention.heads=2", "3: mlp.width=8"), "stack": stack})
    module, _, values = build(model)
    taps = Taps(record={"attn.entropy": lambda x: x.mean((0, 1)), "mlp.hidden": lambda x: x, "mlp.in": lambda x: x})
    records = module(tokens(), taps=taps).records
    assert [x.shape for x in records["attn.entropy"]] == [(4,), (2,), (4,), (4,)]
    assert [x.shape[-1] for x in records["mlp.hidden"]] == [24, 24, 24, 8]
    assert records["mlp.in"].shape == (4, 2, 8, 16)
    ups = {layer: values[row.path][n] for row in parameters.table(module) if row.role == "mlp.up" for n, layer in enumerate(row.layers)}
    for layer in range(4):
        hidden = jax.nn.gelu(records["mlp.in"][layer] @ ups[layer], approximate=False)
        assert_close(records["mlp.hidden"][layer], hidden, 3 * model.width)


def test_layers_without_a_value():
    """A layer that has no record of a site holds None; trees of arrays are sorted leaf by leaf."""
    found = in_layer_order([([1, 3], jnp.asarray([10.0, 30.0]))], 4)
    assert [None if x is None else float(x) for x in found] == [None, 10.0, None, 30.0]
    tree = in_layer_order([([1, 3], {"a": jnp.asarray([1, 3])}), ([0, 2], {"a": jnp.asarray([0, 2])})], 4)
    np.testing.assert_array_equal(tree["a"], [0, 1, 2, 3])
