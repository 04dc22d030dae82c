"""An id over all bytes of a folder's weights, computed once per file and cached until the file changes.

Knows files and the cache folder. Knows no torch.
"""

import fcntl
import hashlib
import logging
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import astuple, replace
from pathlib import Path

from platformdirs import user_cache_dir
from xxhash import xxh3_128, xxh3_128_hexdigest

from workers.errors import ModelError
from workers.model.config import read_model_config
from workers.model.description import NO_OPINION
from workers.model.folder import ModelFolder, read_header, weight_files

logger = logging.getLogger(__name__)

PIECE_BYTES = 16 << 20  # hashed by one thread at a time; changes the id. The hash of a smaller file is not cached
READ_BYTES = 1 << 20
MAX_THREADS = 8  # beyond that, storage is the bottleneck
ID_LENGTH = 32


def cache_folder() -> Path:
    """Diptych's cache folder: DIPTYCH_CACHE, or the system's cache folder of this user."""
    return Path(os.environ.get("DIPTYCH_CACHE") or user_cache_dir("diptych"))


def content_id(folder: ModelFolder) -> str:
    """A short id of the configuration and its weights, equal on all machines.

    The first call reads the whole file at the speed of the storage; later calls find the hash in the cache folder by
    the file's inode, size and times. Blocks; do not call it on an event loop. xxh3 is no cryptographic hash.
    """
    config = replace(read_model_config(folder.path), generation=NO_OPINION)  # does not change the computation
    digest = hashlib.sha256(repr(astuple(config)).encode())
    for path in weight_files(folder.path):
        entries = sorted(read_header(path), key=lambda entry: entry.name)
        digest.update(repr([astuple(entry) for entry in entries]).encode())
        digest.update(file_id(path).encode())
    return digest.hexdigest()[:16]


def file_id(path: Path) -> str:
    """A hash of all bytes of a file. One process at a time computes it and caches it for the others."""
    if path.stat().st_size <= PIECE_BYTES:
        return hash_file(path)
    before = _signature(path)
    with _cache_entry(before) as entry:
        if entry is not None and len(found := entry.read_text()) == ID_LENGTH:
            return found
        found = hash_file(path)
        if entry is not None and _signature(path) == before:
            entry.write_text(found)
        return found


def hash_file(path: Path) -> str:
    """xxh3-128 over the xxh3-128 of its pieces, which threads compute. Raises `ModelError` if the file shrinks.

    It is not mapped, because reading a mapped file that shrinks ends the process.
    """
    size = path.stat().st_size
    threads = min(MAX_THREADS, os.cpu_count() or 1)
    with path.open("rb") as file, ThreadPoolExecutor(threads, "hash") as pool:
        pieces = pool.map(lambda start: _piece(file.fileno(), start, size), range(0, size, PIECE_BYTES))
        try:
            return xxh3_128_hexdigest(b"".join(pieces))
        except EOFError:
            raise ModelError(f"{path} was changed while it was read; try again when it is complete") from None


def _piece(file: int, start: int, size: int) -> bytes:
    digest, end = xxh3_128(), min(start + PIECE_BYTES, size)
    while start < end:
        part = os.pread(file, min(READ_BYTES, end - start), start)
        if not part:
            raise EOFError
        digest.update(part)
        start += len(part)
    return digest.digest()


def _signature(path: Path) -> str:
    """Changes when the file changes, as far as its metadata shows."""
    stat = path.stat()
    facts = stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, PIECE_BYTES
    return hashlib.sha256(repr(facts).encode()).hexdigest()[:ID_LENGTH]


@contextmanager
def _cache_entry(name: str) -> Iterator[Path | None]:
    """The locked file that caches a hash. None: the cache is not writable, so each start computes the hash."""
    path = cache_folder() / "content" / name
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = path.open("a")
    except OSError as error:
        logger.warning("%s cannot be written (%s): each start reads all weights", path.parent, error)
        yield None
        return
    with file:
        fcntl.flock(file, fcntl.LOCK_EX)  # released when the file closes
        yield path
