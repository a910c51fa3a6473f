"""Which numbers are computed in which type."""

from typing import Literal

import jax
import numpy as np

Operands = Literal["float32", "bfloat16"]
"""The factors of matrix products: as they come, or rounded to bfloat16 with sums in float32."""


def at_least_float32(x: jax.Array) -> np.dtype:
    """The type of statistics, angles and sums over x: float32, or float64 where x has it."""
    return np.promote_types(x.dtype, np.float32)
