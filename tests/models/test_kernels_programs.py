"""Attention kernels as programs: their memory, devices that need not talk, the compilers of accelerators, and what `auto` stands for."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractDevice, AbstractMesh, AxisType, NamedSharding

from configs.attention import Attention, Kernel
from models.kernels import DENSE, KERNELS, attend, choose
from models.kernels.pallas import pallas
from models.sharding import partition
from tests.models.reference import EPS32, draw

H, G, K = 4, 2, 16
COLLECTIVES = r"all-reduce|all-gather|all-to-all|collective-permute|reduce-scatter"


def backward(attention):
    """Statistics and the gradients of q, k and v."""
    def loss(q, k, v, gradient):
        out, stats = attention(q, k, v)
        return (out * gradient).sum(), stats

    return jax.jit(jax.grad(loss, (0, 1, 2), has_aux=True))


def bytes_held(kernel: str, t: int) -> int:
    """Temporary memory of forward and backward pass with all statistics, as the compiler plans it."""
    x = jax.ShapeDtypeStruct((1, t, H, K), jnp.float32)
    program = backward(functools.partial(attend, kernel=kernel, scale=0.25))
    return program.lower(x, x, x, x).compile().memory_analysis().temp_size_in_bytes


def test_chunked_memory_is_linear_in_time():
    """At 8,192 tokens `chunked` holds at most an eighth of what `dense` does, forward and backward, and with twice the tokens twice as
    much: the one block of logits, which stays as it is, is less than a twentieth."""
    held = bytes_held("chunked", 8192)
    assert held <= bytes_held("dense", 8192) / 8
    assert 1.9 * held <= bytes_held("chunked", 16384) <= 2 * held


MESH = {"data": 2, "fsdp": 1, "tensor": 2, "expert": 1}


@pytest.mark.parametrize("kernel", ("dense", "chunked", "pallas"))
@pytest.mark.parametrize("kv_heads", (1, 2))
def test_devices_need_not_talk(kernel, kv_heads):
    """Where sequences lie over `data` and heads over `tensor`, each device computes its part, gradients too, and the numbers are the same.
    Only key heads that `tensor` does not divide, whole on each device, have their gradients summed."""
    mesh = jax.make_mesh(tuple(MESH.values()), tuple(MESH), axis_types=(AxisType.Auto,) * 4, devices=jax.devices()[:4])
    arrays = [jnp.asarray(draw(name, 2, 40, heads, K), jnp.float32) for name, heads in zip("qkvg", (H, kv_heads, kv_heads, H), strict=True)]
    program = backward(functools.partial(attend, kernel=kernel, scale=0.25))
    expected = program(*arrays)
    with jax.set_mesh(mesh):
        placed = [jax.device_put(x, NamedSharding(mesh, partition(("b", None, "h", None), x.shape, mesh))) for x in arrays]
        program = backward(functools.partial(attend, kernel=kernel, scale=0.25)).lower(*placed).compile()
        found = program(*placed)
    if kv_heads > 1:
        assert not re.findall(COLLECTIVES, program.as_text())
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=40 * K * EPS32 * np.abs(b).max())


TARGETS = {"tpu": ("tpu", "TPU v5e", "tpu_custom_call"), "gpu": ("cuda", "NVIDIA H100 80GB HBM3", "xla.gpu.triton")}


@pytest.mark.parametrize("platform", TARGETS)
@pytest.mark.parametrize("dtype", ("float32", "bfloat16"))
def test_accelerators_take_the_programs(platform, dtype):
    """Forward and both backward programs, with every feature, are lowered for TPUs and GPUs, whose rules of layout are checked there."""
    shapes = [jax.ShapeDtypeStruct((2, 300, heads, 64), dtype) for heads in (H, G, G, H)]
    segments, sinks = jnp.zeros((2, 300), jnp.int32), jnp.zeros(H)
    features = {"scale": 0.1, "softcap": 30.0, "window": 100, "sinks": sinks, "segments": segments, "offset": 0, "operands": "float32"}
    target, device, call = TARGETS[platform]
    program = backward(functools.partial(pallas, **features, platform=platform))
    with jax.sharding.use_abstract_mesh(AbstractMesh((1,), ("data",), abstract_device=AbstractDevice(device, None, platform))):
        assert program.trace(*shapes).lower(lowering_platforms=(target,)).as_text().count(call) == 3


def test_every_kernel_has_a_word():
    """The choices of attention.kernel are the rows of KERNELS and `auto`."""
    assert set(Kernel.__args__) == KERNELS.keys() | {"auto"}


@pytest.mark.parametrize("platform", DENSE)
def test_auto_goes_by_length(platform):
    """`auto` is dense up to a length and chunked above; a kernel that was named is that kernel."""
    assert [choose("auto", length, platform) for length in (1, DENSE[platform], DENSE[platform] + 1)] == ["dense", "dense", "chunked"]
    assert {choose(kernel, 10**5, platform) for kernel in KERNELS} == KERNELS.keys()


@pytest.mark.parametrize("length", (DENSE["cpu"], DENSE["cpu"] + 1))
def test_auto_is_the_kernel_it_chooses(length):
    """Called outside a run, `auto` compiles to the program of the kernel that the rule names."""
    x = jax.ShapeDtypeStruct((1, length, H, K), jnp.float32)
    text = lambda kernel: jax.jit(functools.partial(attend, kernel=kernel, scale=0.25)).lower(x, x, x).as_text()
    assert text("auto") == text(choose("auto", length, "cpu"))
    assert text("dense") != text("chunked")


@pytest.mark.parametrize("knobs", ({"softcap": 30.0}, {"sinks": True}))
def test_library_refuses_what_it_cannot_do(knobs):
    """JAX's attention has no soft cap and no learned sinks: the config says so in one line, and so does the kernel itself."""
    message = "attention.kernel = 'library' has neither softcap nor sinks"
    with pytest.raises(ValueError, match=message) as error:
        Attention(kernel="library", **knobs)
    assert "\n" not in str(error.value)
    x = jnp.zeros((1, 4, H, K))
    with pytest.raises(ValueError, match=message):
        attend(x, x, x, kernel="library", scale=1.0, **knobs if "softcap" in knobs else {"sinks": jnp.zeros(H)})
