"""One rank's transports as a whole: which of them reaches which peer, and reads that are checked on arrival.

Knows preference, probes and digests; does not know which backends exist (`kvtransfer.open` does), nor leases.

    connect(peer) ── for each transport both sides have, in our order ── meet, probe real bytes, measure ──> LinkReport
    pull(order)   ── plan copies ── read ── compare digests ──> done
                                      └── settled, and the check is over ──> settled
"""

import asyncio
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

from kvtransfer.copies import plan_copies, refuse_unlike
from kvtransfer.digest import verify_blocks
from kvtransfer.errors import PeerLost, PeerRefused, TransferError, TransferTimeout, TransportUnavailable
from kvtransfer.probe import measure, verify_probe
from kvtransfer.ticket import LinkReport, PeerAddress, ShardAddress
from kvtransfer.transport import PullOrder, Read, ReadStats, Region, Transport

PROBE_S = 5.0


@dataclass(frozen=True, slots=True)
class BackendHealth:
    """One line of `doctor`: a backend that works in this process, or why it does not."""

    backend: str
    ok: bool
    reason: str = ""


@dataclass(frozen=True, slots=True)
class TransportStats:
    """`unsettled`: reads into whose target blocks a byte may still land."""

    peers: int
    reads: int
    unsettled: int
    num_bytes: int
    failures: int


@dataclass(frozen=True, slots=True)
class _Link:
    transport: Transport
    shard: ShardAddress
    index: int  # of the shard within the peer, and of its digests within an order


