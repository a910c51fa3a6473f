"""Batches as a pure function of (seed, step): resume is a seek, and no process count or mesh changes what is seen."""

from collections.abc import Callable
from typing import Any

import grain
import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array, Int

from configs.load import UserError
from configs.schema import Data
from train.data.corpus import Corpus

BATCH = PartitionSpec(("data", "fsdp", "expert"))


class Windows:
    """Text cut into sequences of `length` tokens and the one after: a random-access source for grain."""

    def __init__(self, text: np.ndarray, length: int):
        self.text, self.length = text, length

    def __len__(self) -> int:
        return (len(self.text) - 1) // self.length

    def __getitem__(self, index: int) -> np.ndarray:
        return self.text[index * self.length : (index + 1) * self.length + 1]


def check_size(corpus: Corpus, sequence: int) -> None:
    """Raises UserError where a part of the corpus is shorter than one sequence."""
    for name, text in (("training", corpus.train), ("held-out", corpus.held_out)):
        if len(text) <= sequence:
            raise UserError(f"data.source = {corpus.source!r}: its {name} part has {len(text)} bytes; "
                            f"data.sequence = {sequence} needs at least {sequence + 1}")


def place(rows: Callable[[int], np.ndarray], shape: tuple[int, int], mesh) -> Int[Array, "b t"]:
    """The global array of token rows; each process makes the rows that its devices hold."""

    def part(index: tuple[slice, ...]) -> np.ndarray:
        return np.stack([rows(i) for i in range(shape[0])[index[0]]]).astype(np.int32)

    return jax.make_array_from_callback(shape, NamedSharding(mesh, BATCH), part)


def training_windows(corpus: Corpus, data: Data, seed: int) -> Callable[[int, int], int]:
    """(step, row), both from 0, to the place of the row's window in the training text: shuffled anew each epoch, and from each step of
    data.skip on so many batches further along."""
    check_size(corpus, data.sequence)
    order = grain.MapDataset.source(range(len(Windows(corpus.train, data.sequence)))).seed(seed).shuffle().repeat()
    batches = lambda step: step + sum(skipped for start, skipped in data.skip if step >= start)
    return lambda step, row: int(order[batches(step) * data.batch + row])


def training_batches(corpus: Corpus, data: Data, seed: int, mesh) -> Callable[[int], Int[Array, "b t"]]:
    """Step (from 0) to its batch [data.batch, data.sequence + 1]: the windows of the training text that `training_windows` tells."""
    of, windows = training_windows(corpus, data, seed), Windows(corpus.train, data.sequence)
    return lambda step: place(lambda row: windows[of(step, row)], (data.batch, data.sequence + 1), mesh)


def contents(corpus: Corpus, data: Data, seed: int, step: int) -> dict[str, Any]:
    """What the batch of a step holds: the places of its windows, and their text."""
    of, windows = training_windows(corpus, data, seed), Windows(corpus.train, data.sequence)
    places = [of(step, row) for row in range(data.batch)]
    return {"step": step, "windows": places, "text": [windows[place].tobytes().decode(errors="replace") for place in places]}


def held_out_batch(corpus: Corpus, data: Data, mesh, rows: int, part: int = 0, parts: int = 1) -> Int[Array, "b t"]:
    """Batch `part` of `parts` fixed batches of `rows` windows each, evenly spaced over the held-out text."""
    check_size(corpus, data.sequence)
    last = len(corpus.held_out) - data.sequence - 1
    start = lambda row: last * (2 * (row * parts + part) + 1) // (2 * rows * parts)
    return place(lambda row: corpus.held_out[start(row) : start(row) + data.sequence + 1], (rows, data.sequence + 1), mesh)
