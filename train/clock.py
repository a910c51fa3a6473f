"""Step times."""

import time

import numpy as np


class Clock:
    """Times from the end of one step to the end of the next, leaving out those that hold something else: `restart` begins anew."""

    def __init__(self, tokens_per_step: int):
        self.tokens_per_step, self.seconds, self.last = tokens_per_step, [], None

    def restart(self) -> None:
        self.last = None

    def step(self) -> float | None:
        """The seconds of the step that ended now, where the one before it was timed from."""
        now = time.perf_counter()
        took, self.last = (None if self.last is None else now - self.last), now
        if took is not None:
            self.seconds.append(took)
        return took

    def percentiles(self) -> dict[str, float] | None:
        if not self.seconds:
            return None
        return {f"p{p}": float(f"{np.percentile(self.seconds, p):.6g}") for p in (50, 95, 99)}

    def tokens_per_second(self) -> float | None:
        return float(f"{self.tokens_per_step / np.median(self.seconds):.6g}") if self.seconds else None

