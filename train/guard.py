"""How a run ends: exit statuses, signals, and values that are not finite."""

import signal
from typing import Literal

Status = Literal["completed", "diverged", "preempted", "interrupted", "failed"]

EXIT: dict[Status, int] = {"completed": 0, "failed": 2, "diverged": 3, "preempted": 75, "interrupted": 130}
"""The exit status of each way to end; 2 is also that of any mistake in what the user gave."""

SIGNALS: dict[int, Status] = {signal.SIGTERM: "preempted", signal.SIGINT: "interrupted"}


class Signals:
    """As a context: the first SIGTERM or SIGINT sets `received`, for the loop to end after its step; a second one acts at once."""

    received: Status | None = None

    def __enter__(self) -> "Signals":
        self.before = {number: signal.signal(number, self.receive) for number in SIGNALS}
        return self

    def __exit__(self, *_) -> None:
        for number, handler in self.before.items():
            signal.signal(number, handler)

    def receive(self, number: int, _) -> None:
        self.received = SIGNALS[number]
        signal.signal(number, signal.SIG_DFL)
