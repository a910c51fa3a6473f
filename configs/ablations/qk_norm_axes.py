"""Is QK-norm better over each head or over the whole projection? Per-head norm with one gain (Qwen 3, Gemma 3) against the norm of all
heads together (OLMo 2, MiniMax-M2), three learning rates, three seeds.

Claim:   per-head QK-LayerNorm is better than normalising the whole dimension; Wortsman et al. 2023, arXiv 2309.14322, figure E.8. OLMo 2
         and MiniMax-M2 chose the whole projection.
Command: python -m scripts.ablate qk_norm_axes, then python -m scripts.report runs/qk_norm_axes
Expect:  six minutes on two cores. Largest logits higher with the whole norm, since one head may take the others' share; losses close.
"""

from configs.knobs import replace
from configs.load import load
from configs.sweep import seeds, values, variants


def base():
    return replace(load("tiny"), {"train.steps": 120, "eval.batches": 8, "eval.every": 60, "checkpoint.every": None,
                                  "instruments.probe_every": None})


AXES = (
    variants("qk_norm", **{kind: {"model.attention.qk_norm.kind": kind} for kind in ("head", "whole")}),
    values("optim.learning_rate", 3e-3, 3e-2, 3e-1),
    seeds(3),
)
