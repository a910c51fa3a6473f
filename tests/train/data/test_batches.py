"""Batches: what is seen at which step."""

import numpy as np
import pytest

from configs.schema import Data
from tests.train.small import mesh_of
from train.data.batches import held_out_batch, training_batches
from train.data.corpus import Corpus

SEQUENCE, BATCH, WINDOWS = 16, 4, 24
DATA = Data(source="text", batch=BATCH, sequence=SEQUENCE)
STEPS_PER_EPOCH = WINDOWS // BATCH


@pytest.fixture(scope="module")
def corpus():
    """Random bytes, so that each window is known by its content; a few bytes more than whole windows."""
    draw = lambda n: np.random.default_rng(n).integers(0, 256, n).astype(np.uint8)
    return Corpus("text", draw(WINDOWS * SEQUENCE + 5), draw(150), 1, "")


def rows(array) -> list[bytes]:
    """The token rows of a batch."""
    return [np.asarray(row).astype(np.uint8).tobytes() for row in np.asarray(array)]


def test_a_batch_depends_on_seed_and_step_alone(corpus):
    """Whatever was asked before, and from a pipeline made anew, step s of a seed has the same rows in the same order."""
    batch = training_batches(corpus, DATA, 7, mesh_of())
    forward = {step: rows(batch(step)) for step in range(10)}
    again = training_batches(corpus, DATA, 7, mesh_of())
    assert {step: rows(again(step)) for step in (9, 0, 4, 4, 1)} == {step: forward[step] for step in (9, 0, 4, 1)}
    assert rows(training_batches(corpus, DATA, 8, mesh_of())(0)) != forward[0]


@pytest.mark.parametrize("axes", [{"data": 4}, {"data": 2, "fsdp": 2}, {"data": 2, "fsdp": 2, "tensor": 2}])
def test_no_mesh_changes_what_is_seen(corpus, axes):
    """Spread over devices, a batch is the one of a single device."""
    one, many = (training_batches(corpus, DATA, 7, mesh_of(**mesh)) for mesh in ({}, axes))
    for step in (0, 5, 6):
        np.testing.assert_array_equal(np.asarray(one(step)), np.asarray(many(step)))
    assert len(many(0).sharding.device_set) == np.prod(list(axes.values()))


@pytest.mark.parametrize("epoch", [0, 1])
def test_each_window_is_seen_once_an_epoch(corpus, epoch):
    """An epoch shows every window of sequence + 1 tokens once; windows share one token, so that every byte but the first is a target."""
    batch = training_batches(corpus, DATA, 7, mesh_of())
    seen = [row for step in range(epoch * STEPS_PER_EPOCH, (epoch + 1) * STEPS_PER_EPOCH) for row in rows(batch(step))]
    text = corpus.train.tobytes()
    assert sorted(seen) == sorted(text[i : i + SEQUENCE + 1] for i in range(0, WINDOWS * SEQUENCE, SEQUENCE))


def test_epochs_differ_in_order(corpus):
    """The windows are neither in the order of the text nor in the same order twice."""
    batch = training_batches(corpus, DATA, 7, mesh_of())
    first, second = ([row for step in range(STEPS_PER_EPOCH) for row in rows(batch(start + step))] for start in (0, STEPS_PER_EPOCH))
    text = corpus.train.tobytes()
    assert first != second and first != [text[i : i + SEQUENCE + 1] for i in range(0, WINDOWS * SEQUENCE, SEQUENCE)]


def test_epochs_that_batches_do_not_divide_lose_nothing(corpus):
    """Where the batch does not divide the windows, a batch straddles two epochs and each still shows every window once."""
    data = Data(source="text", batch=5, sequence=SEQUENCE)
    batch = training_batches(corpus, data, 7, mesh_of())
    seen = [row for step in range(10) for row in rows(batch(step))]
    assert len(set(seen[:WINDOWS])) == WINDOWS == len(set(seen[WINDOWS : 2 * WINDOWS]))


def test_held_out_batches_are_fixed_and_spread(corpus):
    """The batches of an evaluation are pieces of the held-out text alone, all different, evenly spaced from its start to its end."""
    parts = 3
    batches = [held_out_batch(corpus, DATA, mesh_of(), BATCH, part, parts) for part in range(parts)]
    text = corpus.held_out.tobytes()
    starts = [text.index(row) for batch in batches for row in rows(batch)]
    gaps = np.diff(sorted(starts))
    assert len(set(starts)) == BATCH * parts and gaps.max() - gaps.min() <= 1
    space = (len(text) - SEQUENCE) / (BATCH * parts)
    assert min(starts) <= space and max(starts) >= len(text) - SEQUENCE - 1 - space
    np.testing.assert_array_equal(np.asarray(batches[1]), np.asarray(held_out_batch(corpus, DATA, mesh_of(data=2), BATCH, 1, parts)))
