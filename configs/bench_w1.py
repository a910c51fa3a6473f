"""A small model for measuring speed: width 256, 6 layers, 8 x 256 tokens.

Question: which share of this machine's matrix rate does a training step reach, and what does watching it cost?
Command:  python -m scripts.bench bench_w1
Expect:   at least 42 % of a large float32 product of the same run on a CPU.
"""

from configs import tiny
from configs.knobs import replace
from configs.schema import Experiment


def config() -> Experiment:
    return replace(tiny.config(), {
        "model.width": 256, "model.depth": 6, "model.attention.heads": 4, "model.mlp.width": 1024, "model.embedding_scale": 16.0,
        "data.batch": 8, "data.sequence": 256, "eval.batches": 2,
    })
