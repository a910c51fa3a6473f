"""How large is the gradient of the last layer before the first step, and how does it depend on the depth? Post-norm against pre-norm, depth
3 to 48, three seeds, no training.

Claim:   the gradient of the last layer's MLP is of the order d sqrt(ln d) in post-norm, whatever the depth, and smaller by 1/sqrt(depth)
         in pre-norm, whose final norm sees a stream that grows with depth; Xiong et al. 2020, arXiv 2002.04745, theorem 1 (LayerNorm,
         Xavier).
Command: python -m scripts.ablate gradient_at_init, then python -m scripts.report runs/gradient_at_init
Expect:  two minutes on two cores. Exponents of the last layer's gradient by depth: about 0 for post, about -0.5 for pre. By layer: in
         post the gradient is largest in the last layer, in pre in the first.
"""

from configs.knobs import replace
from configs.load import load
from configs.sweep import Curve, seeds, values, variants


def base():
    return replace(load("tiny"), {
        "model.norm.kind": "layer",
        "train.steps": 0,
        "eval.batches": 1,
        "checkpoint.every": None,
        "instruments.every": None,
    })


AXES = (
    variants("placement", pre={}, post={"model.norm.placement": "post"}),
    values("model.depth", 3, 6, 12, 24, 48),
    seeds(3),
)
CURVES = (
    Curve("probe.grad_norm.mlp", over="model.depth", layer="last", step="first"),
    Curve("probe.grad_norm.mlp", over="model.depth", layer="first", step="first"),
    Curve("probe.grad_norm.mlp", over="layer", step="first"),
)
