"""Text as bytes, split by file into a training and a held-out part."""

import functools
import hashlib
import sysconfig
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from jaxtyping import UInt8

from configs.load import UserError, path_of

LEFT_OUT = {"test", "tests", "idlelib", "lib2to3", "site-packages", "__pycache__"}
"""Folders of the standard library that are not read: tests differ most from one installation to the next."""

SEPARATOR = b"\0"
"""Between documents; text holds no such byte."""


@dataclass(frozen=True)
class Corpus:
    """The bytes of both parts, documents joined by a zero byte, and the SHA-256 of both together."""

    source: str
    train: UInt8[np.ndarray, "n"]
    held_out: UInt8[np.ndarray, "m"]
    files: int
    sha256: str


def read(source: str) -> Corpus:
    """The corpus at a source: "stdlib", a text file, or a folder of text files (hidden ones are left out).

    About a tenth of the files, chosen by the hash of their path, is held out; of fewer than ten files, the last tenth of the bytes.
    Raises UserError for a source that does not exist, a file that is not text (UTF-8 without zero bytes), or no text at all.
    """
    root, paths = find(source)
    states = [path.stat() for path in paths]
    return join(source, root, tuple(paths), tuple((state.st_size, state.st_mtime_ns) for state in states))


@functools.lru_cache(maxsize=1)
def join(source: str, root: Path, paths: tuple[Path, ...], states: tuple) -> Corpus:
    """The corpus of these files; kept for the next run of this process while they stay as they are."""
    documents = {path.relative_to(root).as_posix(): read_text(path, checked=source != "stdlib") for path in paths}
    documents = {name: text for name, text in documents.items() if text}
    if not documents:
        raise UserError(f"data.source = {source!r}: holds no text")
    chosen = lambda name: hashlib.sha256(name.encode()).digest()[0] % 10 == 0
    parts = [SEPARATOR.join(text for name, text in documents.items() if chosen(name) is held) for held in (False, True)]
    if len(documents) < 10 or not all(parts):
        whole = SEPARATOR.join(documents.values())
        cut = len(whole) - max(1, len(whole) // 10)
        parts = [whole[:cut], whole[cut:]]
    train, held_out = (np.frombuffer(part, np.uint8) for part in parts)
    return Corpus(source, train, held_out, len(documents), hashlib.sha256(parts[0] + SEPARATOR + parts[1]).hexdigest())


def find(source: str) -> tuple[Path, list[Path]]:
    """The root of a source and its files, in sorted order."""
    if source == "stdlib":
        root = Path(sysconfig.get_paths()["stdlib"])
        return root, sorted(path for path in root.rglob("*.py") if not LEFT_OUT.intersection(path.relative_to(root).parts[:-1]))
    root = path_of(source)
    if root.is_file():
        return root.parent, [root]
    if not root.is_dir():
        raise UserError(f"data.source = {source!r}: is neither 'stdlib' nor an existing text file or folder")
    hidden = lambda path: any(part.startswith(".") for part in path.relative_to(root).parts)
    return root, sorted(path for path in root.rglob("*") if path.is_file() and not hidden(path))


def read_text(path: Path, checked: bool) -> bytes:
    """The bytes of a file. Raises UserError where it cannot be read, or where `checked` and it is not text."""
    try:
        text = path.read_bytes()
        if checked:
            text.decode()
            if SEPARATOR in text:
                raise UserError(f"{path}: is not text (zero byte at {text.index(SEPARATOR)})")
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: is not text (not UTF-8 at byte {error.start})") from error
    return text


def entropies(text: UInt8[np.ndarray, "n"]) -> tuple[float, float]:
    """Unigram entropy H(x) and bigram entropy H(x | the byte before) of the text's own counts, nats per byte."""
    pairs = np.bincount(text[:-1].astype(np.int64) * 256 + text[1:], minlength=65536).reshape(256, 256)
    unigram = entropy(np.bincount(text, minlength=256))
    return unigram, entropy(pairs.ravel()) - entropy(pairs.sum(1))


def entropy(counts: np.ndarray) -> float:
    p = counts[counts > 0] / counts.sum()
    return float(-(p * np.log(p)).sum())
