"""Does OLMo 2's reordered norm need its QK-norm, and the QK-norm its reordering? Placement x QK-norm, four learning rates, three seeds.

Claim:   norms after the branches and QK-norm bring stability together, "in isolation, neither of these changes yield good results": spike
         score of the gradient norm 0.108 to 0.069 for both; OLMo 2, arXiv 2501.00656, section 3.
Command: python -m scripts.ablate placement_and_qk_norm, then python -m scripts.report runs/placement_and_qk_norm
Expect:  twelve minutes on two cores. An interaction below zero: what QK-norm gains on top of the reordered norm beyond what it gains on
         pre-norm, in the best loss and in the sensitivity to the learning rate.
"""

from configs.knobs import replace
from configs.load import load
from configs.sweep import Curve, seeds, values, variants


def base():
    return replace(load("tiny"), {"train.steps": 100, "eval.batches": 8, "checkpoint.every": None, "instruments.probe_every": None})


AXES = (
    variants("placement", pre={}, reordered={"model.norm.placement": "reordered"}),
    variants("qk_norm", none={}, whole={"model.attention.qk_norm.kind": "whole"}),
    values("optim.learning_rate", 3e-3, 1e-2, 3e-2, 1e-1),
    seeds(3),
)
CURVES = (Curve("train/grad_norm", over="step"),)
