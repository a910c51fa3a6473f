"""Dispatch: every row gives the numbers and gradients of `dense`, on one device and on eight; what is dropped is counted and left alone."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models import parameters
from models.moe import Moe
from models.moe.dispatch import DISPATCHES, slots
from models.moe.experts import BLOCK, Experts, blocked, ragged
from models.sharding import parameter_shardings
from tests.models.reference import EPS, assert_close, build, draw, random_values, tiny, tokens
from tests.models.test_moe import layer
from tests.models.test_moe import run as run_mixture

pytestmark = pytest.mark.usefixtures("x64")

B, T, D, E = 2, 2 * BLOCK, 8, 4
ROUNDINGS = 4 * (B * T + 64)
"""A gradient sums over all tokens; its terms pass through some 64 roundings each; and both sides round."""

ROWS = sorted(DISPATCHES.keys() - {"dense"})
CASES = {
    "plain": {}, "one": {"top_k": 1, "normalise": False}, "all": {"top_k": E}, "rich": {"gated": True, "bias": True, "shared": 1},
    "expert choice": {"choice": "expert", "normalise": False},
    "all to one pair": {"selection_bias": True},  # its values are set so that two experts get every token and two none
}


@functools.cache
def measured(case: str, dispatch: str):
    """Output, and gradients of a loss by parameter and by input, of a case with room for everything."""
    module = Moe(layer(dispatch=dispatch, capacity=float(E), **CASES[case]), D, "float32")
    values = random_values(parameters.table(module))
    values |= {"selection": jnp.asarray([0.0, 9.0, 0.0, 9.0])} if "selection" in values else {}
    x, weight = jnp.asarray(draw("x", B, T, D)), draw("weight", B, T, D)

    @jax.jit
    @functools.partial(jax.value_and_grad, argnums=(0, 1), has_aux=True)
    def run(values, x):
        y, _, _ = run_mixture(parameters.bind(module, values), x)
        return (weight * y).sum(), y

    (_, y), gradients = run(values, x)
    return y, gradients


@pytest.mark.parametrize("dispatch", ROWS)
@pytest.mark.parametrize("case", CASES)
def test_rows_equal_dense(case, dispatch):
    """Output and every gradient, of weights, router and input, are those of all experts on all tokens: under an even and an uneven load,
    over several blocks, with experts that no token is sent to."""
    (y, found), (right, expected) = measured(case, dispatch), measured(case, "dense")
    assert_close(y, right, ROUNDINGS)
    for path, gradient in found[0].items():
        assert_close(gradient, expected[0][path], ROUNDINGS)
    assert_close(found[1], expected[1], ROUNDINGS)


def test_an_expert_without_tokens_has_no_gradient():
    """Where two experts get every token, the other two have a gradient of exactly zero, whatever the dispatch."""
    for dispatch in DISPATCHES:
        gradient = np.asarray(measured("all to one pair", dispatch)[1][0]["up"])
        np.testing.assert_array_equal(gradient[[0, 2]], 0)
        assert (np.abs(gradient[[1, 3]]).max((1, 2)) > 0).all()


SIZES = {"even": (130, 126, 128, 128), "uneven": (1, 0, 400, 111), "one": (0, 0, 0, 512), "none": (0, 0, 0, 0)}


@pytest.mark.parametrize("operands", ("float32", "bfloat16"))
@pytest.mark.parametrize("sizes", SIZES)
def test_blocks_are_the_ragged_product(sizes, operands):
    """On sorted rows the blocks of the CPU and jax.lax.ragged_dot agree, in results and gradients, and with each expert on its own rows."""
    config = layer(gated=True, bias=True, kind="silu")
    module = Moe(config, D, operands)
    values = random_values(parameters.table(module), "float32" if operands == "bfloat16" else "float64")
    experts = Experts(*(values[name] for name in Experts._fields))
    of = SIZES[sizes]
    rows, end = sum(of) + BLOCK, sum(of)
    x = jnp.asarray(draw("rows", rows, D), experts.up.dtype)
    weight = jnp.asarray(np.where(np.arange(rows)[:, None] < end, draw("weight", rows, D), 0), x.dtype)

    def run(way):
        program = jax.value_and_grad(lambda experts, x: (weight * way(config.mlp, operands, experts, x, jnp.asarray(of))).sum(), (0, 1))
        return jax.jit(program)(experts, x)

    found, expected = run(blocked), run(ragged)
    eps = EPS if operands == "float32" else 2 * 2.0**-8  # in the backward pass `ragged` rounds the gradient where `blocked` does, or not
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert_close(a, b, ROUNDINGS if operands == "float32" else 8, eps)


@pytest.mark.parametrize(("platform", "ragged_dots"), (("cpu", False), ("tpu", True), ("cuda", True)))
def test_accelerators_have_the_ragged_product(platform, ragged_dots):
    """For a TPU or a GPU `dropless` is jax.lax.ragged_dot; for a CPU, where that multiplies all rows with all experts, it is not."""
    module = Moe(layer(), D, "float32")
    shapes = {row.path: jax.ShapeDtypeStruct(row.shape, "float32") for row in parameters.table(module)}
    program = jax.jit(lambda values, x: run_mixture(parameters.bind(module, values), x)[0])
    text = program.trace(shapes, jax.ShapeDtypeStruct((B, 16, D), "float32")).lower(lowering_platforms=(platform,)).as_text()
    assert ("ragged_dot" in text) == ragged_dots and ("while" in text) != ragged_dots


def kept_by_hand(chosen: np.ndarray, size: int) -> np.ndarray:
    """The first `size` assignments of each expert and sequence."""
    kept = np.zeros_like(chosen)
    for b, e in np.ndindex(chosen.shape[0], chosen.shape[2]):
        kept[b, np.flatnonzero(chosen[b, :, e])[:size], e] = True
    return kept


@pytest.mark.parametrize("capacity", (1.0, 1.25, 2.0))
def test_what_finds_no_slot_is_counted_and_adds_nothing(capacity):
    """Each expert takes its first `slots` tokens of a sequence; the output is `dense` with the weights of the others zero, down biases
    included, and the share of those is reported. Here two experts are chosen by every token, which fits where capacity is 2."""
    t, config = 16, layer(dispatch="capacity", capacity=capacity, bias=True, selection_bias=True)
    module = Moe(config, D, "float32")
    values = random_values(parameters.table(module)) | {"selection": jnp.asarray([0.0, 9.0, 0.0, 9.0])}
    x = jnp.asarray(draw("x", B, t, D))
    y, _, seen = run_mixture(parameters.bind(module, values), x, ("router.weights", "router.dropped"))
    chosen = np.asarray(seen["router.weights"]) > 0
    kept = kept_by_hand(chosen, int(np.ceil(capacity * 2 * t / E)))
    assert slots(config.moe, t) == np.ceil(capacity * 2 * t / E)
    np.testing.assert_allclose(seen["router.dropped"], 1 - kept.sum() / chosen.sum(), atol=4 * EPS)

    oracle = parameters.bind(Moe(layer(bias=True, selection_bias=True, dispatch="dense"), D, "float32"), values)
    masked = {"router.weights": (jnp.asarray(kept, x.dtype), jnp.zeros(()))}
    assert_close(y, run_mixture(oracle, x, edits=masked)[0], ROUNDINGS)
    lost = ~kept.any(-1)
    np.testing.assert_array_equal(np.asarray(y)[lost], 0)
    assert lost.any() == (capacity < 2) == (seen["router.dropped"] > 0)


MESHES = {"experts": (2, 1, 1, 4), "all": (1, 2, 2, 2)}


@pytest.mark.parametrize("dispatch", DISPATCHES)
@pytest.mark.parametrize("mesh", MESHES)
def test_eight_devices_equal_one(mesh, dispatch):
    """Experts over devices, with data or with fsdp and tensor beside them, give the loss, gradients, loads and drops of one device."""
    model = tiny({"depth": 2, "stack": "scan", "moe.experts": 4, "moe.dispatch": dispatch, "moe.capacity": 1.0, "moe.shared": 1,
                  "mlp.bias": True, "mlp.gated": True, "moe.selection_bias": True})
    module, rows, values = build(model)
    batch, counted = tokens(8), np.arange(8)[:, None] + np.arange(8) > 3

    def loss(values):
        out = parameters.bind(module, values)(batch, counted=jnp.asarray(counted))
        judged = sum(of.balance + of.squared_lse for of in out.routing)
        return (draw("weight", 8, 8, 32) * out.logits).mean() + judged, (out.logits, [of.load for of in out.routing])

    program = lambda: jax.jit(jax.value_and_grad(loss, has_aux=True))
    expected = program()(values)
    devices = jax.make_mesh(MESHES[mesh], ("data", "fsdp", "tensor", "expert"), axis_types=(jax.sharding.AxisType.Auto,) * 4)
    with jax.set_mesh(devices):
        found = program()(jax.device_put(values, parameter_shardings(rows, devices)))
    logits = found[0][1][0]
    assert logits.sharding.shard_shape(logits.shape)[0] == 8 // (8 // MESHES[mesh][2])
    jax.tree.map(lambda a, b: assert_close(a, b, 40 * ROUNDINGS), found, expected)


def test_experts_lie_in_parts():
    """A device holds its share of the experts, of their width's fsdp share and of their hidden units; the router is whole."""
    devices = jax.make_mesh((1, 2, 2, 2), ("data", "fsdp", "tensor", "expert"), axis_types=(jax.sharding.AxisType.Auto,) * 4)
    _, rows, values = build(tiny({"depth": 2, "moe.experts": 4, "mlp.bias": True, "moe.selection_bias": True}), dtype="float32")
    placed = jax.device_put(values, parameter_shardings(rows, devices))
    parts = {row.role: placed[row.path].addressable_shards[0].data.shape for row in rows if row.role.startswith("moe")}
    assert parts == {"moe.up": (2, 2, 8, 12), "moe.down": (2, 2, 12, 8), "moe.up.bias": (2, 2, 12), "moe.down.bias": (2, 2, 8),
                     "moe.router": (2, 8, 4), "moe.selection.bias": (2, 4)}
