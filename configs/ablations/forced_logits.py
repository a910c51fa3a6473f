"""How large may attention logits be before the loss suffers? Queries and keys are normalised without gains, and attention.scale sets the
largest logit they can reach: kappa times their cosine. Six sizes, three seeds.

Claim:   forcing the largest logit to kappa, the loss worsens near 1e3 and at 1e4 is worse than a bigram model's; Wortsman et al. 2023,
         arXiv 2309.14322, figure 10 (10 million parameters).
Command: python -m scripts.ablate forced_logits, then python -m scripts.report runs/forced_logits
Expect:  five minutes on two cores. A flat basin around 10, then a loss that rises with kappa.
"""

from configs.knobs import replace
from configs.load import load
from configs.sweep import Curve, seeds, variants

HEAD_WIDTH = 24


def base():
    return replace(load("tiny"), {
        "model.attention.head_width": HEAD_WIDTH,
        "model.attention.qk_norm.kind": "head",
        "model.attention.qk_norm.norm.scale": None,
        "train.steps": 120,
        "eval.batches": 8,
        "checkpoint.every": None,
        "instruments.probe_every": None,
    })


AXES = (
    # |q| = |k| = sqrt(head width), so scale = kappa / head width makes the logit kappa cos(q, k)
    variants("kappa", **{f"{kappa:g}": {"model.attention.scale": kappa / HEAD_WIDTH} for kappa in (1.0, 10.0, 100.0, 1e3, 1e4, 1e5)}),
    seeds(3),
)
CURVES = (
    Curve("eval/loss", over="kappa"),
    Curve("attention_entropy", over="kappa", layer="mean"),
)
