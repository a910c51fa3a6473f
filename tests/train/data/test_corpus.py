"""Text as bytes: the split by file, its hash, its entropies, and what is refused."""

import hashlib
import itertools
import os

import numpy as np
import pytest

from configs.load import UserError
from configs.schema import Data
from tests.train.small import SAME, mesh_of, text_of
from train.data.batches import held_out_batch, training_batches
from train.data.corpus import entropies, find, read


@pytest.fixture
def library(tmp_path):
    """Sixty documents that begin with their name, some of them in folders."""
    root = tmp_path / "library"
    for index in range(60):
        path = root / ("old" if index % 3 else "new") / f"{index:02}.txt"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"<{index:02}>" + text_of(50, index))
    return root


def documents(part: np.ndarray) -> set[bytes]:
    return set(part.tobytes().split(b"\0"))


def test_no_document_is_in_both_parts(library):
    """Each file is whole in the training part or in the held-out part, in one of them alone, and about a tenth is held out."""
    corpus = read(str(library))
    train, held_out = documents(corpus.train), documents(corpus.held_out)
    assert not train & held_out
    assert train | held_out == {path.read_bytes() for path in library.rglob("*.txt")}
    assert corpus.files == 60 and 1 <= len(held_out) <= 15


def test_a_new_document_moves_no_other(library):
    """A file's part depends on its own path, so that a growing corpus leaks nothing from training into the held-out text."""
    before = documents(read(str(library)).held_out)
    (library / "new" / "zz.txt").write_text("<zz> the latest")
    assert before <= documents(read(str(library)).held_out) <= before | {b"<zz> the latest"}


def test_few_documents_are_cut_by_bytes(tmp_path):
    """Of a single file the last tenth is held out: both parts together are the file."""
    (tmp_path / "book.txt").write_text(text_of(1000))
    corpus = read(str(tmp_path / "book.txt"))
    assert corpus.train.tobytes() + corpus.held_out.tobytes() == (tmp_path / "book.txt").read_bytes()
    assert len(corpus.held_out) == 100


def test_the_hash_names_the_text(library, tmp_path):
    """The SHA-256 is that of both parts with a zero byte between, the same wherever the folder lies, and another after one byte changes."""
    first = read(str(library))
    assert first.sha256 == hashlib.sha256(first.train.tobytes() + b"\0" + first.held_out.tobytes()).hexdigest()
    moved = library.rename(tmp_path / "moved")
    assert read(str(moved)).sha256 == first.sha256
    path = moved / "old" / "01.txt"
    path.write_bytes(path.read_bytes()[:-1] + b"!")
    assert read(str(moved)).sha256 != first.sha256


def test_the_same_files_are_read_once(library):
    """As long as its files stay as they are, a source is one and the same corpus, which nobody can write to."""
    first = read(str(library))
    assert read(str(library)) is first
    assert not first.train.flags.writeable and not first.held_out.flags.writeable


def test_a_text_of_the_same_size_is_read_anew(library):
    """A file that was rewritten with as many bytes is read again, though all that tells is its time of change, one nanosecond on."""
    path = library / "old" / "01.txt"
    text, before = path.read_bytes(), path.stat()
    first = read(str(library))
    path.write_bytes(text[::-1])
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns + 1))
    assert path.stat().st_size == before.st_size
    second = read(str(library))
    assert text[::-1] in documents(second.train) | documents(second.held_out) and second.sha256 != first.sha256
    path.write_bytes(text)
    assert read(str(library)).sha256 == first.sha256


@pytest.mark.parametrize("change", [
    lambda root: (root / "new" / "zz.txt").write_text("the latest"), lambda root: (root / "new" / "00.txt").unlink(),
    lambda root: (root / "new" / "00.txt").rename(root / "new" / "0.txt"), lambda root: (root / "new" / "00.txt").write_text("longer" * 99),
], ids=["added", "removed", "renamed", "longer"])
def test_other_files_are_another_corpus(change, library):
    """A file added, removed, renamed or grown is seen by the next run of the process."""
    first = read(str(library))
    change(library)
    second = read(str(library))
    kept = documents(second.train) | documents(second.held_out)
    assert second is not first and kept == {path.read_bytes() for path in library.rglob("*.txt")}


def test_sources_do_not_take_each_others_place(library, tmp_path):
    """Two sources read in turn are each themselves, also two folders that hold the same files."""
    (tmp_path / "other.txt").write_text(text_of(200, 99))
    for _ in range(2):
        assert read(str(library)).files == 60 and read(str(tmp_path / "other.txt")).files == 1
    assert read(str(library / "old")).source != read(str(library)).source


