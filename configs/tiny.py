"""The smallest model worth looking at: 0.47 million parameters on the interpreter's own library, half a minute on two cores.

Question: does everything work, and what do the statistics of a healthy run look like?
Command:  python -m scripts.train tiny
Expect:   a held-out loss near 1.8 nats per byte, well below the bigram entropy of the same text (2.42).
"""

from configs.knobs import replace
from configs.schema import Experiment


def config() -> Experiment:
    return replace(Experiment(), {
        "model.init.kind": "fan_in",  # at width 96 the usual 0.02 is a fifth of 1/sqrt(width), and ends 0.25 nats higher
        "model.init.std": 0.1,
        "model.embedding_scale": 9.8,  # sqrt(width): tokens enter the stream as large as a branch's output
    })
