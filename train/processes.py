"""Several processes as one run: joined, of one mind, and one of them writing its record."""

import contextlib
import functools
import os
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import NamedSharding, PartitionSpec

from configs.load import UserError, first_line

COORDINATOR, COUNT, INDEX = "JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID"

HEARTBEAT = 30
"""Seconds without a sign of life after which a process counts as dead, and the others end."""

GRACE = 10
"""Seconds that a process which fails alone has to put things in order: on the way out much would wait for the others."""

REFUSED = -1

WORDS = 1200
"""Bytes of an error that the other processes hear of: 300 letters of any kind."""

T = TypeVar("T")


def join_processes() -> None:
    """Joins the other processes of a Slurm, TPU pod or hand-made cluster run; does nothing where there is but one.

    By hand: JAX_COORDINATOR_ADDRESS (host:port of process 0), JAX_NUM_PROCESSES, JAX_PROCESS_ID. Raises UserError where these or the
    cluster do not tell enough, or the others do not come.
    """
    several = int(os.environ.get("SLURM_NTASKS", "1")) > 1 or "," in os.environ.get("TPU_WORKER_HOSTNAMES", "")
    if not (several or COORDINATOR in os.environ) or jax.distributed.is_initialized():
        return
    jax.config.update("jax_enable_preemption_service", False)  # it would take SIGTERM from train.guard, which hears of more signals
    try:
        jax.distributed.initialize(num_processes=number(COUNT), process_id=number(INDEX), heartbeat_timeout_seconds=HEARTBEAT,
                                   shutdown_timeout_seconds=HEARTBEAT)
    except (ValueError, RuntimeError) as error:
        raise UserError(f"the processes of this run cannot be joined: {first_line(error)}; set {COORDINATOR} (host:port of process 0), "
                        f"{COUNT} and {INDEX} at each, or start them with srun") from error


def number(variable: str) -> int | None:
    """The whole number in an environment variable, None where it is not set. Raises ValueError where it is something else."""
    word = os.environ.get(variable)
    if word is not None and not word.isdecimal():
        raise ValueError(f"{variable} = {word!r} is not a whole number")
    return None if word is None else int(word)


def decided_by_first(decide: Callable[[], bool]) -> bool:
    """What process 0 decides, at every process. Where it raises, the others end with exit status 2 and leave it to tell why."""
    if jax.process_count() == 1:
        return decide()
    answer, error = REFUSED, None
    if jax.process_index() == 0:
        try:
            answer = int(decide())
        except (UserError, OSError) as found:
            error = found
    answer = int(multihost_utils.broadcast_one_to_all(np.int32(answer)))
    if error is not None:
        raise error
    if answer == REFUSED:
        raise SystemExit(2)
    return bool(answer)


def listed_by_first(numbers: list[int]) -> list[int]:
    """The list that process 0 has, at every process."""
    if jax.process_count() == 1:
        return numbers
    count = int(multihost_utils.broadcast_one_to_all(np.int32(len(numbers))))
    return multihost_utils.broadcast_one_to_all(np.resize(np.int32([*numbers, 0]), count)).tolist()


class Elsewhere(UserError):
    """Another process failed at what all had to do."""


def done_by_all(action: Callable[[], T]) -> T:
    """What `action` returns here, where every process comes to its end; where one fails, all raise: that one its own error, the others
    Elsewhere with the same words. So they go the same way from here. `action` waits for no other process."""
    if jax.process_count() == 1:
        return action()
    result, error = None, None
    try:
        result = action()
    except Exception as found:
        error = found
    words = first_line(error).encode()[:WORDS] if error else b""
    told = multihost_utils.process_allgather(np.frombuffer(words.ljust(WORDS, b" "), np.uint8))
    if error is not None:
        raise error
    for index, theirs in enumerate(told):
        if words := bytes(theirs).decode(errors="replace").strip():
            raise Elsewhere(f"{words} (at process {index} of {jax.process_count()})")
    return result


class Largest:
    """The largest of the numbers that the processes give, told to all of them one call later, so that no call waits."""

    def __init__(self):
        self.pending: jax.Array | int = 0

    def of(self, number: int) -> int:
        """The largest of what was given by the call before; where there is but one process, its number."""
        if jax.process_count() == 1:
            return number
        given, largest = over_processes()
        told, self.pending = self.pending, largest(jax.make_array_from_callback((given.mesh.size,), given, lambda _: np.int32([number])))
        return int(jax.device_get(told))


@functools.cache
def over_processes() -> tuple[NamedSharding, Callable[[jax.Array], jax.Array]]:
    """The layout of one number per device, and the program that finds the largest."""
    mesh = jax.make_mesh((jax.device_count(),), ("all",))
    return NamedSharding(mesh, PartitionSpec("all")), jax.jit(jnp.max, out_shardings=NamedSharding(mesh, PartitionSpec()))


@contextlib.contextmanager
def one_record(directory: Path) -> Iterator[Path]:
    """As a context: where this process writes the record of the run. Process 0 writes to its directory; the others write and say the same
    to no effect, into a folder that is thrown away."""
    if jax.process_index() == 0:
        yield directory
        return
    with (tempfile.TemporaryDirectory() as scratch, open(os.devnull, "w") as nowhere,
          contextlib.redirect_stdout(nowhere), contextlib.redirect_stderr(nowhere)):
        yield Path(scratch)


@contextlib.contextmanager
def failing_alone() -> Iterator[None]:
    """As a context: where one process of several fails, it says so in one line and ends with status 2 within GRACE seconds. Those that
    wait for it then fail in their turn, when its connections close or its heartbeat stops."""
    try:
        yield
    except (jax.errors.JaxRuntimeError, UserError, OSError) as error:
        if jax.process_count() == 1:
            raise
        lost = "another process has ended, or a device failed: " if isinstance(error, jax.errors.JaxRuntimeError) else ""
        what = error if isinstance(error, UserError) else first_line(error)
        print(f"error: process {jax.process_index()} of {jax.process_count()}: {lost}{what}", file=sys.__stderr__, flush=True)
        end = threading.Timer(GRACE, os._exit, (2,))
        end.daemon = True
        end.start()
        raise SystemExit(2) from error
