"""Does QK-norm lower the sensitivity to the learning rate, and is it the attention logits that it tames? Pre-norm with and without per-head
QK-norm, over two and a half orders of magnitude of the learning rate, three seeds.

Claim:   learning-rate sensitivity is lower with QK-norm, and without it the largest attention logit grows with the learning rate until the
         loss suffers; Wortsman et al. 2023, arXiv 2309.14322 (there: warmup 5e3 of 1e5 steps, C4, per-head QK-LayerNorm).
Command: python -m scripts.ablate qk_norm_learning_rate, then python -m scripts.report runs/qk_norm_learning_rate
Expect:  ten minutes on two cores. With QK-norm a flatter curve and logits one to three orders of magnitude smaller at the highest rates.
"""

from configs.knobs import replace
from configs.load import load
from configs.sweep import seeds, values, variants


def base():
    return replace(load("tiny"), {"train.steps": 120, "eval.batches": 8, "eval.every": 60, "checkpoint.every": None,
                                  "instruments.probe_every": None})


AXES = (
    variants("qk_norm", none={}, head={"model.attention.qk_norm.kind": "head"}),
    values("optim.learning_rate", 1e-3, 3e-3, 1e-2, 3e-2, 3e-1),
    seeds(3),
)
