"""The smallest mixture of experts worth looking at: `tiny` with eight experts of half the hidden width, of which a token takes two.

Question: does routing stay balanced, and what do the router's statistics look like when it does?
Command:  python -m scripts.train tiny_moe
Expect:   three minutes on two cores. As many operations a token as `tiny`, 1.1 million parameters, a held-out loss a little below that of
          `tiny` trained as long; after the first hundred steps no expert without a token and a MaxVio below one in every layer.
"""

from configs.knobs import replace
from configs.load import load
from configs.schema import Experiment


def config() -> Experiment:
    return replace(load("tiny"), {
        "run.name": None,
        "model.moe.experts": 8,
        "model.moe.width": 192,
        "model.moe.balance": 0.01,
        "model.moe.z_loss": 1e-3,
        "model.overrides": ("0: moe.experts=None",),
        "train.steps": 600,
    })
