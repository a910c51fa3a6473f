"""Rotary embedding: relative positions, lengths, layouts, the rotating share, positions divided."""

import jax.numpy as jnp
import numpy as np
import pytest

from configs.attention import Rope, RopeScaling
from models.rope import inverse_frequencies, rotate
from tests.models import reference
from tests.models.reference import EPS, assert_close, draw

pytestmark = pytest.mark.usefixtures("x64")

K, T = 8, 12
ROTATIONS = 8  # roundings of one rotation: two products, their sum, sine and cosine
CONFIGS = [Rope(layout=layout, fraction=fraction, theta=theta)
           for layout in ("half", "interleaved") for fraction in (0.5, 1.0) for theta in (10_000.0, 100.0)]


def names(config):
    return f"{config.layout}-{config.fraction}-{config.theta:g}"


def vectors(name: str, k: int = K) -> jnp.ndarray:
    return jnp.asarray(draw(name, 2, T, 3, k))


def positions(start: int = 0) -> jnp.ndarray:
    return jnp.arange(start, start + T)


def angle_roundings(largest: int) -> float:
    """An angle of up to `largest` radians is off by that many eps."""
    return ROTATIONS * (1 + largest)


@pytest.mark.parametrize("config", CONFIGS, ids=names)
def test_textbook(config):
    """Pair i turns by position theta^(-2i/n): the pairs of the layout, in the first n = fraction k dimensions."""
    n, interleaved = int(K * config.fraction), config.layout == "interleaved"
    expected = reference.rope(np.asarray(vectors("x")), np.arange(T), config.theta, n, interleaved)
    assert_close(rotate(vectors("x"), positions(), config), expected, angle_roundings(T))


@pytest.mark.parametrize("offset", (1, 7, 1000))
@pytest.mark.parametrize("config", CONFIGS, ids=names)
def test_scores_depend_on_relative_position_alone(config, offset):
    """Moving queries and keys by the same number of positions changes no score; moving the keys alone does."""
    scores = lambda start_q, start_k: jnp.einsum(
        "bthk,bshk->bhts", rotate(vectors("q"), positions(start_q), config), rotate(vectors("k"), positions(start_k), config))
    here = scores(0, 0)
    assert_close(scores(offset, offset), here, K * 2 * angle_roundings(T + offset))
    assert np.abs(scores(0, offset) - here).max() > 0.1


@pytest.mark.parametrize("config", CONFIGS, ids=names)
def test_rotation_preserves_length(config):
    """Rotation changes the length of no pair, so of no vector."""
    x = vectors("x")
    assert_close(jnp.linalg.norm(rotate(x, positions(), config), axis=-1), jnp.linalg.norm(x, axis=-1), ROTATIONS * K)


@pytest.mark.parametrize("fraction", (0.5, 1.0))
def test_layouts_are_permutations_of_each_other(fraction):
    """Interleaved is half after sorting the rotating dimensions into even and odd ones."""
    n = int(K * fraction)
    order = np.r_[0:n:2, 1:n:2, n:K]
    half, interleaved = (rotate(x, positions(), Rope(layout=layout, fraction=fraction))
                         for x, layout in ((vectors("x")[..., order], "half"), (vectors("x"), "interleaved")))
    np.testing.assert_array_equal(half, interleaved[..., order])


@pytest.mark.parametrize("layout", ("half", "interleaved"))
def test_the_rest_is_untouched(layout):
    """With a fraction, the dimensions behind the rotating share pass bit by bit; the others move."""
    x, y = vectors("x"), rotate(vectors("x"), positions(), Rope(fraction=0.25, layout=layout))
    np.testing.assert_array_equal(y[..., 2:], x[..., 2:])
    assert np.abs(y - x)[:, 1:, :, :2].min() > 0


def test_without_theta_nothing_turns():
    """theta None is the identity, at any position."""
    np.testing.assert_array_equal(rotate(vectors("x"), positions(5), Rope(theta=None)), vectors("x"))


def test_position_zero_is_the_identity():
    """The first token does not turn."""
    np.testing.assert_array_equal(rotate(vectors("x"), positions(), Rope())[:, 0], vectors("x")[:, 0])


def test_inverse_frequencies():
    """The closed form: 1, theta^(-2/n), theta^(-4/n), …; no factor on the vectors."""
    frequencies, factor = inverse_frequencies(Rope(theta=10_000.0), 8)
    np.testing.assert_allclose(frequencies, [1, 1e-1, 1e-2, 1e-3], rtol=4 * EPS)
    assert factor == 1
    frequencies, _ = inverse_frequencies(Rope(theta=10_000.0, fraction=0.5), 8)
    np.testing.assert_allclose(frequencies, [1, 1e-2], rtol=4 * EPS)


def test_linear_scaling_divides_positions():
    """Position interpolation by a factor f at position f p is the plain rotation at p."""
    stretched, factor = Rope(scaling=RopeScaling("linear", 4.0)), 4
    expected = rotate(vectors("x"), positions(), Rope())
    assert_close(rotate(vectors("x"), factor * positions(), stretched), expected, angle_roundings(factor * T))


def test_bfloat16_positions_are_exact():
    """In bfloat16 the angles are still float32: neighbouring positions far out stay apart."""
    config, x = Rope(), jnp.ones((1, 2, 1, K), jnp.bfloat16)
    y = rotate(x, jnp.asarray([1000, 1001]), config)
    assert y.dtype == jnp.bfloat16
    expected = reference.rope(np.ones((1, 2, 1, K)), [1000, 1001], config.theta)
    assert_close(y, expected, 1, eps=2.0**-8)


def test_the_share_that_rotates_is_free_of_rounding():
    """58 % of 100 dimensions are 58, though 100 x 0.58 is a little less in binary: the frequencies are theta^(-2i/58)."""
    assert 100 * 0.58 < 58
    inverse, _ = inverse_frequencies(Rope(fraction=0.58), 100)
    np.testing.assert_allclose(inverse, 10_000.0 ** -(np.arange(0, 58, 2) / 58), rtol=1e-14)
