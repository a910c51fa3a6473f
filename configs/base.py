"""The plain starting point: a pre-norm byte model on the interpreter's own library, every knob at its default.

Question: none; other experiments are told as differences from this one.
Command:  python -m scripts.describe base
Expect:   an empty diff.
"""

from configs.schema import Experiment


def config() -> Experiment:
    return Experiment()
