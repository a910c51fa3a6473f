"""A larger model for measuring speed: width 512, 8 layers, 4 x 512 tokens.

Question: which share of this machine's matrix rate does a training step reach, and what does watching it cost?
Command:  python -m scripts.bench bench_w2
Expect:   at least 66 % of a large float32 product of the same run on a CPU.
"""

from configs import tiny
from configs.knobs import replace
from configs.schema import Experiment


def config() -> Experiment:
    return replace(tiny.config(), {
        "model.width": 512, "model.depth": 8, "model.attention.heads": 8, "model.mlp.width": 2048, "model.embedding_scale": 22.6,
        "data.batch": 4, "data.sequence": 512, "eval.batches": 2,
    })
