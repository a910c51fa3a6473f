"""Which placement of the norm trains best at this size, and does QK-norm change the answer? Four placements, with and without per-head
QK-norm, two learning rates, one seed.

Command: python -m scripts.ablate norm_placement_quick, then python -m scripts.report runs/norm_placement_quick
Expect:  within six minutes on two cores: pre and sandwich bear the high learning rate, post does not; QK-norm keeps the largest attention
         logit small everywhere. One seed gives no intervals.
"""

from configs.knobs import replace
from configs.load import load
from configs.sweep import values, variants


def base():
    return replace(load("tiny"), {
        "train.steps": 80,
        "eval.every": 80,
        "eval.batches": 8,
        "checkpoint.every": None,
        "instruments.probe_every": None,
    })


AXES = (
    variants("placement", **{name: {"model.norm.placement": name} for name in ("pre", "post", "sandwich", "reordered")}),
    variants("qk_norm", none={}, head={"model.attention.qk_norm.kind": "head"}),
    values("optim.learning_rate", 3e-3, 3e-2),
)
