"""The smallest mixture of experts worth looking at: `tiny` with eight experts of half the hidden width, of which a token takes two.

Question: does routing stay balanced, and what do the router's statistics look like when it does?
Command:  python -m scripts.train tiny_moe
Expect:   three minutes on two cores. As many operations a token as `tiny` and 1.1 million parameters; a held-out loss near 1.51 nats per
          byte, where `tiny` trained for as many steps ends near 1.56; no expert without a token, and at the end a MaxVio below 0.5.
"""

from configs import tiny
from configs.knobs import replace
from configs.schema import Experiment


def config() -> Experiment:
    return replace(tiny.config(), {
        "model.moe.experts": 8,
        "model.moe.width": 192,
        "model.moe.balance": 0.01,
        "model.moe.z_loss": 1e-3,
        "model.overrides": ("0: moe.experts=None",),
        "train.steps": 600,
    })
