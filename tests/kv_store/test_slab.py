"""Opening the file of a KV store: its size, its owner, and one clear error for each way it can fail."""

import errno
import os
import shutil
from pathlib import Path

import pytest

from tests.kv_store.slabs import BLOCK_BYTES, SLOT_BYTES, file_bytes
from workers.errors import KVStoreError
from workers.kv_store.slab import FILE, Slab, aligned_buffer
from workers.kv_store.slot_format import PAGE_BYTES


def size_of(folder: Path) -> tuple[int, int]:
    """Length, and bytes taken of the disk."""
    found = (folder / FILE).stat()
    return found.st_size, found.st_blocks * 512


def test_the_file_has_its_size_at_once_and_keeps_it(tmp_path: Path) -> None:
    slab = Slab(tmp_path, file_bytes(6) + SLOT_BYTES - 1, BLOCK_BYTES)
    assert slab.num_slots == 6 and size_of(tmp_path)[0] == file_bytes(6) <= size_of(tmp_path)[1]
    buffer = aligned_buffer(slab.slot_bytes)
    for slot in range(6):
        buffer[:] = bytes([slot]) * SLOT_BYTES
        slab.write(slot, buffer)
    for slot in range(6):
        slab.read(slot, buffer)
        assert buffer == bytes([slot]) * SLOT_BYTES
    assert size_of(tmp_path)[0] == file_bytes(6)
    slab.close()
    assert [each.name for each in tmp_path.iterdir()] == [FILE]
    assert (tmp_path / FILE).stat().st_mode & 0o777 == 0o600


def test_a_file_of_another_size_gets_the_new_one(tmp_path: Path) -> None:
    for num_slots in (3, 8, 2):
        slab = Slab(tmp_path, file_bytes(num_slots), BLOCK_BYTES)
        assert (slab.num_slots, size_of(tmp_path)[0]) == (num_slots, file_bytes(num_slots))
        slab.close()


def test_a_folder_has_one_owner(tmp_path: Path) -> None:
    slab = Slab(tmp_path, file_bytes(2), BLOCK_BYTES)
    with pytest.raises(KVStoreError, match="is the KV store of another worker; give each worker a folder of its own"):
        Slab(tmp_path, file_bytes(1), BLOCK_BYTES)
    assert size_of(tmp_path)[0] == file_bytes(2), "the second one changed nothing"
    slab.close()
    Slab(tmp_path, file_bytes(1), BLOCK_BYTES).close()


def test_a_folder_that_cannot_be_used_is_one_error_that_says_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for missing in (tmp_path / "missing", tmp_path / "file"):
        with pytest.raises(KVStoreError, match="is no folder; create it"):
            Slab(missing, file_bytes(1), BLOCK_BYTES)
    with pytest.raises(KVStoreError, match=r"cannot be written .*; let this user write there"):
        Slab(Path("/sys/kernel"), file_bytes(1), BLOCK_BYTES)  # refuses files even to root
    with pytest.raises(KVStoreError, match=f"holds no block of {BLOCK_BYTES}; give .* at least {file_bytes(1)} bytes"):
        Slab(tmp_path, file_bytes(1) - 1, BLOCK_BYTES)


def test_a_disk_without_room_is_refused_before_it_is_filled(tmp_path: Path) -> None:
    Slab(tmp_path, file_bytes(2), BLOCK_BYTES).close()
    wanted = shutil.disk_usage(tmp_path).free + (1 << 30)
    with pytest.raises(KVStoreError, match=r"has no room for a KV store of .* GiB are free .*; make the store smaller"):
        Slab(tmp_path, wanted, BLOCK_BYTES)
    assert size_of(tmp_path)[0] == file_bytes(2)


def test_an_allocation_that_fails_half_way_gives_the_room_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def half(file: int, offset: int, num_bytes: int) -> None:
        os.pwrite(file, bytes(num_bytes // 2), offset)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", half)
    with pytest.raises(KVStoreError, match=r"No space left on device.*; make the store smaller"):
        Slab(tmp_path, file_bytes(64), BLOCK_BYTES)
    assert size_of(tmp_path) == (0, 0)


class _Unwritable(Slab):
    def _pwrite(self, buffer: memoryview, offset: int) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO))


class _Lossy(Slab):
    """Takes every write, keeps none: the page that comes back differs."""

    def _pwrite(self, buffer: memoryview, offset: int) -> int:
        return len(buffer)


@pytest.mark.parametrize(("kind", "why"), [(_Unwritable, "Input/output error"), (_Lossy, "other bytes came back")])
def test_a_device_is_probed_at_open(tmp_path: Path, kind: type[Slab], why: str) -> None:
    with pytest.raises(KVStoreError, match=rf"a write to .* failed \({why}\); check the disk"):
        kind(tmp_path, file_bytes(1), BLOCK_BYTES)
    Slab(tmp_path, file_bytes(1), BLOCK_BYTES).close()


class _OnlyBuffered(Slab):
    """A file system that accepts the flag for direct I/O and then refuses every write."""

    refuses = True

    def _pwrite(self, buffer: memoryview, offset: int) -> int:
        if self.refuses:
            self.refuses = False
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return super()._pwrite(buffer, offset)


def test_without_direct_io_the_file_is_buffered(tmp_path: Path) -> None:
    slab = _OnlyBuffered(tmp_path, file_bytes(1), BLOCK_BYTES)
    assert not slab.is_direct
    unaligned = memoryview(bytearray(SLOT_BYTES + 1))[1:]
    unaligned[:] = b"x" * SLOT_BYTES
    slab.write(0, unaligned)  # direct I/O would refuse this memory
    back = aligned_buffer(SLOT_BYTES)
    slab.read(0, back)
    assert back == unaligned
    slab.close()


def test_a_scan_skips_pages_that_cannot_be_read(tmp_path: Path) -> None:
    class Bad(Slab):
        def _pread(self, buffer: memoryview, offset: int) -> int:
            if offset == PAGE_BYTES + SLOT_BYTES:
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            return super()._pread(buffer, offset)

    slab = Bad(tmp_path, file_bytes(3), BLOCK_BYTES)
    assert sorted(slab.scan(len)) == [(0, PAGE_BYTES), (2, PAGE_BYTES)]
    slab.close()
