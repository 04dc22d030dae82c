"""KV over TCP sockets, which works between any two hosts.

Used whenever TCP is the only common fabric, because a dying reader can crash the owner of a one-sided read that UCX
emulates over TCP. There is one connection for each owner, and one thread for all connections; it receives directly into
the pool, without the GIL and off the event loop. Once a socket's steps have ended, nothing is written to
the pool.
"""

import asyncio
import socket
import time
from collections import deque
from collections.abc import Iterable
from functools import partial
from typing import Any

import msgspec

from kvtransfer.backends.pending_read import NO_COPIES, PendingRead, call_loop
from kvtransfer.backends.tcp_owner import MAX_RANGES, PROTOCOL, RANGE, TcpOwner
from kvtransfer.copies import refuse_outside
from kvtransfer.errors import PeerLost, PeerRefused, TransferError, TransferTimeout, not_connected, unreachable
from kvtransfer.rpc import polled
from kvtransfer.rpc.frames import Kind, ProtocolError
from kvtransfer.rpc.handshake import CallerHandshake, require_secret
from kvtransfer.rpc.poller import Poller, Steps
from kvtransfer.ticket import ShardAddress
from kvtransfer.transport import Copies, Read, Region

CLOSE_S = 60.0  # for a thread to end its steps, none of which waits

_Place = tuple[socket.AddressFamily, Any]  # what a socket connects to


class TcpAddress(msgspec.Struct, frozen=True):
    """What `TcpTransport.address` packs."""

    host: str
    port: int


class TcpTransport:
    """`Transport` over TCP sockets. `host`: this host's address for peers."""

    name = "tcp"

    def __init__(self, region: Region, *, host: str, secret: bytes, incarnation: str, max_readers: int) -> None:
        self._region = region
        self._host = host
        self._secret = require_secret(secret)
        self._owner = TcpOwner(region, host, secret, incarnation, max_readers)
        self._poller = Poller("kv-tcp-read")
        self._links: dict[str, _Link] = {}
        self._closing = False

    def address(self) -> bytes:
        return msgspec.msgpack.encode(TcpAddress(self._host, self._owner.port))

    async def connect(self, peer: str, shard: ShardAddress, *, deadline_s: float) -> str:
        try:
            address = msgspec.msgpack.decode(dict(shard.transports)[self.name], type=TcpAddress)
        except msgspec.MsgspecError as error:
            raise PeerRefused(f"{peer} sent no usable TCP address: {error}") from error
        place = await _resolved(peer, address, deadline_s)
        if self._closing:
            raise PeerLost(f"{peer} is not connected: this end is closing")
        link = self._links.get(peer)
        if link and link.address != address:
            await self.forget(peer)
            link = None
        is_new = link is None
        if link is None:
            source_bytes = shard.num_blocks * shard.layout.block_bytes
            link = self._links[peer] = _Link(
                self._poller, peer, address, place, source_bytes, self._region, self._secret
            )
        try:
            await link.submit(PendingRead(peer, NO_COPIES, deadline_s, overdue=link.abandon)).done
        except BaseException:
            if is_new and self._links.get(peer) is link:
                await self.forget(peer)
            raise
        return f"tcp {link.address.host}:{link.address.port}"

    def read(self, peer: str, copies: Copies, *, deadline_s: float) -> Read:
        link = self._links.get(peer)
        pending = PendingRead(peer, copies, deadline_s, overdue=link.abandon if link else None)
        try:
            if link is None:
                raise not_connected(peer)
            refuse_outside(copies, link.source_bytes, self._region.num_bytes)
        except (TransferError, ValueError) as error:
            pending.abort(error)
            return pending.read
        if not len(copies):
            pending.complete(0.0)
            return pending.read
        return link.submit(pending)

    async def forget(self, peer: str) -> None:
        link = self._links.pop(peer, None)
        if link:
            await link.close()

    async def close(self) -> None:
        self._closing = True
        links, self._links = self._links, {}
        try:
            await asyncio.gather(*(link.close() for link in links.values()))
            await asyncio.to_thread(self._poller.close, CLOSE_S)
        finally:
            await asyncio.to_thread(self._owner.close, CLOSE_S)


