"""What do DeepNorm and LayerNorm Scaling do for a deep narrow model, against pre-norm and post-norm? 24 layers, three
seeds.

Claim:   post-norm and DeepNorm fail from 250 million parameters on, pre-norm works, LayerNorm Scaling is best (perplexity at 250M: post
         1410, DeepNorm 22.8, pre 21.9, LayerNorm Scaling 20.4); Sun et al. 2025, arXiv 2502.05795, table 1. DeepNorm bounds the update at
         1,000 layers; Wang et al. 2022, arXiv 2203.00555.
Command: python -m scripts.ablate placement_at_depth, then python -m scripts.report runs/placement_at_depth
Expect:  six minutes on two cores. Post-norm stays at the unigram entropy; the stream's RMS in LayerNorm Scaling grows least among the
         placements that normalise before the branch.
"""

from configs.knobs import replace
from configs.load import load
from configs.sweep import Curve, seeds, variants


def base():
    return replace(load("tiny"), {
        "model.width": 64,
        "model.depth": 24,
        "model.mlp.width": 256,
        "model.embedding_scale": 10.0,  # 1 / std of the embedding: tokens enter at RMS 1
        "model.init.kind": "auto",  # the init is a part of the placement: pre has scaled, DeepNorm its own, LayerNorm Scaling plain normal
        "data.batch": 8,
        "train.steps": 100,
        "eval.batches": 16,
        "checkpoint.every": None,
    })


AXES = (
    variants("placement", **{name: {"model.norm.placement": name} for name in ("pre", "post", "deepnorm", "layernorm_scaling")}),
    seeds(3),
)
CURVES = (
    Curve("probe.activation_rms.resid.post", over="layer", step="last"),
    Curve("probe.grad_norm", over="layer", step="last"),
)
