"""A model of seven billion parameters, to plan with: what would a step hold and send on machines that are not here?

Question: does it fit, and what crosses the network?
Command:  python -m scripts.describe llama_7b --mesh.fsdp 64 --mesh.tensor 4
Expect:   bytes per device and collectives per step, from the compiler, without running anything.
"""

from configs import llama_1b
from configs.knobs import replace
from configs.schema import Experiment


def config() -> Experiment:
    return replace(llama_1b.config(), {
        "model.width": 4096, "model.depth": 32, "model.attention.heads": 32, "model.attention.kv_heads": 8, "model.mlp.width": 11_008,
        "data.batch": 1024, "data.sequence": 4096,
    })
