"""Which weights a folder holds: an id over every byte, computed once for a file and kept until the file changes.

Knows files and the cache folder. Knows no torch.
"""

import fcntl
import hashlib
import logging
import mmap
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import astuple, replace
from pathlib import Path

from platformdirs import user_cache_dir
from xxhash import xxh3_128_digest, xxh3_128_hexdigest

from workers.model.config import read_model_config
from workers.model.description import NO_OPINION
from workers.model.folder import ModelFolder, read_header, weight_files

logger = logging.getLogger(__name__)

PIECE_BYTES = 16 << 20  # of a file, for one thread; part of what the id means. A file of one piece is not kept
MOST_THREADS = 8  # about where storage, not hashing, is what takes the time
ID_LENGTH = 32


def cache_folder() -> Path:
    """Where what is derived from models lives: DIPTYCH_CACHE, or the user's cache folder of this system."""
    return Path(os.environ.get("DIPTYCH_CACHE") or user_cache_dir("diptych"))


def content_id(folder: ModelFolder) -> str:
    """A short id of the computation and its weights, equal on every machine that holds them.

    The first call for a file reads all of it, as fast as the storage gives it; later ones find what it gave under the
    file's inode, size and times in the cache folder. Not for an event loop. It is no defence against somebody who makes
    two files of one hash on purpose.
    """
    config = replace(read_model_config(folder.path), generation=NO_OPINION)  # does not change the computation
    digest = hashlib.sha256(repr(astuple(config)).encode())
    for path in weight_files(folder.path):
        entries = sorted(read_header(path), key=lambda entry: entry.name)
        digest.update(repr([astuple(entry) for entry in entries]).encode())
        digest.update(file_id(path).encode())
    return digest.hexdigest()[:16]


def file_id(path: Path) -> str:
    """A hash of all bytes of a file. One process at a time computes it, and leaves it for the others."""
    if path.stat().st_size <= PIECE_BYTES:
        return hash_file(path)
    before = _signature(path)
    with _kept(before) as kept:
        if kept is not None and len(found := kept.read_text()) == ID_LENGTH:
            return found
        found = hash_file(path)
        if kept is not None and _signature(path) == before:
            kept.write_text(found)
        return found


def hash_file(path: Path) -> str:
    """xxh3-128 over the xxh3-128 of its pieces, which threads share."""
    size = path.stat().st_size
    if size == 0:
        return xxh3_128_hexdigest(b"")
    threads = min(MOST_THREADS, os.cpu_count() or 1)
    with (
        path.open("rb") as file,
        mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped,
        ThreadPoolExecutor(threads, "hash") as pool,
    ):
        mapped.madvise(mmap.MADV_SEQUENTIAL)
        with memoryview(mapped) as content:
            pieces = pool.map(lambda start: _piece(content, start), range(0, size, PIECE_BYTES))
            return xxh3_128_hexdigest(b"".join(pieces))


def _piece(content: memoryview, start: int) -> bytes:
    with content[start : start + PIECE_BYTES] as piece:
        return xxh3_128_digest(piece)


def _signature(path: Path) -> str:
    """Differs once the file has other bytes, as far as a file system tells."""
    stat = path.stat()
    facts = stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, PIECE_BYTES
    return hashlib.sha256(repr(facts).encode()).hexdigest()[:ID_LENGTH]


@contextmanager
def _kept(name: str) -> Iterator[Path | None]:
    """The file that keeps what was computed, locked. None: the cache cannot be written, so it is computed each time."""
    path = cache_folder() / "content" / name
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = path.open("a")
    except OSError as error:
        logger.warning("%s cannot be written (%s): all weights are read at each start", path.parent, error)
        yield None
        return
    with file:
        fcntl.flock(file, fcntl.LOCK_EX)  # closing the file lets go
        yield path
