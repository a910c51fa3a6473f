"""Taps: edits, probes and records are what their equations say, in that order, and change nothing that was not asked for."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models import parameters
from models.taps import SITES as ALL_SITES
from models.taps import Edit, Probe, Taps
from tests.models.reference import assert_close, build, roundings, tiny, tokens

SITES = {site: row for site, row in ALL_SITES.items() if not row.mixture}

pytestmark = pytest.mark.usefixtures("x64")

L, B, T, D = 3, 2, 8, 16
WAYS = ("unroll", "scan")
ACTIVATIONS = [site for site, row in SITES.items() if not row.statistic]
SIZES = {"b": B, "t": T, "d": D, "h": 4, "g": 2, "k": 4, "f": 24, "v": 32}


def config(stack="unroll"):
    return tiny({"stack": stack, "attention.kv_heads": 2})


def shape(site: str) -> tuple[int, ...]:
    """The shape of an array of the site, behind an axis of layers where it has one."""
    return (L,) * SITES[site].layered + tuple(SIZES[axis] for axis in SITES[site].axes.split())


def rms(x, axes=None):
    return jnp.sqrt(jnp.mean(x**2, axes))


def loss_of(logits):
    weight = np.random.default_rng(1).standard_normal(logits.shape)
    return (weight * logits).mean()


@pytest.mark.parametrize(("site", "stack"), [(site, "unroll") for site in ACTIVATIONS] + [
    (site, "scan") for site in ("embed", "resid.pre", "attn.k", "attn.heads", "mlp.out", "resid.post")])
def test_probe_is_the_gradient_of_a_perturbation(site, stack):
    """The carrier's gradient is the RMS over each layer of the gradient with respect to something added there."""
    module, _, _ = build(config(stack))
    loss = lambda **taps: loss_of(module(tokens(), taps=Taps(**taps)).logits)
    layers = (L,) * SITES[site].layered
    explicit = jax.grad(lambda add: loss(edits={site: Edit(jnp.ones(layers), add)}))(jnp.zeros(shape(site)))
    found = jax.grad(lambda carrier: loss(probes={site: Probe(carrier, rms)}))(jnp.zeros(layers))
    assert (found > 0).all()
    assert_close(found, rms(explicit, tuple(range(SITES[site].layered, explicit.ndim))), 3 * roundings(config()))


def test_probe_may_keep_axes():
    """A carrier [layers, heads] receives what its reducer leaves of each layer: here the RMS of each head."""
    module, _, _ = build(config())
    site, of_heads = "attn.heads", lambda g: rms(g, (0, 1, 3))
    loss = lambda **taps: loss_of(module(tokens(), taps=Taps(**taps)).logits)
    explicit = jax.grad(lambda add: loss(edits={site: Edit(jnp.ones(L), add)}))(jnp.zeros(shape(site)))
    found = jax.grad(lambda carrier: loss(probes={site: Probe(carrier, of_heads)}))(jnp.zeros((L, 4)))
    assert_close(found, rms(explicit, (1, 2, 4)), 3 * roundings(config()))


@pytest.mark.parametrize("stack", WAYS)
def test_looking_changes_nothing(stack):
    """With every site recorded, probed and edited by 1 x + 0, logits and gradients are bit by bit those without taps."""
    module, rows, values = build(config(stack))
    ones = {site: jnp.ones(L) if SITES[site].layered else jnp.ones(()) for site in ACTIVATIONS}
    everything = Taps(
        record={site: lambda x: x for site in SITES},
        edits={site: Edit(one, 0 * one) for site, one in ones.items()},
        probes={site: Probe(0 * one, rms) for site, one in ones.items()},
    )
    run = lambda taps: jax.value_and_grad(lambda values: loss_of(parameters.bind(module, values)(tokens(), taps=taps).logits))(values)
    with_taps, without = run(everything), run(Taps())
    np.testing.assert_array_equal(with_taps[0], without[0])
    for row in rows:
        assert_close(with_taps[1][row.path], without[1][row.path], roundings(config()))  # a scan may be fused otherwise


@pytest.mark.parametrize("site", ACTIVATIONS)
def test_edit_is_keep_x_plus_add(site):
    """A record behind an edit holds keep x + add, with keep and add of the site's shape; what follows is computed from it."""
    module, _, _ = build(config())
    generator = np.random.default_rng(0)
    keep, add = (jnp.asarray(generator.standard_normal(shape(site))) for _ in range(2))
    record = {site: lambda x: x, "logits": lambda x: x}
    plain = module(tokens(), taps=Taps(record=record))
    edited = module(tokens(), taps=Taps(record=record, edits={site: Edit(keep, add)}))
    first = 0 if SITES[site].layered else ...  # later layers see an edited stream
    assert_close(edited.records[site][first], keep[first] * plain.records[site][first] + add[first], roundings(config()))
    assert np.abs(edited.logits - plain.logits).max() > 1e-3
    np.testing.assert_array_equal(edited.records["logits"], edited.logits)


