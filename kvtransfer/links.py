"""All transports of one rank: which of them reaches which peer, and reads that are checked on arrival.

Knows preference, probes and digests; does not know which backends exist (`kvtransfer.open` does), nor leases.

    connect(peer) ── for each of its ranks with KV for this rank, for each common transport, in our order
                         ── connect, probe real bytes, measure ──> LinkReport of the slowest
    pull(order)   ── each piece: plan copies ── read ── compare digests ──> done, when all are
                                                  └── settled, and the check is over ──> settled, when all are
"""

import asyncio
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

from diptych.background_tasks import BackgroundTasks
from kvtransfer.copies import pieces_of
from kvtransfer.errors import PeerLost, PeerRefused, TransferError, TransferTimeout, TransportUnavailable
from kvtransfer.piece_reader import PeerLink, PieceReader
from kvtransfer.probe import measure, verify_probe
from kvtransfer.rpc.connection import observe
from kvtransfer.ticket import LinkReport, PeerAddress, Piece, ShardAddress, rank_name
from kvtransfer.transport import Place, PullOrder, Read, ReadStats, Region, Transport, summed

PROBE_S = 5.0


class TransportSet:
    """Owns the transports of one rank. Close it before the region's memory goes.

    `unavailable`: the backends that do not work here, each as "backend: reason", for reports of links.
    `verifies` is False if no bytes move (simulated). A pull's stats then count no digests. `place` converts staged KV
    into the pool; None: this rank cannot.
    """

    def __init__(
        self,
        region: Region,
        rank: int,
        transports: tuple[Transport, ...],
        unavailable: tuple[str, ...],
        *,
        verifies: bool = True,
        place: Place | None = None,
    ) -> None:
        self._region = region
        self._rank = rank
        self._transports = transports
        self._unavailable = unavailable
        self._verifies = verifies
        self._shard: ShardAddress | None = None  # of the latest addresses
        self._links: dict[str, tuple[PeerLink, ...]] = {}  # incarnation -> one for each rank that is read
        self._scratch = asyncio.Lock()  # the scratch block serves one probe at a time
        self._meeting: dict[str, asyncio.Lock] = {}  # one preflight of a peer at a time
        self._pulls = BackgroundTasks()
        self._checker = ThreadPoolExecutor(1, thread_name_prefix="kv-digest")
        self._piece_reader = PieceReader(region, self._checker, place, verifies=verifies)

    def shard(self) -> ShardAddress:
        """Call it for every handshake: a rebuilt transport has another address."""
        addresses = tuple((transport.name, transport.address()) for transport in self._transports)
        if self._shard is None or self._shard.transports != addresses:
            self._shard = ShardAddress(self._rank, self._region.layout, self._region.num_blocks, addresses)
        return self._shard

    def check(self) -> None:
        """Prove the invariants of pulls and staging slots. Raises AssertionError."""
        assert all(not task.done() for task in self._pulls)
        self._piece_reader.check()

    async def connect(self, peer: PeerAddress, *, measures: bool = True, deadline_s: float = PROBE_S) -> LinkReport:
        """Find the best path to each of the peer's ranks with KV for this rank, verify it with real bytes, measure.

        `measures` False: only verify, which moves one block. `deadline_s` bounds each step. Connecting again measures
        again, and leaves pulls in flight alone. Raises `PeerRefused` when the peer's KV cannot become ours, else the
        most serious error of the transports. On cancel new links are not used.
        """
        pieces = self._pieces(peer)
        connected: list[tuple[PeerLink, LinkReport]] = []
        async with self._meeting.setdefault(peer.incarnation, asyncio.Lock()):
            try:
                for piece in pieces:
                    connected.append(await self._choose(peer, piece, deadline_s, measures))
            except BaseException:
                if peer.incarnation not in self._links:  # else pulls may be using them
                    await asyncio.gather(*(link.transport.forget(link.name) for link, _ in connected))
                raise
        self._links[peer.incarnation] = tuple(link for link, _ in connected)
        return slowest([report for _, report in connected])

    def pull(self, order: PullOrder) -> Read:
        """Read our pieces of an order from a connected peer and check them. Every failure is set on the futures."""
        loop = asyncio.get_running_loop()
        read = Read(loop.create_future(), loop.create_future())
        read.done.add_done_callback(observe)
        self._pulls.start(self._pull(order, read))
        return read

    async def forget(self, incarnation: str) -> None:
        """Drop a peer that is gone. Pulls from it end with `PeerLost`."""
        links = self._links.pop(incarnation, ())
        self._meeting.pop(incarnation, None)
        await asyncio.gather(*(transport.forget(link.name) for link in links for transport in self._transports))

    async def close(self) -> None:
        """Returns when nothing writes to the region and no check reads it any more."""
        await asyncio.gather(*(transport.close() for transport in self._transports))
        await asyncio.gather(*self._pulls)
        self._checker.shutdown(wait=True)
        self._links.clear()

    def _pieces(self, peer: PeerAddress) -> tuple[Piece, ...]:
        """The pieces to read from each of its ranks. Raises `PeerRefused`."""
        layouts = [shard.layout for shard in peer.shards]
        if len({(layout.block_size, layout.dtype) for layout in layouts}) > 1:
            raise PeerRefused(
                f"the ranks of {peer.worker} differ in block size or dtype, so they do not belong to one worker"
            )
        pieces = pieces_of(layouts, self._region.layout, self._rank)
        self._piece_reader.refuse(layouts[0], pieces)
        return pieces

    async def _choose(
        self, peer: PeerAddress, piece: Piece, deadline_s: float, measures: bool
    ) -> tuple[PeerLink, LinkReport]:
        shard = peer.shards[piece.shard]
        name = rank_name(peer.incarnation, shard.rank)
        offered = {name for name, _ in shard.transports}
        skipped = list(self._unavailable)
        errors: list[TransferError] = []
        for transport in self._transports:
            if transport.name not in offered:
                skipped.append(f"{transport.name}: {peer.worker} does not offer it")
                continue
            try:
                report = await self._preflight(transport, peer, shard, name, deadline_s, measures)
            except TransferError as error:
                errors.append(error)
                skipped.append(f"{transport.name}: {error}")
                continue
            return PeerLink(transport, name, shard, piece), replace(report, skipped=tuple(skipped))
        raise _most_serious(errors)(f"no transport reaches {peer.worker} ({name}): " + "; ".join(skipped))

    async def _preflight(
        self,
        transport: Transport,
        peer: PeerAddress,
        shard: ShardAddress,
        name: str,
        deadline_s: float,
        measures: bool,
    ) -> LinkReport:
        path = await transport.connect(name, shard, deadline_s=deadline_s)
        num_bytes = min(shard.layout.block_bytes, self._region.layout.block_bytes)
        try:
            async with self._scratch:
                if self._verifies:
                    await verify_probe(transport, self._region, name, num_bytes, deadline_s)
                latency_s, bytes_per_s = 0.0, 0.0
                if measures:
                    latency_s, bytes_per_s = await measure(transport, self._region, name, num_bytes, deadline_s)
        except BaseException:
            if peer.incarnation not in self._links:  # else pulls may be using it
                await transport.forget(name)
            raise
        return LinkReport("", peer.worker, transport.name, path, latency_s, bytes_per_s)

    async def _pull(self, order: PullOrder, read: Read) -> None:
        """Run one pull. Errors are set on the futures; this task never raises."""

        def fail(error: Exception) -> None:
            if not read.done.done():
                read.done.set_exception(error)

        completed: list[ReadStats | None] = []
        try:
            links = self._links.get(order.peer)
            if links is None:
                raise PeerLost(f"{order.peer} is not connected: connect to its present incarnation first")
            digests = [_digests_of(order, link.piece) for link in links]
            reads = [self._piece_reader.read(order, *each, fail) for each in zip(links, digests, strict=True)]
            completed = [await reads[0]] if len(reads) == 1 else await asyncio.gather(*reads)
        except Exception as error:
            fail(error)
        stats = [each for each in completed if each is not None]
        if completed and len(stats) == len(completed) and not read.done.done():
            read.done.set_result(summed(stats))
        if not read.settled.done():
            read.settled.set_result(None)


