"""What keeps the experts of a mixture in use? No balance, the Switch loss, the z-loss of the router and the bias rule, with sixteen
experts of which a token takes one; three seeds.

Claim:   without balance the router collapses onto few experts; the balance loss evens it (Fedus et al. 2021, arXiv 2101.03961), and so does
         adjusting a selection bias by the load, without a loss that pulls at the model: MaxVio 0.72 to 0.04 at better perplexity, 9.56 to
         9.50, at 1 billion parameters (Wang et al. 2024, arXiv 2408.15664). A z-loss of 1e-3 keeps logits small and quality the same (Zoph
         et al. 2022, arXiv 2202.08906).
Command: python -m scripts.ablate moe_balance, then python -m scripts.report runs/moe_balance
Expect:  a quarter of an hour on two cores. Without balance a quarter of the experts has no token and the fullest has five times the
         mean; the Switch loss brings the unused ones back, the bias rule too but evens the load less, the z-loss hardly. No difference
         in loss shown.
"""

from configs.knobs import replace
from configs.load import load
from configs.sweep import Curve, seeds, variants


def base():
    return replace(load("tiny"), {
        "model.mlp.width": 96,  # of each expert
        "model.moe.experts": 16,
        "model.moe.top_k": 1,
        "model.moe.normalise": False,  # a single weight divided by itself would not train the router
        "optim.learning_rate": 1e-2,
        "data.batch": 8,
        "train.steps": 150,
        "eval.batches": 16,
        "checkpoint.every": None,
        "instruments.probe_every": None,
    })


AXES = (
    variants("balance", none={}, switch={"model.moe.balance": 0.01}, z_loss={"model.moe.z_loss": 1e-3},
             bias={"model.moe.selection_bias": True, "model.moe.bias_rate": 1e-2}),
    seeds(3),
)
CURVES = (
    Curve("eval/loss", over="balance"),
    Curve("router_max_vio", over="step"),
    Curve("router_unused", over="step"),
    Curve("router_max_vio", over="balance"),
    Curve("router_unused", over="balance"),
)