@pytest.mark.parametrize("stack", WAYS)
@pytest.mark.parametrize(("layer", "head"), ((0, 3), (1, 0), (2, 2)))
def test_ablating_a_head_is_zeroing_its_output_weight(layer, head, stack):
    """Keeping 0 of one head's output gives the logits of a model whose output projection has zeros in that head's rows."""
    module, _, values = build(config(stack))
    path = "stack.segments.0.unit.0.attention.out.weight"
    ablated = parameters.bind(module, values | {path: values[path].at[layer, head].set(0)})
    keep = jnp.ones((L, 4, 1)).at[layer, head].set(0)
    patched = module(tokens(), taps=Taps(edits={"attn.heads": Edit(keep[:, None, None], jnp.zeros((L, 1, 1, 1, 1)))}))
    assert_close(patched.logits, ablated(tokens()).logits, roundings(config()))
    assert np.abs(patched.logits - module(tokens()).logits).max() > 1e-3


def test_patching_another_run_in():
    """The stream of another text, put in place of ours behind layer 1, gives the other text's logits."""
    module, _, _ = build(config())
    other = (tokens() + 5) % 32
    stream = module(other, taps=Taps(record={"resid.post": lambda x: x})).records["resid.post"]
    at = (jnp.arange(L) == 1).astype(stream.dtype).reshape(L, 1, 1, 1)
    patched = module(tokens(), taps=Taps(edits={"resid.post": Edit(1 - at, at * stream)}))
    np.testing.assert_array_equal(patched.logits, module(other).logits)


@pytest.mark.parametrize("stack", WAYS)
def test_order_is_edit_probe_record(stack):
    """Where an edit keeps nothing, the probe behind it still sees a gradient, what lies before it none, and the record the edit's value."""
    module, _, values = build(config(stack))
    cut = (jnp.arange(L) != 1).astype("float64")  # layer 1 keeps nothing

    def loss(values, here, before):
        taps = Taps(record={"resid.post": lambda x: x.max()}, edits={"resid.post": Edit(cut, 7 * (1 - cut))},
                    probes={"resid.post": Probe(here, rms), "mlp.out": Probe(before, rms)})
        out = parameters.bind(module, values)(tokens(), taps=taps)
        return loss_of(out.logits), out.records["resid.post"]

    (_, here, before), record = jax.grad(loss, (0, 1, 2), has_aux=True)(values, jnp.zeros(L), jnp.zeros(L))
    assert (here[1:] > 0).all()
    assert here[0] == 0
    np.testing.assert_array_equal(before[:2], 0)
    assert before[2] > 0
    assert record[1] == 7


@pytest.mark.parametrize("stack", WAYS)
def test_records_carry_no_gradient(stack):
    """A loss made of records has no gradient, for any parameter."""
    module, _, values = build(config(stack))

    def loss(values):
        taps = Taps(record={site: jnp.mean for site in SITES if site != "attn.rows"})  # rows hold -inf
        records = parameters.bind(module, values)(tokens(), taps=taps).records
        return sum(jnp.sum(record) for record in records.values())

    assert loss(values) != 0
    for gradient in jax.grad(loss)(values).values():
        np.testing.assert_array_equal(gradient, 0)


@pytest.mark.parametrize(("request_", "hint"), (
    ({"record": {"resid.prr": jnp.mean}}, "resid.pre"), ({"edits": {"attn.head": Edit(jnp.ones(3), jnp.ones(3))}}, "attn.heads"),
    ({"probes": {"mlp.hiden": Probe(jnp.zeros(3), rms)}}, "mlp.hidden"), ({"record": {"logit": jnp.mean}}, "logits"),
))
def test_unknown_site(request_, hint):
    """A site that does not exist is refused, with the nearest one named."""
    with pytest.raises(ValueError, match=f"perhaps you meant '{hint}'"):
        Taps(**request_)


def test_unknown_site_in_model_code():
    """Model code cannot call a site that the table lacks."""
    with pytest.raises(ValueError, match=r"unknown site 'resid\.pst'"):
        Taps().frame()("resid.pst", jnp.ones(3))


@pytest.mark.parametrize("site", [site for site, row in SITES.items() if row.statistic])
def test_statistics_are_read_only(site):
    """A statistic is recorded, never edited or probed: it feeds nothing."""
    Taps(record={site: jnp.mean})
    for change in ({"edits": {site: Edit(jnp.ones(3), jnp.ones(3))}}, {"probes": {site: Probe(jnp.zeros(3), rms)}}):
        with pytest.raises(ValueError, match=site):
            Taps(**change)


@pytest.mark.parametrize("layers", (1, 2, 5))
def test_edit_of_another_number_of_layers(layers):
    """An edit or probe whose leading axis is not the number of layers is refused, not cut to size."""
    module, _, _ = build(config())
    some = jnp.ones(layers)
    for taps in (Taps(edits={"mlp.out": Edit(some, some)}), Taps(probes={"mlp.out": Probe(some, rms)})):
        with pytest.raises((ValueError, TypeError)):
            module(tokens(), taps=taps)