def slowest(reports: Sequence[LinkReport]) -> LinkReport:
    """One report for links that work side by side: the slowest link's numbers, and all names that differ, joined."""

    def joined(names: Iterable[str]) -> str:
        return " + ".join(dict.fromkeys(names))

    return replace(
        reports[0],
        transport=joined(report.transport for report in reports),
        path=joined(report.path for report in reports),
        latency_s=max(report.latency_s for report in reports),
        bytes_per_s=min(report.bytes_per_s for report in reports),
        skipped=tuple(dict.fromkeys(reason for report in reports for reason in report.skipped)),
    )


def _digests_of(order: PullOrder, piece: Piece) -> tuple[int, ...]:
    """The digests of a piece; none when the order has none."""
    if not order.digests:
        return ()
    found = dict(order.digests).get(piece)
    if found is None or len(found) != len(order.source_blocks):
        raise PeerRefused(f"the owner sent no digests of {len(order.source_blocks)} blocks of {piece}")
    return found


def _most_serious(errors: list[TransferError]) -> type[TransferError]:
    """The class of the most serious failure: a refusal or a dead peer explains more than a missing module."""
    kinds: tuple[type[TransferError], ...] = (PeerRefused, PeerLost, TransferTimeout)
    for kind in kinds:
        if any(isinstance(error, kind) for error in errors):
            return kind
    return TransportUnavailable
