"""Stretched rotary embedding: every row of ROPE_SCALINGS against its definition, its limits, and what an offset does to scores."""

import dataclasses
import math
import typing

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from configs.attention import Rope, RopeScaling
from configs.knobs import knob_types
from models.rope import ROPE_SCALINGS, inverse_frequencies, rotate
from tests.models.reference import EPS, EPS32, assert_close
from tests.models.test_rope import ROTATIONS, T, angle_roundings, positions, vectors

pytestmark = pytest.mark.usefixtures("x64")


def plain(theta, n):
    return [theta ** (-2 * i / n) for i in range(n // 2)]


def rebased(theta, n, stretch):
    return plain(theta * stretch ** (n / (n - 2)), n) if n > 2 else [1.0]  # a pair alone turns by its position at any base


def yarn(theta, n, scaling, length):
    turns = lambda i: scaling.original * theta ** (-2 * i / n) / (2 * np.pi)
    if scaling.truncate:
        low = max((i for i in range(n) if turns(i) >= scaling.beta_fast), default=0)
        high = min((i for i in range(n) if turns(i) <= scaling.beta_slow), default=n - 1)
    else:  # the logarithm of the turns falls on a straight line
        low, high = np.interp(-np.log([scaling.beta_fast, scaling.beta_slow]), -np.log([turns(0), turns(n - 1)]), [0, n - 1])
    ramp = lambda i: 0.0 if i <= low else 1.0 if i >= high else (i - low) / (high - low)
    inverse = [(1 - ramp(i)) * w + ramp(i) * w / scaling.factor for i, w in enumerate(plain(theta, n))]
    above, below = (1.0, 0.0) if scaling.mscale is None else (scaling.mscale, scaling.mscale_all_dim)
    return inverse, (0.1 * above * np.log(scaling.factor) + 1) / (0.1 * below * np.log(scaling.factor) + 1)


def llama3(theta, n, scaling, length):
    def stretched(w):
        wavelength = 2 * np.pi / w
        if wavelength < scaling.original / scaling.high_frequency:
            return w
        if wavelength > scaling.original / scaling.low_frequency:
            return w / scaling.factor
        share = (scaling.original / wavelength - scaling.low_frequency) / (scaling.high_frequency - scaling.low_frequency)
        return (1 - share) * w / scaling.factor + share * w

    return [stretched(w) for w in plain(theta, n)], 1.0


def longrope(theta, n, scaling, length):
    divisors = scaling.short if length <= scaling.original else scaling.long
    inverse = [w / divisor for w, divisor in zip(plain(theta, n), divisors, strict=True)]
    return inverse, np.sqrt(1 + np.log(scaling.factor) / np.log(scaling.original))


def dynamic(theta, n, scaling, length):
    if length <= scaling.original:
        return plain(theta, n), 1.0
    return rebased(theta, n, scaling.factor * length / scaling.original - (scaling.factor - 1)), 1.0


DEFINITIONS = {
    "none": lambda theta, n, scaling, length: (plain(theta, n), 1.0),
    "linear": lambda theta, n, scaling, length: ([w / scaling.factor for w in plain(theta, n)], 1.0),
    "ntk": lambda theta, n, scaling, length: (rebased(theta, n, scaling.factor), 1.0),
    "dynamic": dynamic, "yarn": yarn, "llama3": llama3, "longrope": longrope,
}
"""Each row as its paper defines it, one pair after the other: (inverse frequencies, attention factor)."""

SHORT, LONG = (1.0, 1.1, 1.3, 1.6), (1.5, 2.5, 4.0, 7.0)
RAMPS = {  # width of a head, and its RoPE
    "yarn": (64, Rope(scaling=RopeScaling("yarn", 16.0, 4096))),
    "yarn, not truncated": (64, Rope(150_000.0, scaling=RopeScaling("yarn", 32.0, 4096, truncate=False))),
    "yarn, mscales": (16, Rope(500.0, scaling=RopeScaling("yarn", 4.0, 64, beta_fast=4.0, mscale=1.5, mscale_all_dim=0.5))),
    "yarn, a share": (16, Rope(500.0, 0.5, "interleaved", RopeScaling("yarn", 4.0, 64, beta_fast=4.0))),
    "llama3": (128, Rope(500_000.0, scaling=RopeScaling("llama3", 8.0, 8192))),
    "llama3, a share": (16, Rope(500.0, 0.5, scaling=RopeScaling("llama3", 4.0, 48, low_frequency=0.5, high_frequency=6.0))),
}
CASES = RAMPS | {
    "none": (8, Rope(500.0)), "linear": (8, Rope(500.0, scaling=RopeScaling("linear", 4.0))),
    "ntk": (8, Rope(500.0, scaling=RopeScaling("ntk", 4.0))), "ntk, one pair": (2, Rope(500.0, scaling=RopeScaling("ntk", 4.0))),
    "dynamic": (8, Rope(500.0, scaling=RopeScaling("dynamic", 4.0, 16))),
    "dynamic, one pair": (2, Rope(500.0, scaling=RopeScaling("dynamic", 4.0, 16))),
    "yarn, the last turns often": (8, Rope(10.0, scaling=RopeScaling("yarn", 4.0, 512))),
    "yarn, all turn often": (8, Rope(10.0, scaling=RopeScaling("yarn", 4.0, 100_000))),
    "yarn, none turns": (8, Rope(500.0, scaling=RopeScaling("yarn", 4.0, 4, truncate=False))),
    "yarn, one pair": (2, Rope(500.0, scaling=RopeScaling("yarn", 4.0, 64))),
    "longrope": (8, Rope(500.0, scaling=RopeScaling("longrope", 4.0, 16, short=SHORT, long=LONG))),
    "longrope, a share": (16, Rope(500.0, 0.5, scaling=RopeScaling("longrope", 4.0, 16, short=SHORT, long=LONG))),
}
BY_KIND = {config.scaling.kind: (k, config) for k, config in reversed(CASES.values())}  # the first case of each
LOOKING = {"dynamic", "longrope"}  # at the last position of the call
cases, rows = pytest.mark.parametrize("name", CASES), pytest.mark.parametrize("kind", ROPE_SCALINGS)


def expected_frequencies(k: int, config: Rope, length: int):
    inverse, factor = DEFINITIONS[config.scaling.kind](config.theta, int(k * config.fraction), config.scaling, length)
    return np.asarray(inverse), factor


def turned(x, positions, inverse, factor, interleaved=False) -> np.ndarray:
    """Each pair as a complex number, times factor e^(i position w)."""
    y, n = np.array(x, np.float64), 2 * len(inverse)
    first, second = (np.s_[..., 0:n:2], np.s_[..., 1:n:2]) if interleaved else (np.s_[..., : n // 2], np.s_[..., n // 2 : n])
    z = factor * (y[first] + 1j * y[second]) * np.exp(1j * np.multiply.outer(positions, inverse))[:, None]
    y[first], y[second] = z.real, z.imag
    return y


def frequency_roundings(k: int, config: Rope) -> float:
    """Of powers with rounded exponents, and of the ends of a ramp: each is off by some eps k, and the factor magnifies that."""
    return 8 * (1 + math.log(config.theta * config.scaling.factor)) + 8 * k * config.scaling.factor


def scores(kind: str, start: int) -> jnp.ndarray:
    k, config = BY_KIND[kind]
    return jnp.einsum("bthk,bshk->bhts", *(rotate(vectors(name, k), positions(start), config) for name in ("q", "k")))


def score_roundings(kind: str, start: int) -> float:
    k, config = BY_KIND[kind]
    return 2 * k * ROTATIONS * (1 + (start + T) * frequency_roundings(k, config))


def test_scalings_all_told():
    """Every row of ROPE_SCALINGS is a choice of the config, and has its definition and a case here."""
    assert set(typing.get_args(knob_types(RopeScaling)["kind"])) == set(ROPE_SCALINGS) == set(DEFINITIONS) == set(BY_KIND)


@cases
def test_scaled_frequencies(name):
    """Inverse frequencies and attention factor are those of the paper in calls that end before, at, behind and far behind the original."""
    k, config = CASES[name]
    original = config.scaling.original or 16
    for length in (1, original, original + 1, 3 * original, 40 * original):
        inverse, factor = inverse_frequencies(config, k, length)
        expected, expected_factor = expected_frequencies(k, config, length)
        np.testing.assert_allclose(inverse, expected, rtol=frequency_roundings(k, config) * EPS)
        np.testing.assert_allclose(factor, expected_factor, rtol=8 * EPS)


@pytest.mark.parametrize("start", (0, 40))
@cases
def test_scaled_rotation(name, start):
    """Compiled for unknown positions, float64: each pair, as a complex number, is multiplied by the attention factor and e^(i angle)."""
    k, config = CASES[name]
    expected = turned(vectors("x", k), range(start, start + T), *expected_frequencies(k, config, start + T), config.layout == "interleaved")
    actual = jax.jit(rotate, static_argnums=2)(vectors("x", k), positions(start), config)
    assert_close(actual, expected, ROTATIONS * (1 + (start + T) * frequency_roundings(k, config)))


@pytest.mark.parametrize("start", (0, 40))
@rows
def test_scaled_rotation_without_float64(kind, start):
    """Where there is no float64 the rotation is the same but for the roundings of float32: of a frequency, and of its angle."""
    k, config = BY_KIND[kind]
    x = vectors("x", k).astype(jnp.float32)
    expected = turned(x, range(start, start + T), *expected_frequencies(k, config, start + T))
    with jax.enable_x64(False):
        actual = rotate(jnp.asarray(np.asarray(x)), jnp.arange(start, start + T), config)
    assert actual.dtype == jnp.float32
    of_power = math.log(config.scaling.factor * (start + T))  # of the dynamic stretch
    assert_close(actual, expected, ROTATIONS + (start + T) * (4 + of_power), EPS32)


@pytest.mark.parametrize("start", (1, 4, 1000))
@rows
def test_an_offset_changes_no_score(kind, start):
    """With the frequencies of its length a call has the scores of positions 0, 1, …; for a scaling that does not look at the length these
    are the scores of a call that starts at 0."""
    k, config = BY_KIND[kind]
    q, key = (turned(vectors(name, k), range(T), *expected_frequencies(k, config, start + T)) for name in ("q", "k"))
    assert_close(scores(kind, start), np.einsum("bthk,bshk->bhts", q, key), score_roundings(kind, start))
    if kind not in LOOKING:
        assert_close(scores(kind, start), scores(kind, 0), score_roundings(kind, start))


@pytest.mark.parametrize(("kind", "behind"), (("longrope", True), ("dynamic", False)))
def test_an_offset_across_the_original_length(kind, behind):
    """dynamic and longrope: an offset within the original length changes no score, one across it does; behind it, one changes none under
    longrope and some under dynamic."""
    bound = score_roundings(kind, 500) * EPS * np.abs(scores(kind, 0)).max()
    same = lambda here, there: np.abs(scores(kind, here) - scores(kind, there)).max() <= bound
    within = BY_KIND[kind][1].scaling.original - T
    assert [same(0, within), same(within, within + 1), same(within + 1, 500)] == [True, False, behind]


@pytest.mark.parametrize(("start", "differing"), ((0, set()), (10, {"dynamic", "longrope"}), (40, {"dynamic"})),
                         ids=("within", "across", "behind"))
@rows
def test_a_text_in_parts(kind, start, differing):
    """The first tokens of a call turn as they do in a call of their own: under longrope unless the original length lies between the two
    ends, under dynamic only within it."""
    k, config = BY_KIND[kind]
    part = rotate(vectors("x", k)[:, : T // 2], positions(start)[: T // 2], config)
    whole = rotate(vectors("x", k), positions(start), config)[:, : T // 2]
    assert (np.abs(part - whole).max() <= angle_roundings(start + T) * EPS * np.abs(whole).max()) == (kind not in differing)


@cases
def test_factor_one_is_the_identity(name):
    """A stretch by one is none: no frequency changes (with divisors of one, and within the original length), and no length."""
    k, config = CASES[name]
    ones = (1.0,) * len(config.scaling.short)
    scaling = dataclasses.replace(config.scaling, factor=1.0, short=ones, long=ones)
    inverse, factor = inverse_frequencies(dataclasses.replace(config, scaling=scaling), k, 1)
    np.testing.assert_allclose(inverse, plain(config.theta, 2 * len(inverse)), rtol=frequency_roundings(k, config) * EPS)
    assert factor == 1


@pytest.mark.parametrize("name", [name for name in CASES if "longrope" not in name])
def test_lower_frequencies_are_stretched_more(name):
    """Whatever the scaling, a frequency is divided by at least what a higher one is, by 1 at least and by the stretch at most."""
    k, config = CASES[name]
    inverse, _ = inverse_frequencies(config, k, 40)
    stretch = 4.0 * 40 / 16 - 3 if config.scaling.kind == "dynamic" else config.scaling.factor
    divisors = np.asarray(plain(config.theta, 2 * len(inverse))) / np.asarray(inverse)
    ordered = np.r_[1, divisors, stretch]
    assert (np.diff(ordered) >= -frequency_roundings(k, config) * EPS * stretch).all()


@pytest.mark.parametrize("name", RAMPS)
def test_ends_of_the_ramp(name):
    """Pairs of many turns within the original length are untouched, pairs of few divided by the factor, those between lie between."""
    k, config = RAMPS[name]
    scaling, inverse = config.scaling, inverse_frequencies(config, k)[0]
    unscaled = inverse_frequencies(dataclasses.replace(config, scaling=RopeScaling()), k)[0]
    few, many = (scaling.low_frequency, scaling.high_frequency) if scaling.kind == "llama3" else (scaling.beta_slow, scaling.beta_fast)
    turns = scaling.original * unscaled / (2 * np.pi)
    fast, slow = turns >= many, turns <= few
    assert fast.any() and slow.any() and not (fast | slow).all()
    np.testing.assert_array_equal(inverse[fast], unscaled[fast])
    np.testing.assert_allclose(inverse[slow], unscaled[slow] / scaling.factor, rtol=2 * scaling.factor * EPS)
    divisors = np.r_[1, (unscaled / inverse)[~(fast | slow)], scaling.factor]
    assert (np.diff(divisors) > 1e-3).all()


@pytest.mark.parametrize("scaling", (
    RopeScaling("yarn", 4.0, 1000, beta_fast=1000 / (2 * math.pi), beta_slow=10 / (2 * math.pi), truncate=False),
    RopeScaling("llama3", 4.0, 1000, high_frequency=150 / (2 * math.pi), low_frequency=50 / (2 * math.pi)),
), ids=lambda scaling: scaling.kind)
def test_middle_of_the_ramp(scaling):
    """Half way, in dimensions for yarn and in turns for llama3, a frequency is the mean of itself and itself divided by the factor."""
    inverse, _ = inverse_frequencies(Rope(10_000.0, scaling=scaling), 8)
    np.testing.assert_allclose(inverse, [1, 0.1 * (1 + 1 / 4) / 2, 0.01 / 4, 0.001 / 4], rtol=64 * EPS)


@pytest.mark.parametrize(("scaling", "length", "stretch"), (
    (RopeScaling("ntk", 4.0), 1, 4), (RopeScaling("dynamic", 4.0, 16), 16, 1), (RopeScaling("dynamic", 4.0, 16), 32, 5),
    (RopeScaling("dynamic", 1.0, 16), 32, 2),
))
def test_ends_of_a_larger_base(scaling, length, stretch):
    """NTK: the highest frequency stays, the lowest is divided by just the stretch; a dynamic one is factor + 1 at twice the original."""
    inverse, _ = inverse_frequencies(Rope(10_000.0, scaling=scaling), 8, length)
    np.testing.assert_allclose(inverse, np.array([1, 0.1, 0.01, 0.001]) * stretch ** (-np.arange(4) / 3), rtol=16 * EPS)
    assert inverse[0] == 1


def test_longrope_of_equal_divisors_is_linear():
    """A divisor for all frequencies, on both sides of the original length, divides the positions."""
    longrope, linear = (inverse_frequencies(Rope(scaling=scaling), 8, 17)[0] for scaling in (
        RopeScaling("longrope", 4.0, 16, short=(3.0,) * 4, long=(4.0,) * 4), RopeScaling("linear", 4.0)))
    np.testing.assert_array_equal(longrope, linear)


@pytest.mark.parametrize(("scaling", "expected"), (
    (RopeScaling("yarn", math.e, 16), 1.1), (RopeScaling("yarn", math.e, 16, mscale=1.0, mscale_all_dim=1.0), 1.0),
    (RopeScaling("yarn", math.e, 16, mscale=2.0, mscale_all_dim=1.0), 12 / 11),
    (RopeScaling("longrope", 32.0, 4096, short=SHORT, long=LONG), (17 / 12) ** 0.5), (RopeScaling("llama3", 8.0, 16), 1.0),
))
def test_attention_factor(scaling, expected):
    """0.1 ln s + 1 for yarn, a ratio of two such with mscales, sqrt(1 + ln s / ln original) for longrope, 1 for others."""
    np.testing.assert_allclose(inverse_frequencies(Rope(scaling=scaling), 8)[1], expected, rtol=4 * EPS)


@rows
def test_attention_factor_by_hand(kind):
    """Set by hand it replaces that of any kind: what turns is multiplied by it, scores by its square, the other dimensions by nothing."""
    k, config = BY_KIND[kind]
    config = dataclasses.replace(config, fraction=0.5)
    by_hand = lambda factor: dataclasses.replace(config, scaling=dataclasses.replace(config.scaling, attention_factor=factor,
                                                                                     short=SHORT[: k // 4], long=LONG[: k // 4]))
    assert inverse_frequencies(by_hand(0.5), k)[1] == 0.5
    once, half = (rotate(vectors("x", k), positions(3), by_hand(factor)) for factor in (1.0, 0.5))
    np.testing.assert_array_equal(half[..., : k // 2], 0.5 * once[..., : k // 2])
    np.testing.assert_array_equal(half[..., k // 2 :], vectors("x", k)[..., k // 2 :])
