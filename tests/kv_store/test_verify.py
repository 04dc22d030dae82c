"""`diptych cache verify`: what a file of cached KV holds, without a worker."""

import json
import time
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from cluster.cli import main
from tests.kv_store.slabs import BLOCK_BYTES, FILE, FINGERPRINT, SLOT_BYTES, block_of, hash_of
from workers.kv_store.kv_store import KVStore, open_kv_store, store_bytes
from workers.kv_store.slot_format import PAGE_BYTES
from workers.kv_store.verify import AGAIN_S

OTHER = bytes(reversed(FINGERPRINT))


def opened(folder: Path, fingerprint: bytes = FINGERPRINT) -> KVStore:
    return open_kv_store(folder, store_bytes(6, BLOCK_BYTES), BLOCK_BYTES, fingerprint)


async def filled(folder: Path, *numbers: int, fingerprint: bytes = FINGERPRINT) -> Path:
    store = opened(folder, fingerprint)
    for number in numbers:
        assert await store.write(hash_of(number), memoryview(block_of(number)))
    await store.close()
    return folder / FILE


def verify(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["cache", "verify", *arguments])


def counts(result: Result) -> list[dict[str, int]]:
    keys = ("good", "free", "torn", "foreign", "corrupt")
    return [{key: each[key] for key in keys if each[key]} for each in json.loads(result.stdout)]


async def test_each_slot_is_in_one_state_and_corruption_is_an_error(tmp_path: Path) -> None:
    await filled(tmp_path, 1, fingerprint=OTHER)
    opened(tmp_path, OTHER)._slab.close()
    file = await filled(tmp_path)  # a worker with another model: the first slot is free for it, and still written
    result = verify(str(tmp_path), "--json")
    assert result.exit_code == 0 and counts(result) == [{"foreign": 1, "free": 5}]
    await filled(tmp_path, 2, 3, 4)
    assert counts(verify(str(file), "--json")) == [{"good": 3, "free": 3}]
    data = bytearray(file.read_bytes())
    data[PAGE_BYTES + 8] ^= 1  # a header
    data[PAGE_BYTES + SLOT_BYTES + PAGE_BYTES + 100] ^= 1  # a block
    file.write_bytes(data)
    result = verify(str(tmp_path), "--json")
    assert result.exit_code == 1 and counts(result) == [{"good": 1, "free": 3, "torn": 1, "corrupt": 1}]
    assert result.stderr.splitlines()[-1] == (
        "Error: corrupt blocks: 1; check the disk, and delete the file to start anew"
    )
    assert file.read_bytes() == data, "nothing was changed"


async def test_a_path_has_a_report_for_each_slab_also_while_workers_use_them(tmp_path: Path) -> None:
    stores = [opened(tmp_path) for _ in range(2)]
    assert await stores[1].write(hash_of(1), memoryview(block_of(1)))
    result = verify(str(tmp_path))
    assert result.exit_code == 0
    rows = [line.split() for line in result.stdout.splitlines() if ".slab" in line]
    assert [row[1:] for row in rows] == [[str(BLOCK_BYTES), "6", str(n), str(6 - n), "0", "0", "0"] for n in (0, 1)]
    assert await stores[1].write(hash_of(2), memoryview(block_of(2))), "it goes on"
    for store in stores:
        await store.close()


async def test_a_slot_that_is_being_written_is_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = await filled(tmp_path, 1)
    whole = file.read_bytes()
    file.write_bytes(whole[: 3 * PAGE_BYTES] + bytes(PAGE_BYTES) + whole[4 * PAGE_BYTES :])
    slept: list[float] = []

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        file.write_bytes(whole)

    monkeypatch.setattr(time, "sleep", sleep)
    assert counts(verify(str(file), "--json")) == [{"good": 1, "free": 5}] and slept == [AGAIN_S]


async def test_what_cannot_be_verified_is_one_line(tmp_path: Path) -> None:
    assert "has no blocks-0.slab; give the path of cache.disk" in verify(str(tmp_path)).stderr
    for content in (b"", b"x" * PAGE_BYTES):
        (tmp_path / FILE).write_bytes(content)
        result = verify(str(tmp_path))
        assert result.exit_code == 1 and "is no file of cached KV of this version" in result.stderr


@pytest.mark.parametrize("command", ["cache", "cache status", "cache warm", "cache drop", "cache verify"])
def test_help_has_an_example(command: str) -> None:
    result = CliRunner().invoke(main, [*command.split(), "--help"])
    assert result.exit_code == 0 and "diptych cache " in result.output.partition("Example:")[2]
