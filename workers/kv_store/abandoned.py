"""Gives back the disk of slabs that no worker has had for long. One that a worker has open is locked, and stays."""

import fcntl
import logging
import os
import time
from pathlib import Path

from workers.kv_store.shared_index import index_path
from workers.kv_store.slab import SLAB_FILES, is_at

logger = logging.getLogger(__name__)

ABANDONED_S = 7 * 24 * 3600.0  # since the last write of a worker, each of which writes when it starts


def remove_abandoned(folder: Path) -> None:
    """Delete the slabs of a path, with their indexes, that no worker has open or has written to for `ABANDONED_S`."""
    for path in map(folder.joinpath, SLAB_FILES):
        try:
            if time.time() - path.stat().st_mtime > ABANDONED_S and _remove(path):
                logger.info("%s has had no worker for %.0f days: it is deleted", path, ABANDONED_S / 86400)
        except FileNotFoundError:
            continue
        except OSError as error:
            logger.warning("%s has had no worker for long, and cannot be deleted: %s", path, error)


def _remove(path: Path) -> bool:
    """Under its lock, so that no worker has it or takes it; False: one has. Raises `OSError`."""
    file = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if not is_at(file, path) or time.time() - os.fstat(file).st_mtime <= ABANDONED_S:
            return False
        index_path(path).unlink(missing_ok=True)
        path.unlink()
        return True
    except BlockingIOError:
        return False
    finally:
        os.close(file)
