"""KV over many TCP links of one process at once, beside one link and one thread's memcpy of the same bytes."""

import asyncio
import time
from dataclasses import dataclass

from benchmarks.figures import BenchmarkPart, Figure, Progress, spread
from benchmarks.transfer import BLOCK, WAIT_S, OwnerProcess, copied_s, open_set, plans, pool_of
from kvtransfer.open import RESERVED_BLOCKS, TransportSet
from kvtransfer.ticket import PeerAddress
from kvtransfer.transport import PullOrder

ROUNDS = 15
LINKS, QUICK_LINKS = 64, 4
NUM_BLOCKS = 1024  # of 64 KiB, in one round over all links
TABLE = "Transfer over TCP links of one process at once"


@dataclass(frozen=True, slots=True)
class _Links:
    """One row: readers in this process, each linked to all owners of another one, and where each pull lands."""

    readers: tuple[TransportSet, ...]
    owners: tuple[PeerAddress, ...]
    num_blocks: int  # of a pull

    async def connect(self) -> None:
        for reader in self.readers:
            for owner in self.owners:
                await reader.connect(owner, deadline_s=WAIT_S)

    async def seconds(self) -> float:
        """Of one pull on every link, all at once."""
        source = tuple(range(RESERVED_BLOCKS, RESERVED_BLOCKS + self.num_blocks))
        pulls = []
        begun = time.perf_counter()
        for reader in self.readers:
            for place, owner in enumerate(self.owners):
                target = tuple(block + place * self.num_blocks for block in source)
                order = PullOrder(owner.incarnation, source, target, 0, len(source) * BLOCK.block_size, (), WAIT_S)
                pulls.append(reader.pull(order).done)
        await asyncio.gather(*pulls)
        return time.perf_counter() - begun


def measure(rounds: int, quick: bool, progress: Progress) -> BenchmarkPart:
    """Raises `TransferError` when a pull fails."""
    return BenchmarkPart("tcp-links", asyncio.run(_measure(rounds, QUICK_LINKS if quick else LINKS, progress)))


async def _measure(rounds: int, count: int, progress: Progress) -> tuple[Figure, ...]:
    most = NUM_BLOCKS + RESERVED_BLOCKS
    source, target = pool_of(most, filled=True), pool_of(most, filled=False)
    [whole, *_] = plans({"64 MiB": NUM_BLOCKS}, most)
    share = NUM_BLOCKS // count
    with (
        OwnerProcess(("tcp",), 1, most) as large,
        OwnerProcess(("tcp",), count, share + RESERVED_BLOCKS) as many,
    ):
        rows = {
            "1 link": _Links(_readers(1, most), tuple(large.addresses), NUM_BLOCKS),
            f"{count} links of one reader": _Links(_readers(1, most), tuple(many.addresses), share),
            f"{count} links of one owner": _Links(
                _readers(count, share + RESERVED_BLOCKS), tuple(large.addresses), share
            ),
        }
        rates: dict[str, list[float]] = {row: [] for row in ("memcpy, 1 thread", *rows)}
        try:
            for links in rows.values():
                await links.connect()
            for number in range(rounds + 1):
                taken = {"memcpy, 1 thread": copied_s(source, target, whole)}
                for row, links in rows.items():
                    taken[row] = await links.seconds()
                if number:  # the first round touches the memory for the first time
                    for row, seconds in taken.items():
                        rates[row].append(whole.num_bytes / seconds)
                progress(f"round {number} of {rounds}")
        finally:
            await asyncio.gather(*(reader.close() for links in rows.values() for reader in links.readers))
    return tuple(Figure(TABLE, row, "64 MiB together", "GB/s", spread(found)) for row, found in rates.items())


def _readers(count: int, num_blocks: int) -> tuple[TransportSet, ...]:
    opened = [open_set(pool_of(num_blocks, filled=False), ("tcp",), f"reader-{number}") for number in range(count)]
    assert all(isinstance(each, TransportSet) for each in opened), opened
    return tuple(each for each in opened if isinstance(each, TransportSet))
