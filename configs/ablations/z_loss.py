"""Does the z-loss hold the output logits where they are, and does it help? z-loss 0 and 1e-4 at a high learning
rate, no weight decay, three seeds.

Claim:   late in training at a high learning rate the output logits drift, log Z with them, until the run diverges; a z-loss of 1e-4 stops
         the drift and the divergence; Wortsman et al. 2023, arXiv 2309.14322, section 3.1.2 (2.4 million parameters at 0.1).
Command: python -m scripts.ablate z_loss, then python -m scripts.report runs/z_loss
Expect:  five minutes on two cores. log Z and the mean logit drift without the z-loss and stay near zero with it; the loss differs, if at
         all.
"""

from configs.knobs import replace
from configs.load import load
from configs.sweep import Curve, seeds, variants


def base():
    return replace(load("tiny"), {
        "model.tied": False,
        "model.attention.qk_norm.kind": "head",  # so that the attention logits are not what fails
        "optim.learning_rate": 1e-1,
        "optim.weight_decay": 0.0,
        "train.steps": 300,
        "eval.batches": 8,
        "checkpoint.every": None,
        "instruments.probe_every": None,
    })


AXES = (
    variants("z_loss", none={"train.z_loss": 0.0}, weak={"train.z_loss": 1e-4}),
    seeds(3),
)
CURVES = (Curve("logits/log_z", over="step"), Curve("logits/mean", over="step"))
