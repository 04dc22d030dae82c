"""Slabs that no worker has had for long are deleted, and none that a worker has or just had."""

import fcntl
import logging
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.kv_store.slabs import Opened, block_of
from tests.kv_store.test_peer_slabs import has, looks_often, until
from workers.kv_store.abandoned import ABANDONED_S, remove_abandoned
from workers.kv_store.shared_index import index_path
from workers.kv_store.slab import SLAB_FILES, Slab, SlabInUse

looks_often = looks_often
DAY_S = 86_400.0


def age(path: Path, seconds: float) -> None:
    os.utime(path, (time.time() - seconds,) * 2)


def slabs(folder: Path) -> list[str]:
    return sorted(each.name for each in folder.iterdir() if each.name in SLAB_FILES)


async def test_only_what_no_worker_has_had_for_long_is_deleted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    opened = [Opened(tmp_path, file=name) for name in SLAB_FILES[:3]]
    assert await opened[2].put(1) == [True]
    await opened[1].close()
    await opened[2].close()
    for path, seconds in zip(map(tmp_path.joinpath, SLAB_FILES), (99 * DAY_S, 6 * DAY_S, 8 * DAY_S), strict=False):
        age(path, seconds)
    await until(lambda: has(opened[0], 1))
    assert await opened[0].get(1) == block_of(1)
    remove_abandoned(tmp_path)
    assert slabs(tmp_path) == list(SLAB_FILES[:2]), "the first is old, and a worker has it"
    assert not index_path(tmp_path / SLAB_FILES[2]).exists() and len(caplog.records) == 1
    await until(lambda: not has(opened[0], 1))
    assert await opened[0].get(1) is None, "a miss"
    await opened[0].close()


def test_one_that_another_process_has_stays_however_old(tmp_path: Path) -> None:
    path = tmp_path / SLAB_FILES[0]
    path.write_bytes(bytes(4096))
    age(path, 99 * DAY_S)
    hold = "import fcntl, sys; f = open(sys.argv[1], 'rb+'); fcntl.flock(f, fcntl.LOCK_EX); print(flush=True); input()"
    command = [sys.executable, "-c", hold, str(path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout is not None and other.stdin is not None
        other.stdout.readline()
        remove_abandoned(tmp_path)
        assert path.exists()
        other.stdin.close()
        other.wait()
    remove_abandoned(tmp_path)
    assert not path.exists()


def test_a_worker_that_opened_it_just_before_takes_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It would write to a file that no other worker finds."""
    path = tmp_path / SLAB_FILES[0]
    path.write_bytes(bytes(4096))
    age(path, 99 * DAY_S)
    lock = Slab._lock

    def late(self: Slab) -> None:
        remove_abandoned(tmp_path)
        lock(self)

    monkeypatch.setattr(Slab, "_lock", late)
    with pytest.raises(SlabInUse):
        Slab(path, 2, 5000)
    assert not path.exists()


def test_what_a_worker_takes_or_writes_to_meanwhile_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / SLAB_FILES[0]
    path.write_bytes(bytes(4096))
    age(path, 99 * DAY_S)
    real = fcntl.flock

    def flock(file: int, how: int) -> None:
        age(path, 0.0)
        real(file, how)

    monkeypatch.setattr(fcntl, "flock", flock)
    remove_abandoned(tmp_path)
    assert path.exists() and ABANDONED_S > DAY_S


def test_one_that_cannot_be_deleted_is_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / SLAB_FILES[0]
    path.write_bytes(bytes(4096))
    age(path, 99 * DAY_S)

    def refused(self: Path, missing_ok: bool = False) -> None:
        raise PermissionError("not yours")

    monkeypatch.setattr(Path, "unlink", refused)
    remove_abandoned(tmp_path)
    assert path.exists() and "not yours" in caplog.text
