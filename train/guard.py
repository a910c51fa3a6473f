"""How a run ends: exit statuses, signals, and values that are not finite."""

import signal
from typing import Literal

from train.processes import Largest

Status = Literal["completed", "diverged", "preempted", "interrupted", "failed"]

EXIT: dict[Status, int] = {"completed": 0, "failed": 2, "diverged": 3, "preempted": 75, "interrupted": 130}
"""The exit status of each way to end; 2 is also that of any mistake in what the user gave."""

SIGNALS: dict[int, Status] = {signal.SIGUSR1: "preempted", signal.SIGTERM: "preempted", signal.SIGINT: "interrupted"}
"""What each signal means. Slurm's --signal=USR1@60 announces SIGTERM a minute ahead, so it is no first of two."""

RECEIVED: tuple[Status | None, ...] = (None, "preempted", "interrupted")
"""Where the processes received different signals, the last of these counts."""


class Signals:
    """As a context: the first SIGTERM or SIGINT, or a SIGUSR1, is kept for the loop to end after its step; a second one acts at once."""

    received: Status | None = None
    agreed: Status | None = None

    def __enter__(self) -> "Signals":
        self.largest = Largest()
        self.before = {number: signal.signal(number, self.receive) for number in SIGNALS}
        return self

    def __exit__(self, *_) -> None:
        for number, handler in self.before.items():
            signal.signal(number, handler)

    def receive(self, number: int, _) -> None:
        self.received = self.received or SIGNALS[number]
        if number != signal.SIGUSR1:
            for second in (signal.SIGTERM, signal.SIGINT):
                signal.signal(second, signal.SIG_DFL)

    def agree(self) -> Status | None:
        """What was received, by any of the processes, at the same step of each: so all of them call this at every step."""
        self.agreed = RECEIVED[self.largest.of(RECEIVED.index(self.received))]
        return self.agreed