class TransportSet:
    """Owns the transports of one rank. Close it before the region's memory goes.

    `verifies` is False where bytes cannot be compared: none move (modelled), or the pool lies on a device. A pull's
    stats then count no digests.
    """

    def __init__(
        self,
        region: Region,
        rank: int,
        incarnation: str,
        transports: tuple[Transport, ...],
        health: tuple[BackendHealth, ...],
        *,
        verifies: bool = True,
    ) -> None:
        self._region = region
        self._rank = rank
        self._incarnation = incarnation
        self._transports = transports
        self._health = health
        self._verifies = verifies
        self._links: dict[str, _Link] = {}
        self._reports: dict[str, LinkReport] = {}
        self._scratch = asyncio.Lock()  # the scratch block serves one probe at a time
        self._meeting: dict[str, asyncio.Lock] = {}  # one preflight of a peer at a time
        self._pulls: set[asyncio.Task[None]] = set()
        self._checker = ThreadPoolExecutor(1, thread_name_prefix="kv-digest")
        self._reads = self._failures = self._num_bytes = 0

    def shard(self) -> ShardAddress:
        """Ask anew for every handshake: a transport that was rebuilt has another address."""
        addresses = tuple((transport.name, transport.address()) for transport in self._transports)
        return ShardAddress(self._rank, self._region.layout, self._region.num_blocks, addresses)

    def doctor(self) -> tuple[BackendHealth, ...]:
        return self._health

    def report(self, incarnation: str) -> LinkReport | None:
        """What preflight found for a connected peer."""
        return self._reports.get(incarnation)

    def stats(self) -> TransportStats:
        return TransportStats(len(self._links), self._reads, len(self._pulls), self._num_bytes, self._failures)

    def check(self) -> None:
        """Prove the invariants: a report for every link, and nothing unsettled that is not counted."""
        assert self._links.keys() == self._reports.keys()
        assert all(not task.done() for task in self._pulls)

    async def connect(self, peer: PeerAddress, *, reader: str = "", deadline_s: float = PROBE_S) -> LinkReport:
        """Find the best path to the peer's rank that holds our shard, prove it with real bytes, measure it.

        `deadline_s` bounds each step. Connecting again measures again, and leaves pulls in flight alone. Raises
        `PeerRefused` when no rank of the peer fits ours, else the gravest of what the transports raised. On cancel
        a new link is not used.
        """
        index, shard = self._counterpart(peer)
        async with self._meeting.setdefault(peer.incarnation, asyncio.Lock()):
            return await self._choose(peer, index, shard, reader, deadline_s)

    def pull(self, order: PullOrder) -> Read:
        """Read whole blocks from a connected peer and check them. Every failure comes through the futures."""
        loop = asyncio.get_running_loop()
        read = Read(loop.create_future(), loop.create_future())
        read.done.add_done_callback(_observe)
        task = loop.create_task(self._pull(order, read))
        self._pulls.add(task)
        task.add_done_callback(self._pulls.discard)
        return read

    async def forget(self, incarnation: str) -> None:
        """Drop a peer that is gone. Pulls from it end with `PeerLost`."""
        self._links.pop(incarnation, None)
        self._reports.pop(incarnation, None)
        self._meeting.pop(incarnation, None)
        await asyncio.gather(*(transport.forget(incarnation) for transport in self._transports))

    async def close(self) -> None:
        """Returns when no byte can land in the region and no check looks at it any more."""
        await asyncio.gather(*(transport.close() for transport in self._transports))
        await asyncio.gather(*self._pulls)
        self._checker.shutdown(wait=True)
        self._links.clear()
        self._reports.clear()

    def _counterpart(self, peer: PeerAddress) -> tuple[int, ShardAddress]:
        reasons = []
        for index, shard in enumerate(peer.shards):
            try:
                refuse_unlike(shard.layout, self._region.layout)
            except PeerRefused as error:
                reasons.append(f"rank {shard.rank}: {error}")
            else:
                return index, shard
        raise PeerRefused(f"no rank of {peer.worker} holds what ours holds; " + "; ".join(reasons or ["it has none"]))

    async def _choose(
        self, peer: PeerAddress, index: int, shard: ShardAddress, reader: str, deadline_s: float
    ) -> LinkReport:
        offered = {name for name, _ in shard.transports}
        skipped = [f"{health.backend}: {health.reason}" for health in self._health if not health.ok]
        errors: list[TransferError] = []
        for transport in self._transports:
            if transport.name not in offered:
                skipped.append(f"{transport.name}: {peer.worker} does not offer it")
                continue
            try:
                report = await self._preflight(transport, peer, shard, deadline_s)
            except TransferError as error:
                errors.append(error)
                skipped.append(f"{transport.name}: {error}")
                continue
            report = replace(report, reader=reader, skipped=tuple(skipped))
            self._links[peer.incarnation] = _Link(transport, shard, index)
            self._reports[peer.incarnation] = report
            return report
        raise _gravest(errors)(f"no transport reaches {peer.worker} ({peer.incarnation}): " + "; ".join(skipped))

    async def _preflight(
        self, transport: Transport, peer: PeerAddress, shard: ShardAddress, deadline_s: float
    ) -> LinkReport:
        incarnation = peer.incarnation
        path = await transport.connect(incarnation, shard, deadline_s=deadline_s)
        try:
            async with self._scratch:
                if self._verifies:
                    await verify_probe(transport, self._region, incarnation, deadline_s)
                quality = await measure(transport, self._region, incarnation, deadline_s)
        except BaseException:
            if incarnation not in self._links:  # else others may be reading over it
                await transport.forget(incarnation)
            raise
        return LinkReport(
            reader="",
            owner=peer.worker,
            transport=transport.name,
            path=path,
            latency_s=quality.latency_s,
            bytes_per_s=quality.bytes_per_s,
        )

    async def _pull(self, order: PullOrder, read: Read) -> None:
        """The life of one pull: its errors go to the futures, so this task never raises."""
        self._reads += 1
        inner: Read | None = None
        try:
            link = self._links.get(order.peer)
            if link is None:
                raise PeerLost(f"{order.peer} is not connected: connect to its present incarnation first")
            digests = _digests_of(order, link.index)
            copies = plan_copies(order.source_blocks, order.target_blocks, link.shard.layout, self._region.layout)
            inner = link.transport.read(order.peer, copies, deadline_s=order.deadline_s)
            stats = await inner.done
            if digests and self._verifies:
                stats = await self._check(order, digests, stats)
            self._num_bytes += stats.num_bytes
            if not read.done.done():
                read.done.set_result(stats)
        except Exception as error:
            self._failures += 1
            if not read.done.done():
                read.done.set_exception(error)
        finally:
            if inner:
                await inner.settled
            if not read.settled.done():
                read.settled.set_result(None)

    async def _check(self, order: PullOrder, digests: tuple[int, ...], stats: ReadStats) -> ReadStats:
        """Compare on the checker's thread: hashing runs without the GIL, beside the next read."""
        begun = time.perf_counter()
        await asyncio.get_running_loop().run_in_executor(
            self._checker, verify_blocks, self._region, order.target_blocks, digests, order.source_blocks
        )
        return replace(stats, num_digests=len(digests), digest_seconds=time.perf_counter() - begun)


def _digests_of(order: PullOrder, index: int) -> tuple[int, ...]:
    """The digests of the shard we read; none when the order carries none."""
    if not order.digests:
        return ()
    if index >= len(order.digests) or len(order.digests[index]) != len(order.source_blocks):
        raise PeerRefused(f"the owner sent digests for other blocks than {len(order.source_blocks)} of rank {index}")
    return order.digests[index]


def _gravest(errors: list[TransferError]) -> type[TransferError]:
    """What all the failed attempts amount to: a refusal or a dead peer says more than a missing module."""
    kinds: tuple[type[TransferError], ...] = (PeerRefused, PeerLost, TransferTimeout)
    for kind in kinds:
        if any(isinstance(error, kind) for error in errors):
            return kind
    return TransportUnavailable


def _observe(done: "asyncio.Future[ReadStats]") -> None:
    """Mark the error as seen: whoever cancelled the pull will not come back for it."""
    if not done.cancelled():
        done.exception()
