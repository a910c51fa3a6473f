"""How does the residual stream grow with depth, at init and after training? Pre-norm against the two placements that normalise what a
branch adds, sandwich and reordered, twelve layers, three seeds.

Claim:   in pre-norm the stream's variance grows exponentially with depth in training ("massive activations"), with norms after the
         branches about linearly; Peri-LN, arXiv 2502.02732 (sizes to 3.2 billion).
Command: python -m scripts.ablate residual_growth, then python -m scripts.report runs/residual_growth
Expect:  four minutes on two cores. RMS by layer: about sqrt(layer) everywhere at init; after training steeper in pre.
"""

from configs.knobs import replace
from configs.load import load
from configs.sweep import Curve, seeds, variants


def base():
    return replace(load("tiny"), {
        "model.width": 64,
        "model.depth": 12,
        "model.mlp.width": 256,
        "model.embedding_scale": 10.0,  # 1 / std of the embedding: tokens enter at RMS 1, as a branch leaves its norm
        "data.batch": 8,
        "train.steps": 200,
        "optim.learning_rate": 1e-2,
        "eval.batches": 16,
        "checkpoint.every": None,
    })


AXES = (
    variants("placement", **{name: {"model.norm.placement": name} for name in ("pre", "sandwich", "reordered")}),
    seeds(3),
)
CURVES = (
    Curve("probe.activation_rms.resid.post", over="layer", step="first"),
    Curve("probe.activation_rms.resid.post", over="layer", step="last"),
    Curve("probe.activation_max.resid.post", over="layer", step="last"),
)
