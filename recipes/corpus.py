"""Text to train on: which files, in which order, which of them are held out.

The default corpus is on every machine: the Python standard library's own sources. They differ between Python versions,
so `CorpusInfo` records version, size and digest. Everything here is a pure function of the files.
"""

from __future__ import annotations

import gzip
import hashlib
import math
import os
import platform
import sysconfig
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from moe_ep.errors import MoEError
from moe_ep.schema import require

EXCLUDED = frozenset({"site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3", "__pycache__"})


class CorpusError(MoEError, ValueError):
    """A corpus that is missing, empty, unreadable, or too short."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CorpusInfo:
    """What a run was trained on, for its records.

    Attributes:
        source: "Python standard library", or the path as the recipe gives it.
        python: version of Python whose library it is, else None.
        sha256: over relative path, size and content of every file used, in order.
        train_files, valid_files, train_bytes, valid_bytes: sizes of both sides (a single file stands on both).
        duplicate_files, binary_files: left out, because the same content came before or a zero byte is inside.
        valid_unigram_entropy: nats/byte of the held-out bytes under their own frequencies.
        valid_gzip: nats/byte that `gzip -9` needs for the held-out bytes.
    """

    source: str
    python: str | None
    sha256: str
    train_files: int
    valid_files: int
    train_bytes: int
    valid_bytes: int
    duplicate_files: int
    binary_files: int
    valid_unigram_entropy: float
    valid_gzip: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Corpus:
    """Documents of both sides, each in a fixed order."""

    train: list[bytes]
    valid: list[bytes]
    info: CorpusInfo


def load_corpus(path: str | None, valid_fraction: float) -> Corpus:
    """Read the files and hold some out.

    A folder is split by file, in the order of a hash of the relative path: files are held out as long as they fit into
    `valid_fraction` of the bytes (one at least), so adding a file moves few others. Of a single file the end is held
    out. Hidden files and folders are passed over.

    Args:
        path: a folder or a file of text; None: the standard library's sources (`EXCLUDED` folders left out).
        valid_fraction: share of the bytes to hold out, inside (0, 1).

    Raises:
        RecipeError: valid_fraction outside (0, 1).
        CorpusError: nothing is there, nothing is left, or a file cannot be read.
    """
    require(0 < valid_fraction < 1, f"valid_fraction must lie inside (0, 1), got {valid_fraction}")
    root, names = _list_files(path)
    source = "Python standard library" if path is None else path
    kept, duplicates, binaries = _read(root, names)
    if not kept:
        raise CorpusError(f"[data] path: {source} holds no text; name a folder or a file with text in it")
    if root.is_file():
        train, valid = _split_bytes(kept[0][1], valid_fraction, source)
    else:
        train, valid = _split_files(kept, valid_fraction, source)
    held_out = b"".join(valid)
    info = CorpusInfo(
        source=source,
        python=platform.python_version() if path is None else None,
        sha256=_digest(kept),
        train_files=len(train),
        valid_files=len(valid),
        train_bytes=sum(map(len, train)),
        valid_bytes=len(held_out),
        duplicate_files=duplicates,
        binary_files=binaries,
        valid_unigram_entropy=unigram_entropy(held_out),
        valid_gzip=len(gzip.compress(held_out, 9, mtime=0)) * 8 * math.log(2) / len(held_out),
    )
    return Corpus(train=train, valid=valid, info=info)


def unigram_entropy(text: bytes) -> float:
    """Entropy of the bytes' own frequencies in nats/byte: what no model that ignores order can beat."""
    counts = Counter(text).values()
    return -sum(c / len(text) * math.log(c / len(text)) for c in counts)


def _list_files(path: str | None) -> tuple[Path, list[str]]:
    """The root and the relative names under it, sorted ("" for a root that is a file)."""
    root = Path(sysconfig.get_paths()["stdlib"] if path is None else path)
    if root.is_file():
        return root, [""]
    if not root.is_dir():
        what = f"{path} does not exist" if path else "this Python has no sources of its standard library"
        raise CorpusError(f"[data] path: {what}; set it to a folder or a file of text")
    return root, sorted(_walk(root, default=path is None))


def _walk(root: Path, *, default: bool) -> list[str]:
    names = []
    for folder, subfolders, files in os.walk(root):
        subfolders[:] = [d for d in subfolders if not d.startswith(".") and not (default and d in EXCLUDED)]
        for file in files:
            if not file.startswith(".") and (file.endswith(".py") or not default):
                names.append((Path(folder) / file).relative_to(root).as_posix())
    return names


def _read(root: Path, names: list[str]) -> tuple[list[tuple[str, bytes]], int, int]:
    """(name, content) of the files to use, number of duplicates, number of files that are no text."""
    kept, seen, duplicates, binaries = [], set(), 0, 0
    for name in names:
        try:
            content = (root / name).read_bytes()
        except OSError as err:
            raise CorpusError(f"[data] path: cannot read {name or root}: {err.strerror}; fix or move the file") from err
        digest = hashlib.sha256(content).digest()
        if b"\0" in content:
            binaries += 1
        elif digest in seen:
            duplicates += 1
        elif content:
            seen.add(digest)
            kept.append((name, content))
    return kept, duplicates, binaries


def _split_files(kept: list[tuple[str, bytes]], fraction: float, source: str) -> tuple[list[bytes], list[bytes]]:
    if len(kept) < 2:
        raise CorpusError(f"[data] path: {source} holds one file; name the file itself, or add one to hold out")
    budget = fraction * sum(len(content) for _, content in kept)
    by_hash = sorted(kept, key=lambda item: hashlib.sha256(_encoded(item[0])).digest())
    held: set[str] = set()
    for name, content in by_hash:
        if len(content) <= budget:
            held.add(name)
            budget -= len(content)
    held = held or {min(by_hash, key=lambda item: len(item[1]))[0]}
    return [c for n, c in kept if n not in held], [c for n, c in kept if n in held]


def _split_bytes(content: bytes, fraction: float, source: str) -> tuple[list[bytes], list[bytes]]:
    cut = len(content) - max(1, round(fraction * len(content)))
    if cut < 1:
        raise CorpusError(f"[data] path: {source} holds {len(content)} bytes; valid_fraction = {fraction} leaves none")
    return [content[:cut]], [content[cut:]]


def _digest(kept: list[tuple[str, bytes]]) -> str:
    digest = hashlib.sha256()
    for name, content in kept:
        digest.update(b"%s\0%d\0" % (_encoded(name), len(content)))
        digest.update(content)
    return digest.hexdigest()


def _encoded(name: str) -> bytes:
    return name.encode("utf-8", "surrogateescape")
