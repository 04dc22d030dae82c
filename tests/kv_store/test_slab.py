"""Opening the file of a KV store: its size, its owner, and one clear error for each way it can fail."""

import asyncio
import errno
import os
import shutil
from pathlib import Path

import pytest

from tests.kv_store.slabs import BLOCK_BYTES, FILE, FINGERPRINT, SLOT_BYTES, file_bytes
from workers.errors import KVStoreError
from workers.kv_store import slab as slab_module
from workers.kv_store.kv_store import open_kv_store, store_bytes
from workers.kv_store.slab import SLAB_FILES, Slab, SlabInUse, aligned_buffer, open_slab
from workers.kv_store.slot_format import PAGE_BYTES


def size_of(folder: Path) -> tuple[int, int]:
    """Length, and bytes taken of the disk."""
    found = (folder / FILE).stat()
    return found.st_size, found.st_blocks * 512


def test_the_file_has_its_size_at_once_and_keeps_it(tmp_path: Path) -> None:
    slab = Slab(tmp_path / FILE, 6, BLOCK_BYTES)
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
        slab = Slab(tmp_path / FILE, num_slots, BLOCK_BYTES)
        assert (slab.num_slots, size_of(tmp_path)[0]) == (num_slots, file_bytes(num_slots))
        slab.close()


def test_a_slab_has_one_owner(tmp_path: Path) -> None:
    slab = Slab(tmp_path / FILE, 2, BLOCK_BYTES)
    with pytest.raises(SlabInUse):
        Slab(tmp_path / FILE, 1, BLOCK_BYTES)
    assert size_of(tmp_path)[0] == file_bytes(2), "the second one changed nothing"
    slab.close()
    Slab(tmp_path / FILE, 1, BLOCK_BYTES).close()


def test_a_slab_of_the_same_size_and_title_is_taken_first_and_a_new_one_made_last(tmp_path: Path) -> None:
    for number, (num_slots, title) in enumerate(((2, b"mine"), (3, b"other"), (3, b"mine"), (3, b"mine"))):
        Slab(tmp_path / SLAB_FILES[number], num_slots, BLOCK_BYTES, title).close()
    taken = [open_slab(tmp_path, 3, BLOCK_BYTES, b"mine") for _ in range(5)]
    assert [SLAB_FILES.index(slab.path.name) for slab in taken] == [2, 3, 1, 0, 4]
    assert size_of(tmp_path)[0] == file_bytes(3), "the one of another size has this size now"
    for slab in taken:
        slab.close()


def test_a_path_has_a_most_of_slabs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slab_module, "SLAB_FILES", SLAB_FILES[:2])
    taken = [open_slab(tmp_path, 1, BLOCK_BYTES, b"") for _ in range(2)]
    with pytest.raises(KVStoreError, match="slabs that workers use; give some of them another folder"):
        open_slab(tmp_path, 1, BLOCK_BYTES, b"")
    for slab in taken:
        slab.close()


def test_a_folder_that_cannot_be_used_is_one_error_that_says_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for missing in (tmp_path / "missing", tmp_path / "file"):
        with pytest.raises(KVStoreError, match="is no folder; create it"):
            open_slab(missing, 1, BLOCK_BYTES, b"")
    with pytest.raises(KVStoreError, match=r"cannot be written .*; let this user write there"):
        open_slab(Path("/sys/kernel"), 1, BLOCK_BYTES, b"")  # refuses files even to root
    least = store_bytes(1, BLOCK_BYTES)
    with pytest.raises(KVStoreError, match=f"holds no block of {BLOCK_BYTES}; give .* at least {least} bytes"):
        open_kv_store(tmp_path, least - 1, BLOCK_BYTES, FINGERPRINT)


def test_slab_and_index_take_no_more_than_the_size_of_the_store(tmp_path: Path) -> None:
    for slots in (1, 7):
        size = store_bytes(slots, BLOCK_BYTES) + SLOT_BYTES - 1
        store = open_kv_store(tmp_path, size, BLOCK_BYTES, FINGERPRINT)
        assert store.stats().num_slots == slots
        assert sum(each.stat().st_size for each in tmp_path.iterdir()) == store_bytes(slots, BLOCK_BYTES)
        asyncio.run(store.close())


def test_a_disk_without_room_is_refused_before_it_is_filled(tmp_path: Path) -> None:
    Slab(tmp_path / FILE, 2, BLOCK_BYTES).close()
    wanted = (shutil.disk_usage(tmp_path).free + (1 << 30)) // SLOT_BYTES
    with pytest.raises(KVStoreError, match=r"has no room for a KV store of .* GiB are free .*; make the store smaller"):
        Slab(tmp_path / FILE, wanted, BLOCK_BYTES)
    assert size_of(tmp_path)[0] == file_bytes(2)


def test_an_allocation_that_fails_half_way_gives_the_room_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def half(file: int, offset: int, num_bytes: int) -> None:
        os.pwrite(file, bytes(num_bytes // 2), offset)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", half)
    with pytest.raises(KVStoreError, match=r"No space left on device.*; make the store smaller"):
        Slab(tmp_path / FILE, 64, BLOCK_BYTES)
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
        kind(tmp_path / FILE, 1, BLOCK_BYTES)
    Slab(tmp_path / FILE, 1, BLOCK_BYTES).close()


class _OnlyBuffered(Slab):
    """A file system that accepts the flag for direct I/O and then refuses every write."""

    refuses = True

    def _pwrite(self, buffer: memoryview, offset: int) -> int:
        if self.refuses:
            self.refuses = False
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return super()._pwrite(buffer, offset)


def test_without_direct_io_the_file_is_buffered(tmp_path: Path) -> None:
    slab = _OnlyBuffered(tmp_path / FILE, 1, BLOCK_BYTES)
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

    slab = Bad(tmp_path / FILE, 3, BLOCK_BYTES)
    assert sorted(slab.scan(len)) == [(0, PAGE_BYTES), (2, PAGE_BYTES)]
    slab.close()
