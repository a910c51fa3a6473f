"""The mixture of experts: the router, the choice and the weights, against the textbook in numpy."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from configs.knobs import replace
from configs.model import Layer
from models import parameters
from models.moe import Moe, warnings
from models.moe.balance import balance_loss, loads, squared_lse
from models.moe.router import CHOICES, ROUTERS
from models.taps import SITES, Edit, Tap, Taps
from models.transformer import Transformer
from tests.models import reference
from tests.models.reference import assert_close, build, draw, random_values, tiny, tokens

pytestmark = pytest.mark.usefixtures("x64")

B, T, D, F, E = 2, 6, 8, 5, 4
ROUNDINGS = 8 * (D + F + E + 16)
"""The lengths of the sums that an output passes through, and 16 for activation and softmax; a chosen few are close to a cancellation."""


def layer(**changes) -> Layer:
    """A layer whose mixture has E experts of width F, with changes to its sections moe and mlp ("gated", "bias" and "width" of the MLP)."""
    mlp = {f"mlp.{knob}": changes.pop(knob) for knob in ("gated", "bias", "kind") if knob in changes}
    return replace(Layer(), {"mlp.width": F, "moe.experts": E, **mlp, **{f"moe.{knob}": value for knob, value in changes.items()}})


def mixture(config: Layer):
    """(module with random values, values by path)."""
    module = Moe(config, D, "float32")
    values = random_values(parameters.table(module))
    return parameters.bind(module, values), {path: np.asarray(value) for path, value in values.items()}


def changed(module: Moe, values, **changes) -> Moe:
    """The module with these values, some of them changed."""
    return parameters.bind(module, {path: jnp.asarray(value) for path, value in (values | changes).items()})


def run(module: Moe, x, record=(), edits=None, **given):
    """(output, routing, records); `edits`: (keep, add) by site."""
    tap = Tap(Taps(record={site: lambda x: x for site in record}), {"edits": edits or {}, "probes": {}})
    y, routing = module(jnp.asarray(x), tap, **given)
    return y, routing, tap.records


def softmax(z):
    p = np.exp(z - z.max(-1, keepdims=True))
    return p / p.sum(-1, keepdims=True)


SCORES = {"softmax": softmax, "sigmoid": lambda z: 1 / (1 + np.exp(-z))}


def allowed(moe, ranked: np.ndarray) -> list[int]:
    """The experts that one token may use."""
    if moe.groups is None:
        return list(range(E))
    size = E // moe.groups
    groups = [range(start, start + size) for start in range(0, E, size)]
    best = sorted(groups, key=lambda group: -sum(sorted((ranked[e] for e in group), reverse=True)[:2]))[: moe.group_top_k]
    return [e for group in best for e in group]


def chosen(moe, ranked: np.ndarray) -> np.ndarray:
    """Whether token t of sequence b is sent to expert e, by sorting."""
    found = np.zeros(ranked.shape, bool)
    b, t, _ = ranked.shape
    if moe.choice == "token":
        for i, j in np.ndindex(b, t):
            found[i, j, sorted(allowed(moe, ranked[i, j]), key=lambda e: -ranked[i, j, e])[: moe.top_k]] = True
    else:
        for i, e in np.ndindex(b, E):
            found[i, np.argsort(-ranked[i, :, e])[: int(np.ceil(moe.top_k * t / E))], e] = True
    return found


def expected(config: Layer, p: dict, x: np.ndarray) -> dict[str, np.ndarray]:
    """Scores, choice, weights and output, one token after the other."""
    moe = config.moe
    scores = SCORES[moe.router](x @ p["router.weight"] + p.get("router.bias", 0.0))
    mine = chosen(moe, scores + p.get("selection", 0.0))
    weights = np.where(mine, scores, 0)
    weights = weights / weights.sum(-1, keepdims=True) if moe.normalise else weights

    def expert(e, x):
        of = {f"mlp.{name}.weight": p[name][e] for name in ("up", "gate", "down") if name in p}
        of |= {f"mlp.{name}.bias": p[f"{name}_bias"][e] for name in ("up", "gate", "down") if f"{name}_bias" in p}
        return reference.mlp_branch(config, of)(x)

    y = sum(weights[..., e, None] * expert(e, x) for e in range(E))
    if moe.shared:
        y = y + reference.mlp_branch(config, {f"mlp.{path.removeprefix('shared.')}": value for path, value in p.items()})(x)
    return {"scores": scores, "chosen": mine, "weights": weights, "y": y}


CASES = {
    "softmax": {}, "softmax before": {"normalise": False}, "one": {"top_k": 1, "normalise": False}, "all": {"top_k": E},
    "sigmoid": {"router": "sigmoid"}, "selection": {"router": "sigmoid", "selection_bias": True, "bias": True},
    "raw sigmoid": {"router": "sigmoid", "normalise": False}, "groups": {"groups": 2, "group_top_k": 1, "selection_bias": True},
    "group of one": {"groups": 4, "group_top_k": 3}, "shared": {"shared": 2, "gated": True, "kind": "silu"},
    "biases": {"bias": True, "gated": True},
    "expert choice": {"choice": "expert", "normalise": False}, "uneven expert choice": {"choice": "expert", "normalise": False, "top_k": 1},
}


@pytest.mark.parametrize("case", CASES)
def test_textbook(case):
    """Choice, weights and output are those of a loop over tokens, for every router, choice and kind of expert."""
    changes = CASES[case]
    config = layer(**changes)
    module, values = mixture(config)
    x = draw(case, B, T, D)
    right = expected(config, values, x)
    y, _, records = run(module, x, ("router.probabilities", "router.weights", "router.load", "router.dropped"))
    assert_close(records["router.weights"], right["weights"], ROUNDINGS)
    assert_close(records["router.probabilities"], right["scores"] / right["scores"].sum(-1, keepdims=True), ROUNDINGS)
    np.testing.assert_array_equal(records["router.load"], right["chosen"].sum((0, 1)))
    assert_close(y, right["y"], ROUNDINGS)
    assert records["router.dropped"] == 0


def test_every_row_has_a_case():
    """Each row of ROUTERS and CHOICES is among the cases, and a choice is never the same for all tokens."""
    used = [layer(**changes).moe for changes in CASES.values()]
    assert {moe.router for moe in used} == set(ROUTERS) and {moe.choice for moe in used} == set(CHOICES)


def test_normalised_softmax_is_the_softmax_after_the_choice():
    """With router softmax, dividing by the sum gives the softmax of the chosen logits alone."""
    module, values = mixture(layer(top_k=3))
    x = draw("x", B, T, D)
    weights = np.asarray(run(module, x, ("router.weights",))[2]["router.weights"])
    logits = x @ values["router.weight"]
    assert_close(weights, softmax(np.where(weights > 0, logits, -np.inf)), ROUNDINGS)


def test_selection_bias_chooses_and_does_not_weigh():
    """A large bias draws every token to its expert, at the weight that its score gives; its gradient is exactly zero."""
    module, values = mixture(layer(selection_bias=True, normalise=False, top_k=1))
    x = draw("x", B, T, D)
    forced = changed(module, values, selection=np.asarray([0.0, 0.0, 9.0, 0.0]))
    weights = np.asarray(run(forced, x, ("router.weights",))[2]["router.weights"])
    np.testing.assert_array_equal(weights > 0, np.broadcast_to(np.arange(E) == 2, weights.shape))
    assert_close(weights[..., 2], softmax(x @ values["router.weight"])[..., 2], ROUNDINGS)

    def loss(values):
        y, routing, _ = run(parameters.bind(module, values), x)
        return (y**2).sum() + routing.balance + routing.squared_lse

    gradient = jax.grad(loss)({path: jnp.asarray(value) for path, value in values.items()})
    np.testing.assert_array_equal(gradient["selection"], 0)
    assert all(np.abs(value).max() > 0 for path, value in gradient.items() if path != "selection")


def test_choosing_experts_see_the_future_and_tokens_do_not():
    """Where experts choose, a change of the last token may change an earlier one; where tokens choose, with any dispatch, it never does."""
    x = draw("x", 1, 12, D)
    later = x.copy()
    later[:, -1] *= -20

    def moved(**changes) -> float:
        module, _ = mixture(layer(**changes))
        return float(np.abs(np.asarray(run(module, x)[0] - run(module, later)[0])[:, :-1]).max())

    assert moved(choice="expert", normalise=False, top_k=1) > 1e-3
    for dispatch in ("dense", "capacity", "dropless"):
        assert moved(dispatch=dispatch, capacity=1.0) < ROUNDINGS * reference.EPS * 100


def test_jitter_multiplies_the_routers_input():
    """With a key the logits are those of x times noise between 1 - jitter and 1 + jitter; without one there is none; a key repeats."""
    module, values = mixture(layer(jitter=0.2))
    x = np.ones((B, T, D))
    of = lambda **given: np.asarray(run(module, x, ("router.logits",), **given)[2]["router.logits"])
    straight = changed(module, values, **{"router.weight": np.eye(D, E)})
    noise = np.asarray(run(straight, x, ("router.logits",), key=jax.random.key(3))[2]["router.logits"])
    assert noise.min() >= 0.8 and noise.max() <= 1.2 and noise.std() > 0.05
    np.testing.assert_array_equal(of(), of(key=None))
    np.testing.assert_array_equal(of(key=jax.random.key(1)), of(key=jax.random.key(1)))
    assert np.abs(of(key=jax.random.key(1)) - of(key=jax.random.key(2))).max() > 1e-3


def test_the_mask_reaches_all_that_a_router_is_judged_by():
    """Balance loss, z-loss and load are those of the counted tokens; the output is that of all."""
    config = layer()
    module, _ = mixture(config)
    x, counted = draw("x", B, T, D), jnp.asarray(np.arange(B * T).reshape(B, T) % 3 > 0)
    y, routing, seen = run(module, x, ("router.logits", "router.probabilities", "router.weights"), counted=counted)
    chosen, logits = jnp.asarray(seen["router.weights"] > 0), seen["router.logits"]
    assert_close(routing.balance, balance_loss(config.moe, chosen, seen["router.probabilities"], counted), 2 * B * T)
    assert_close(routing.squared_lse, squared_lse(logits, counted), 2 * B * T)
    np.testing.assert_array_equal(routing.load, loads(chosen, counted))
    whole, of_all, _ = run(module, x)
    np.testing.assert_array_equal(y, whole)
    assert all(np.abs(np.asarray(a - b)).max() > 1e-3 for a, b in zip(routing, of_all, strict=True))


MIXED = {"depth": 4, "moe.experts": E, "overrides": ("0: moe.experts=None",)}


@pytest.mark.parametrize("stack", ("scan", "unroll"))
def test_each_layer_has_noise_of_its_own(stack):
    """Layers with equal weights and inputs draw different noise, the same scanned or unrolled."""
    module, _, values = build(tiny(MIXED | {"stack": stack, "moe.jitter": 0.5}))
    same = {path: jnp.broadcast_to(value[:1], value.shape) if ".segments.1" in path else value for path, value in values.items()}
    taps = Taps(record={"router.logits": lambda x: x}, edits={"mlp.in": Edit(jnp.zeros(4), jnp.ones(4))})
    first, *logits = parameters.bind(module, same)(tokens(), taps=taps, key=jax.random.key(0)).records["router.logits"]
    assert first is None
    assert all(np.abs(np.asarray(a - b)).max() > 1e-3 for a, b in itertools.pairwise(logits))
    other = parameters.bind(Transformer(tiny(MIXED | {"stack": "scan", "moe.jitter": 0.5})), same)
    again = other(tokens(), taps=taps, key=jax.random.key(0)).records["router.logits"]
    assert_close(jnp.stack(logits), jnp.stack(again[1:]), ROUNDINGS)


def test_sites_of_a_mixture_fire_once_in_each_mixture():
    """Every site of a mixture is called once in each layer that is one, and in no other."""
    module, _, _ = build(tiny(MIXED))
    sites = [site for site, row in SITES.items() if row.mixture]
    out = module(tokens(), taps=Taps(record={site: jnp.shape for site in sites}))
    for site in sites:
        assert out.records[site][0] is None and None not in out.records[site][1:]
    assert out.routing[0] is None and all(of.load.shape == (E,) for of in out.routing[1:])


@pytest.mark.parametrize("dispatch", ("dense", "capacity", "dropless"))
def test_switching_an_expert_off_by_its_weight(dispatch):
    """An edit that keeps nothing of one expert's weight is the same as zeros in that expert's output projection."""
    module, _, values = build(tiny({"moe.experts": E, "moe.top_k": 3, "moe.dispatch": dispatch, "depth": 2}))
    path = "stack.segments.0.unit.0.mlp.down"
    off = parameters.bind(module, values | {path: values[path].at[1, 2].set(0)})
    keep = jnp.ones((2, 1, 1, E)).at[1, ..., 2].set(0)
    edited = module(tokens(), taps=Taps(edits={"router.weights": Edit(keep, jnp.zeros((2, 1, 1, 1)))}))
    assert_close(edited.logits, off(tokens()).logits, 100 * ROUNDINGS)
    assert np.abs(edited.logits - module(tokens()).logits).max() > 1e-3


def test_a_token_meets_its_own_experts_alone():
    """The work of a token counts top_k of the experts, the router and the shared ones."""
    model = tiny({"depth": 2, "moe.experts": 8, "moe.top_k": 3, "moe.width": 10, "moe.shared": 1, "mlp.gated": True,
                  "overrides": ("0: moe.experts=None",)})
    d, v = 16, 32
    weights = 2 * 4 * d * d + 3 * d * 24 + (d * 8 + (3 + 1) * 3 * d * 10) + v * d
    scores = 2 * 4 * d * 4.5
    found = parameters.flops_per_token(model, parameters.table(Transformer(model)), 8)
    assert found == pytest.approx(3 * (2 * weights + scores), rel=1e-12)


def test_warnings():
    """A mixture that is not causal, and a router that the loss does not train, are told; a plain one is not."""
    assert warnings((layer(), Layer())) == [] and warnings((replace(layer(), {"moe.experts": None, "moe.top_k": 1}),)) == []
    [line] = warnings((layer(), layer(choice="expert", normalise=False)))
    assert "not causal" in line
    [line] = warnings((layer(top_k=1),))
    assert "router" in line
    module, values = mixture(layer(top_k=1))
    loss = lambda values: (run(parameters.bind(module, values), draw("x", B, T, D))[0] ** 2).sum()
    gradient = jax.grad(loss)({path: jnp.asarray(value) for path, value in values.items()})
    assert np.abs(gradient["router.weight"]).max() <= ROUNDINGS * reference.EPS * np.abs(gradient["up"]).max()
