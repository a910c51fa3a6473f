"""The benchmark of mixtures compares what it says it compares."""

import itertools

import jax
import numpy as np
import pytest

import train.bench_mixture
from configs.knobs import replace
from models.parameters import flops_per_token, table
from models.transformer import Transformer
from tests.train.small import SAME, small
from train.bench_mixture import WAYS, active_width, alternate, bench_mixture, of_layer
from train.data.corpus import Corpus

MIXTURE = {"model.moe.experts": 4, "model.moe.width": 8, "model.moe.shared": 1, "model.depth": 1}


def test_every_way_is_measured_beside_the_dense_mlp(monkeypatch):
    """Of the layer and of the step, each way has its seconds and its ratio to the dense MLP within a round; that of the MLP is 1."""
    monkeypatch.setattr(train.bench_mixture, "ROUNDS", 2)
    monkeypatch.setattr(train.bench_mixture, "WAYS", {"dropless": WAYS["dropless"]})
    text = np.random.default_rng(0).integers(1, 256, 2000).astype(np.uint8)
    corpus = Corpus("text", text, text, 1, "")
    found = bench_mixture(small(MIXTURE), corpus)
    assert found.keys() == {"layer", "step"}
    for of in found.values():
        assert of.keys() == {"mlp", "dropless"} and of["mlp"]["over_mlp"] == {"q25": 1.0, "median": 1.0, "q75": 1.0}
        assert all(row["seconds"] > 0 and row["over_mlp"]["q25"] <= row["over_mlp"]["median"] for row in of.values())
    assert bench_mixture(small(), corpus) is None


def test_ratios_are_within_a_round(monkeypatch):
    """A machine that is slower in every other round changes no ratio: here the second program always takes twice as long as the first."""
    clock, seconds = [0.0], itertools.cycle((1.0, 2.0, 5.0, 10.0))

    def run():
        clock[0] += next(seconds)

    monkeypatch.setattr(train.bench_mixture.time, "perf_counter", lambda: clock[0])
    found = alternate({"mlp": run, "twice": run})
    assert found["twice"]["over_mlp"] == {"q25": 2.0, "median": 2.0, "q75": 2.0}
    assert found["mlp"]["seconds"] == 3.0  # the median of as many ones as fives


def test_the_dense_mlp_has_the_active_operations():
    """A model with dense MLPs of the active width has the operations of the mixture, but for the router."""
    model = small(MIXTURE).model
    dense = replace(model, {"moe.experts": None, "mlp.width": active_width(model.layers[0])})
    flops = lambda of: flops_per_token(of, table(Transformer(of)), 8)
    assert flops(model) - flops(dense) == pytest.approx(3 * 2 * 16 * 4)  # the router


def test_every_way_of_the_layer_gives_the_same_output():
    """With room for everything, all ways compute the same loss and gradients; the dense MLP is another function."""
    config = small(MIXTURE | {"model.moe.capacity": 4.0})
    found = {name: run() for name, run in of_layer(config, config.model.layers[0]).items()}
    assert found.keys() == {"mlp", *WAYS}
    for name in ("dropless", "capacity"):
        for a, b in zip(jax.tree.leaves(found[name]), jax.tree.leaves(found["dense"]), strict=True):
            np.testing.assert_allclose(a, b, rtol=0, atol=SAME * np.abs(b).max())
