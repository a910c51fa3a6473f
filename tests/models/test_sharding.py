"""Sharding: eight devices compute what one does, and parameters really lie in parts."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from models import parameters
from models.sharding import constrain, parameter_shardings, partition
from models.taps import Taps
from models.transformer import Transformer
from tests.models.reference import assert_close, build, roundings, tiny, tokens

BATCH = 4


@pytest.fixture(scope="module")
def mesh():
    return jax.make_mesh((2, 2, 2, 1), ("data", "fsdp", "tensor", "expert"), axis_types=(jax.sharding.AxisType.Auto,) * 4)


def program(module):
    """Loss, gradients, logits and records, compiled."""
    weight = np.random.default_rng(1).standard_normal((BATCH, 8, 32))

    def loss(values):
        sites = ("attn.max", "attn.entropy", "attn.cosine", "resid.post", "mlp.hidden")
        taps = Taps(record={site: lambda x: jnp.sqrt(jnp.mean(x**2)) for site in sites})
        out = parameters.bind(module, values)(tokens(BATCH), taps=taps)
        return (weight * out.logits).mean(), (out.logits, out.records)

    return jax.jit(jax.value_and_grad(loss, has_aux=True))


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize(("kind", "kv_heads"), (  # tensor = 2 does not divide one head
    ("none", 4), ("none", 1), ("head", 2), ("head", 1), ("head_each", 2), ("head_each", 1),
    ("whole", 2), ("whole", 1), ("l2", 2), ("l2", 1),
))
def test_eight_devices_equal_one(kind, kv_heads, mesh):
    """Over data, fsdp and tensor, with every QK-norm, loss, gradients, logits and records are those of one device."""
    model = tiny({"depth": 2, "stack": "scan", "norm.placement": "sandwich", "attention.qk_norm.kind": kind,
                  "attention.kv_heads": kv_heads})
    module, rows, values = build(model)
    expected = program(module)(values)
    with jax.set_mesh(mesh):
        found = program(module)(jax.device_put(values, parameter_shardings(rows, mesh)))
    logits = found[0][1][0]
    assert logits.sharding.shard_shape(logits.shape) == (BATCH // 4, 8, 32 // 2)
    jax.tree.map(lambda a, b: assert_close(a, b, 3 * roundings(model)), found, expected)


@pytest.mark.parametrize(("kv_heads", "kv_share"), ((2, 1), (1, 1), (4, 2)))
def test_parameters_lie_in_parts(kv_heads, kv_share, mesh):
    """A device holds half the width (fsdp) and half the heads, hidden units and vocabulary (tensor); what cannot be halved, whole."""
    model = tiny({"depth": 2, "attention.kv_heads": kv_heads, "attention.qk_norm.kind": "whole", "mlp.bias": True, "tied": False})
    _, rows, values = build(model, dtype="float32")
    placed = jax.device_put(values, parameter_shardings(rows, mesh))
    parts = {row.role: placed[row.path].addressable_shards[0].data.shape for row in rows}
    assert parts == {
        "embed": (16, 8), "head": (8, 16), "norm.final.scale": (8,), "norm.scale": (2, 8),
        "attention.q": (2, 8, 2, 4), "attention.k": (2, 8, kv_share, 4), "attention.v": (2, 8, kv_share, 4), "attention.out": (2, 2, 4, 8),
        "qk_norm.q.scale": (2, 2, 4), "qk_norm.k.scale": (2, kv_share, 4),
        "mlp.up": (2, 8, 12), "mlp.down": (2, 12, 8), "mlp.up.bias": (2, 12), "mlp.down.bias": (2, 8),
    }
    for row in rows:  # the parts of the eight devices make up the whole
        whole = np.zeros(row.shape, np.float32)
        for shard in placed[row.path].addressable_shards:
            whole[shard.index] = shard.data
        np.testing.assert_array_equal(whole, values[row.path])


def test_what_does_not_divide_is_replicated(mesh):
    """An odd vocabulary or batch is kept whole on every device; unnamed axes always are."""
    assert partition(("vocab", "embed"), (31, 16), mesh) == PartitionSpec(None, "fsdp")
    assert partition(("b", "t", "v"), (8, 8, 32), mesh) == PartitionSpec(("data", "fsdp", "expert"), None, "tensor")
    assert partition(("b", "t", "v"), (6, 8, 32), mesh) == PartitionSpec(None, None, "tensor")
    assert partition(("layers", None), (4, 4), mesh) == PartitionSpec(None, None)


def test_axes_of_parameters_are_known():
    """Each axis of each parameter is None, the stack of layers, or an axis that the table maps."""
    model = tiny({"attention.sinks": True, "attention.bias": ("q", "k", "v", "out"), "mlp.gated": True, "mlp.bias": True, "norm.bias": True,
                  "attention.qk_norm.kind": "whole", "attention.qk_norm.values": True, "tied": False})
    axes = {axis for row in parameters.table(Transformer(model)) for axis in row.axes}
    assert axes == {None, "layers", "embed", "vocab", "heads", "kv_heads", "mlp"}


def test_without_a_mesh_nothing_is_constrained():
    """Outside a mesh an activation passes as the same object."""
    x = jnp.ones((2, 3, 4))
    assert constrain(x, ("b", "t", "d")) is x