class _Link:
    """The reader's end for one owner: one connection, which reconnects after a failure, and one read at a time.

    `submit`, `abandon` and `close` are for the event loop; all else runs on the poller's thread.
    """

    def __init__(
        self,
        poller: Poller,
        peer: str,
        address: TcpAddress,
        place: _Place,
        source_bytes: int,
        region: Region,
        secret: bytes,
    ) -> None:
        self.address = address
        self.source_bytes = source_bytes
        self._poller = poller
        self._peer = peer
        self._family, self._place = place
        self._region = region
        self._secret = secret
        self._loop = asyncio.get_running_loop()
        self._pending: set[PendingRead] = set()  # not settled
        self._queue: deque[PendingRead] = deque()
        self._current: PendingRead | None = None
        self._begun_s = 0.0
        self._socket: socket.socket | None = None

    def submit(self, pending: PendingRead) -> Read:
        self._pending.add(pending)
        pending.read.settled.add_done_callback(lambda _: self._pending.discard(pending))
        self._poller.call(partial(self._enqueue, pending))
        return pending.read

    def abandon(self, pending: PendingRead) -> None:
        """Stop a read: close the connection, or never start it."""
        self._poller.call(partial(self._stop, pending))

    async def close(self) -> None:
        for pending in self._pending:
            pending.fail(PeerLost(f"{self._peer} was dropped while {pending.num_bytes} bytes were being read"))
        closed: asyncio.Future[None] = self._loop.create_future()
        self._poller.call(partial(self._close, closed))
        _, running = await asyncio.wait([closed], timeout=CLOSE_S)
        if running:
            raise TransferTimeout(f"the link to {self._peer} has not closed within {CLOSE_S:g} s: end this process")

    def _enqueue(self, pending: PendingRead) -> None:
        self._queue.append(pending)
        self._start_next()

    def _start_next(self) -> None:
        if self._current is not None or not self._queue:
            return
        pending = self._current = self._queue.popleft()
        self._begun_s = time.perf_counter()
        is_new = self._socket is None
        try:
            link = self._socket or self._open()
        except OSError as error:
            self._ended(error)
            return
        self._poller.start(link, self._fetch(link, pending, is_new), self._ended)

    def _open(self) -> socket.socket:
        link = self._socket = socket.socket(self._family, socket.SOCK_STREAM)
        link.setblocking(False)
        self._poller.watch(link)
        return link

    def _stop(self, pending: PendingRead) -> None:
        if pending is self._current and self._socket:
            self._poller.stop(self._socket, ConnectionError("the read was cancelled"))
            return
        if pending in self._queue:
            self._queue.remove(pending)
        pending.post(pending.settle)

    def _close(self, closed: "asyncio.Future[None]") -> None:
        while self._queue:
            self._stop(self._queue[0])
        if self._socket:
            self._poller.stop(self._socket, ConnectionError("the link was closed"))
        self._disconnect()
        call_loop(self._loop, _resolve, closed)

    def _ended(self, error: Exception | None) -> None:
        pending, self._current = self._current, None
        assert pending is not None, "its steps have just ended"
        if error is None:
            pending.post(pending.complete, time.perf_counter() - self._begun_s)
        else:
            self._disconnect()
            pending.post(pending.abort, self._reason(error, pending.deadline_s))
        self._poller.call(self._start_next)

    def _reason(self, error: Exception, deadline_s: float) -> Exception:
        where = f"{self._peer} at {self.address.host}:{self.address.port}"
        if isinstance(error, TimeoutError):
            return TransferTimeout(f"{where} did not answer within {deadline_s} s: {error}")
        return unreachable(where, error) if isinstance(error, (OSError, ProtocolError)) else error

    def _fetch(self, link: socket.socket, pending: PendingRead, is_new: bool) -> Steps[None]:
        stop_s = time.monotonic() + pending.deadline_s  # later than the event loop's deadline, which closes the socket
        if is_new:
            yield from polled.connect(link, self._place, stop_s)
            polled.tune(link)
            handshake = CallerHandshake(PROTOCOL, self._secret, self._peer, self._peer)
            yield from polled.greet_listener(link, handshake, stop_s)
        ours = self._region.bytes()
        for number, first in enumerate(range(0, len(pending.copies), MAX_RANGES)):
            rows = pending.copies[first : first + MAX_RANGES].tolist()
            call = b"".join(RANGE.pack(*each) for each in _joined((source, size) for source, _, size in rows))
            yield from polled.send_frame(link, Kind.CALL, number, len(call), [memoryview(call)], pending.deadline_s)
            num_bytes = sum(size for *_, size in rows)
            if (yield from polled.receive_header(link, num_bytes, stop_s)) != (Kind.REPLY, number, num_bytes):
                raise ConnectionError("the owner sent something else than the reply to this call")
            targets = _joined((target, size) for _, target, size in rows)
            yield from polled.receive_into(link, polled.views_of(ours, targets), stop_s)

    def _disconnect(self) -> None:
        if self._socket:
            self._socket.close()
            self._socket = None


async def _resolved(peer: str, address: TcpAddress, deadline_s: float) -> _Place:
    """Off the event loop, unless the host is a number already."""
    host, port, kind = address.host, address.port, socket.SOCK_STREAM
    try:
        found = socket.getaddrinfo(host, port, type=kind, flags=socket.AI_NUMERICHOST)
    except socket.gaierror:
        try:
            async with asyncio.timeout(deadline_s):
                found = await asyncio.get_running_loop().getaddrinfo(host, port, type=kind)
        except TimeoutError:
            raise TransferTimeout(f"{peer}: the name {host} was not resolved within {deadline_s} s") from None
        except OSError as error:
            raise unreachable(f"{peer} at {host}:{port}", error) from error
    family, *_, place = found[0]
    return family, place


def _joined(ranges: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Ranges (offset, length) with adjacent ones joined. On a stream each side may join its own ranges."""
    joined: list[tuple[int, int]] = []
    begin = end = -1
    for offset, length in ranges:
        if offset == end:
            end += length
            joined[-1] = begin, end - begin
        else:
            begin, end = offset, offset + length
            joined.append((offset, length))
    return joined


def _resolve(future: "asyncio.Future[None]") -> None:
    if not future.done():
        future.set_result(None)
