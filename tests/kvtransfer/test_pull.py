"""A prompt's way from its owner to its reader: overlap, digests, and what a lost lease costs."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from kvtransfer.control import ControlClient, ControlServer
from kvtransfer.digest import digest_cells
from kvtransfer.errors import DigestMismatch, LeaseLost, PeerLost, PeerRefused, TransferError
from kvtransfer.layout import KVLayout
from kvtransfer.pull import pull
from kvtransfer.ticket import Piece, Progress, TransferReport, TransferTicket
from kvtransfer.transport import PullOrder, Read, ReadStats, Region
from tests.kvtransfer.grids import by_slots
from tests.kvtransfer.leases import MemoryLeases
from tests.kvtransfer.peers import (
    LAYOUT,
    SECRET,
    address_of,
    block_bytes_of,
    block_of,
    make_region,
    open_set,
    whole_piece,
)

BLOCKS = (10, 11, 12, 30, 31, 5)
TARGETS = (40, 41, 42, 43, 44, 45)
NUM_TOKENS = 90
TAIL = 10  # tokens in the last block


class Story:
    """An owner with leases and a reader connected to it, over tcp and a real control connection."""

    async def begin(self, ours: KVLayout = LAYOUT) -> None:
        self.theirs, self.ours = make_region(filled=True), make_region(ours)
        self.owner = open_set(self.theirs, ("tcp",), "owner")
        self.reader = open_set(self.ours, ("tcp",), "reader")
        self.leases = MemoryLeases(LAYOUT)
        self.server = ControlServer(self.leases, lambda: address_of(self.owner, "owner"), SECRET)
        port = await self.server.start("127.0.0.1")
        self.client = await ControlClient.connect("127.0.0.1", port, SECRET)
        self.link = await self.reader.connect(self.client.peer)
        self.ticket = TransferTicket("lease", 1, self.client.peer, BLOCKS, NUM_TOKENS, ttl_s=30.0)
        self.leases.grant("lease")
        self.begun: asyncio.Queue[tuple[PullOrder, Read]] = asyncio.Queue()

    async def end(self) -> None:
        await self.client.close()
        await self.server.close()
        await self.reader.close()
        await self.owner.close()

    def read(self, order: PullOrder) -> Read:
        read = self.reader.pull(order)
        self.begun.put_nowait((order, read))
        return read

    def compute(self, *blocks: int) -> None:
        slots = [(block, TAIL if block == BLOCKS[-1] else LAYOUT.block_size) for block in blocks]
        self.leases.advance("lease", digest_cells(self.theirs, slots))

    def pull(self, skip_blocks: int = 0, **options: object) -> "asyncio.Task[TransferReport]":
        options = {**self.options, "skip_tokens": min(skip_blocks * LAYOUT.block_size, NUM_TOKENS), **options}
        targets = TARGETS[skip_blocks:]
        return asyncio.create_task(pull(self.client, self.read, self.ticket, targets, **options))  # type: ignore[arg-type]

    async def fetch(self, block_size: int, targets: tuple[int, ...], skip_tokens: int = 0) -> TransferReport:
        options = {**self.options, "block_size": block_size, "skip_tokens": skip_tokens}
        return await pull(self.client, self.read, self.ticket, targets, **options)  # type: ignore[arg-type]

    @property
    def options(self) -> dict[str, object]:
        return {"link": self.link, "read_timeout_s": 5.0, "block_size": 16, "pieces": (whole_piece(),)}


@pytest.fixture
async def story() -> AsyncIterator[Story]:
    made = Story()
    await made.begin()
    yield made
    await made.end()


async def test_a_finished_prompt_arrives_in_one_checked_read(story: Story) -> None:
    story.compute(*BLOCKS)
    story.leases.finish("lease")
    report = await story.pull()
    assert [block_of(story.ours, target) for target in TARGETS] == [block_bytes_of(block) for block in BLOCKS]
    assert (report.num_blocks, report.num_reads, report.digests_verified) == (6, 1, 6)
    assert report.num_bytes == 6 * story.ours.layout.block_bytes
    assert report.num_descriptors == 3
    assert (report.transport, report.reused_blocks) == ("tcp", 0)
    assert 0 < report.busy_s <= report.elapsed_s
    assert story.leases.released == ["lease"]


async def test_chunks_are_read_while_later_chunks_still_compute(story: Story) -> None:
    task = story.pull()
    for chunk in (BLOCKS[:2], BLOCKS[2:5]):
        story.compute(*chunk)
        order, read = await story.begun.get()
        assert order.source_blocks == chunk
        await read.done
        assert not task.done()
    story.compute(*BLOCKS[5:])
    story.leases.finish("lease")
    assert (await task).num_reads == 3
    assert [block_of(story.ours, target) for target in TARGETS] == [block_bytes_of(block) for block in BLOCKS]


async def test_a_cached_prefix_is_not_read(story: Story) -> None:
    story.compute(*BLOCKS)
    story.leases.finish("lease")
    report = await story.pull(skip_blocks=4)
    assert (report.num_blocks, report.reused_blocks) == (2, 4)
    assert not any(block_of(story.ours, TARGETS[0]))


async def test_a_completely_cached_prompt_is_released_without_a_read(story: Story) -> None:
    report = await story.pull(skip_blocks=6)
    assert (report.num_reads, report.num_bytes) == (0, 0)
    assert story.leases.released == ["lease"]


class Backwards:
    """Two blocks with each read, from the end."""

    def __init__(self) -> None:
        self.left = [(64, 26), (32, 32), (0, 32)]
        self.proven: list[int] = []

    @property
    def is_done(self) -> bool:
        return not self.left

    def take(self, ready_tokens: int) -> tuple[int, int] | None:
        return self.left.pop(0) if self.left and ready_tokens == NUM_TOKENS else None

    def completed(self, first_token: int) -> None:
        self.proven.append(first_token)


async def test_what_is_read_first_is_told_when_its_digests_match(story: Story) -> None:
    order = Backwards()
    task = story.pull(order=order)
    story.compute(*BLOCKS)
    story.leases.finish("lease")
    report = await task
    assert order.proven == [64, 32, 0] and (report.num_reads, report.digests_verified) == (3, 6)
    assert [block_of(story.ours, target) for target in TARGETS] == [block_bytes_of(block) for block in BLOCKS]


async def test_without_digests_a_read_is_told_once_the_lease_was_valid_after_it(
    story: Story, monkeypatch: pytest.MonkeyPatch
) -> None:
    order, told = Backwards(), asyncio.Event()
    watch, begun = story.client.watch, asyncio.Event()

    async def late(*args: Any) -> Progress:
        """The first watch that proves something waits."""
        if story.begun.qsize():
            begun.set()
            await told.wait()
        return await watch(*args)

    monkeypatch.setattr(story.client, "watch", late)
    story.leases.advance("lease", num_blocks=len(BLOCKS))
    story.leases.finish("lease")
    task = story.pull(order=order)
    await begun.wait()
    assert story.begun.qsize() and not order.proven
    story.leases.expire("lease")
    told.set()
    with pytest.raises(LeaseLost):
        await task
    assert not order.proven


async def test_a_corrupted_byte_is_a_digest_mismatch_and_nothing_is_released(story: Story) -> None:
    story.compute(*BLOCKS)
    story.theirs.bytes()[30 * story.theirs.layout.block_bytes] ^= 1
    with pytest.raises(DigestMismatch, match="owner's block 30"):
        await story.pull()
    assert story.leases.released == []


async def test_a_lease_that_expires_before_the_end_loses_the_pull(story: Story) -> None:
    task = story.pull()
    story.compute(*BLOCKS[:3])
    await asyncio.sleep(0.05)
    story.leases.expire("lease")
    with pytest.raises(LeaseLost):
        await task


async def test_a_lease_lost_after_the_last_read_loses_the_pull(story: Story) -> None:
    story.compute(*BLOCKS)

    def read(order: PullOrder) -> Read:
        made = story.reader.pull(order)
        made.done.add_done_callback(lambda _: story.leases.expire("lease"))
        return made

    with pytest.raises(LeaseLost):
        await pull(story.client, read, story.ticket, TARGETS, **story.options)  # type: ignore[arg-type]


async def test_an_older_epoch_is_fenced(story: Story) -> None:
    story.ticket = replace(story.ticket, epoch=0)
    with pytest.raises(LeaseLost, match="epoch"):
        await story.pull()


async def test_an_owner_that_goes_away_loses_the_pull_at_once(story: Story) -> None:
    task = story.pull()
    await asyncio.sleep(0.05)
    await story.server.close()
    with pytest.raises(PeerLost):
        await asyncio.wait_for(task, 30.0)


async def test_a_failed_read_ends_the_pull_while_a_watch_waits(story: Story) -> None:
    task = story.pull()
    await story.owner.close()
    story.compute(*BLOCKS[:2])
    with pytest.raises(PeerLost):
        await asyncio.wait_for(task, 30.0)


async def test_cancelling_a_pull_leaves_its_reads_to_settle(story: Story) -> None:
    task = story.pull()
    story.compute(*BLOCKS[:2])
    _, read = await story.begun.get()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await asyncio.wait_for(read.settled, 30.0)
    assert not read.done.cancelled()


async def test_an_owner_that_finishes_too_early_fails_the_pull(story: Story) -> None:
    story.compute(*BLOCKS[:3])
    story.leases.finish("lease")
    with pytest.raises(TransferError, match="3 of 6"):
        await story.pull()


class SlowOwner:
    """A lease client whose prompt is finished; counts the heartbeats."""

    def __init__(self, progress: Progress) -> None:
        self.progress = progress
        self.watches = 0

    async def watch(
        self, lease: str, epoch: int, have_blocks: int, timeout_s: float, pieces: tuple[Piece, ...]
    ) -> Progress:
        self.watches += 1
        return self.progress

    async def release(self, lease: str, epoch: int) -> None:
        pass


async def test_heartbeats_go_on_while_a_long_read_runs(story: Story) -> None:
    loop = asyncio.get_running_loop()
    read = Read(loop.create_future(), loop.create_future())
    loop.call_later(0.35, read.done.set_result, ReadStats(1, 1, 0.35))
    client = SlowOwner(Progress(6, 0, (), True, ttl_s=0.3))
    ticket = replace(story.ticket, ttl_s=0.3)
    await pull(client, lambda order: read, ticket, TARGETS, **story.options)  # type: ignore[arg-type]
    assert 3 <= client.watches <= 5, "about one for each third of the lease's 0.3 s"


async def test_an_owner_with_an_invalid_report_is_refused(story: Story) -> None:
    for progress in (
        Progress(7, 0, ((1,) * 7,), True, 30.0),
        Progress(6, 2, ((1,) * 4,), True, 30.0),
        Progress(6, 0, ((1, 2),), True, 30.0),
    ):
        with pytest.raises(PeerRefused):
            await pull(SlowOwner(progress), story.read, story.ticket, TARGETS, **story.options)  # type: ignore[arg-type]


# ---- blocks of unequal sizes -------------------------------------------------------------------------------------

OURS = replace(LAYOUT, block_size=24)  # 90 tokens: four blocks, the last of 18


@pytest.fixture
async def recut() -> AsyncIterator[Story]:
    made = Story()
    await made.begin(OURS)
    yield made
    await made.end()


def tokens_of(region: Region, blocks: tuple[int, ...]) -> "np.ndarray[tuple[int, ...], np.dtype[np.uint8]]":
    """[token, kv_head, layer, k|v, byte]"""
    held = by_slots(np.frombuffer(region.bytes(), np.uint8), region.layout)[list(blocks)]
    return held.transpose(0, 4, 1, 2, 3, 5).reshape(-1, *held.shape[1:4], held.shape[5])[:NUM_TOKENS]


async def test_chunks_that_end_inside_our_blocks_are_read_as_they_come(recut: Story) -> None:
    task = asyncio.create_task(recut.fetch(OURS.block_size, (40, 43, 41, 42)))
    for chunk in (BLOCKS[:1], BLOCKS[1:4]):  # 16 tokens, then up to the 64th
        recut.compute(*chunk)
        order, read = await recut.begun.get()
        await read.done
    assert (order.first_token, order.num_tokens, order.target_blocks) == (16, 48, (40, 43, 41))
    recut.compute(*BLOCKS[4:])
    recut.leases.finish("lease")
    report = await task
    assert (tokens_of(recut.ours, (40, 43, 41, 42)) == tokens_of(recut.theirs, BLOCKS)).all()
    assert (report.num_reads, report.num_blocks, report.digests_verified) == (3, 4, 6)


async def test_a_prefix_that_ends_with_blocks_of_both_is_not_read(recut: Story) -> None:
    recut.compute(*BLOCKS)
    recut.leases.finish("lease")
    report = await recut.fetch(OURS.block_size, (41, 42), skip_tokens=48)
    assert (tokens_of(recut.ours, (40, 43, 41, 42))[48:] == tokens_of(recut.theirs, BLOCKS)[48:]).all()
    assert (report.reused_blocks, report.num_blocks, report.digests_verified) == (2, 2, 3)


async def test_a_prefix_that_ends_inside_a_block_of_the_owner_is_refused(recut: Story) -> None:
    with pytest.raises(PeerRefused, match=r"24 tokens that are here end inside a block of the owner.*prefix_tokens"):
        await recut.fetch(OURS.block_size, (43, 41, 42), skip_tokens=24)


async def test_targets_that_do_not_hold_the_prompt_are_an_error(recut: Story) -> None:
    with pytest.raises(ValueError, match="3 target blocks"):
        await recut.fetch(OURS.block_size, (43, 41, 42))