def test_hidden_and_empty_files_are_left_out(library):
    """Neither a dot file, whatever it holds, nor an empty one changes the corpus."""
    before = read(str(library))
    (library / ".git").mkdir()
    (library / ".git" / "index").write_bytes(b"\xff\0")
    (library / "empty.txt").write_text("")
    assert read(str(library)).sha256 == before.sha256


def test_the_standard_library_is_read_without_its_tests():
    """`stdlib` is the interpreter's own .py files in sorted order, its test folders left out."""
    root, paths = find("stdlib")
    assert paths == sorted(paths) and len(paths) > 200 and (root / "dataclasses.py") in paths
    assert not [p for p in paths if {"test", "tests", "idlelib", "lib2to3"} & set(p.relative_to(root).parts[:-1])]


def de_bruijn(k: int) -> np.ndarray:
    """A text in which each of the k^2 pairs of k symbols occurs once: an Euler tour of the complete graph with loops."""
    tour, stack, left = [], [0], {a: list(range(k)) for a in range(k)}
    while stack:
        if left[stack[-1]]:
            stack.append(left[stack[-1]].pop())
        else:
            tour.append(stack.pop())
    return np.asarray(tour[::-1], np.uint8)


def test_uniform_pairs_carry_log_k():
    """Where each pair of k bytes is equally frequent, the byte before tells nothing: the bigram entropy is log k."""
    for k in (2, 16):
        text = de_bruijn(k)
        assert sorted(map(tuple, np.stack((text[:-1], text[1:]), 1))) == list(itertools.product(range(k), repeat=2))
        assert entropies(text)[1] == pytest.approx(np.log(k), rel=SAME)


def test_uniform_bytes_carry_log_256():
    """256 equally frequent bytes have a unigram entropy of log 256 nats; in a fixed order, the next one is certain."""
    unigram, bigram = entropies(np.tile(np.arange(256, dtype=np.uint8), 3))
    assert unigram == pytest.approx(np.log(256), rel=SAME) and bigram == pytest.approx(0, abs=SAME)


def test_a_constant_text_carries_nothing():
    """One byte over and over has no entropy."""
    np.testing.assert_allclose(entropies(np.full(500, 97, np.uint8)), (0.0, 0.0), atol=SAME)


def test_a_markov_chain_carries_its_entropy_rate():
    """The bigram entropy of a chain's text is -sum pi P log P, its unigram entropy that of the stationary distribution."""
    chain, n = np.array([[0.9, 0.1], [0.4, 0.6]]), 200_000
    stationary = np.array([0.8, 0.2])
    uniform, state, text = np.random.default_rng(0).random(n), 0, np.empty(n, np.uint8)
    for i in range(n):
        state = int(uniform[i] > chain[state, 0])
        text[i] = state
    deviation = 5 * 2 / np.sqrt(n)  # five standard errors; the log of a probability and a correlated chain cost at most a factor of two
    expected = -(stationary * np.log(stationary)).sum(), -(stationary[:, None] * chain * np.log(chain)).sum()
    np.testing.assert_allclose(entropies(text), expected, atol=deviation)


REFUSED = {
    "missing.txt": None,
    "latin1.txt": b"caf\xe9",
    "zeros.txt": b"some\0text",
    "empty.txt": b"",
}


@pytest.mark.parametrize("in_folder", [False, True], ids=["file", "folder"])
@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_text_is_refused_by_name(name, in_folder, tmp_path):
    """A source that is missing, is not UTF-8, holds a zero byte or no text ends in at most two lines that name it."""
    root = tmp_path / name if in_folder else tmp_path
    if REFUSED[name] is not None:
        root.mkdir(exist_ok=True)
        (root / name).write_bytes(REFUSED[name])
    with pytest.raises(UserError) as error:
        read(str(tmp_path / name))
    assert name in str(error.value) and len(str(error.value).splitlines()) <= 2


def test_an_empty_folder_is_refused_by_name(tmp_path):
    """A folder without a file ends in one line that names it."""
    with pytest.raises(UserError, match=str(tmp_path)):
        read(str(tmp_path))


@pytest.mark.parametrize("size", [1, 8, 50])
def test_a_text_shorter_than_a_sequence_is_refused(size, tmp_path):
    """A text whose training or held-out part cannot fill one sequence is refused with both lengths and its name."""
    path = tmp_path / "short.txt"
    path.write_text("x" * size)
    for batches in (lambda c, d, m: training_batches(c, d, 0, m), lambda c, d, m: held_out_batch(c, d, m, 2)):
        with pytest.raises(UserError, match=r"short\.txt.*bytes.*65"):
            batches(read(str(path)), Data(sequence=64, batch=2), mesh_of())
