"""A model of one billion parameters, to plan with: what would a step hold and send on machines that are not here?

Question: does it fit, and what crosses the network?
Command:  python -m scripts.describe llama_1b --mesh.fsdp 8
Expect:   bytes per device and collectives per step, from the compiler, without running anything.
"""

from configs.knobs import replace
from configs.schema import Experiment


def config() -> Experiment:
    return replace(Experiment(), {
        "model.width": 2048, "model.depth": 16, "model.vocab": 32_000, "model.tied": False,
        "model.attention.heads": 16, "model.attention.kv_heads": 8, "model.mlp.width": 8192,
        "model.mlp.kind": "silu", "model.mlp.gated": True,
        "train.dtype": "bfloat16", "train.remat": "full", "train.steps": 100_000, "optim.warmup": 2_000, "optim.learning_rate": 3e-4,
        "data.batch": 512, "data.sequence": 2048,
    })
