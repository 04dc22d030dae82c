"""KV over TCP sockets, which works between any two hosts.

Used whenever TCP is the only common fabric, because a dying reader can crash the owner of a one-sided read that UCX
emulates over TCP. There is one connection and one thread for each owner; the thread receives directly into the pool,
without the GIL and off the event loop. The socket is the fence: once it is cut and its thread has left the read, no
byte can land.
"""

import asyncio
import contextlib
import queue
import socket
import threading
import time

import msgspec
import numpy as np
from numpy.typing import NDArray

from kvtransfer.backends.pending_read import NO_COPIES, PendingRead, call_loop
from kvtransfer.backends.tcp_owner import MAX_RANGES, PROTOCOL, RANGE, TcpOwner
from kvtransfer.copies import refuse_outside
from kvtransfer.errors import PeerLost, PeerRefused, TransferError, TransferTimeout, unreachable
from kvtransfer.rpc import blocking
from kvtransfer.rpc.frames import Kind, ProtocolError
from kvtransfer.rpc.handshake import CallerHandshake, require_secret
from kvtransfer.ticket import ShardAddress
from kvtransfer.transport import Copies, Read, Region


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
        self._links: dict[str, _Link] = {}

    def address(self) -> bytes:
        return msgspec.msgpack.encode(TcpAddress(self._host, self._owner.port))

    async def connect(self, peer: str, shard: ShardAddress, *, deadline_s: float) -> str:
        try:
            address = msgspec.msgpack.decode(dict(shard.transports)[self.name], type=TcpAddress)
        except msgspec.MsgspecError as error:
            raise PeerRefused(f"{peer} sent no usable TCP address: {error}") from error
        link = self._links.get(peer)
        if link and link.address != address:
            await self.forget(peer)
            link = None
        is_new = link is None
        if link is None:
            source_bytes = shard.num_blocks * shard.layout.block_bytes
            link = self._links[peer] = _Link(peer, address, source_bytes, self._region, self._secret)
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
                raise PeerLost(f"{peer} is not connected: connect to its present incarnation first")
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
        for peer in list(self._links):
            await self.forget(peer)
        await asyncio.to_thread(self._owner.close)


class _Link:
    """The reader's end for one owner: one thread and one connection, which reconnects after a failure.

    `_lock` guards `_current`: a deadline may cut the socket only during its own read, never during the next.
    """

    def __init__(self, peer: str, address: TcpAddress, source_bytes: int, region: Region, secret: bytes) -> None:
        self.address = address
        self.source_bytes = source_bytes
        self._peer = peer
        self._region = region
        self._secret = secret
        self._loop = asyncio.get_running_loop()
        self._ended: asyncio.Future[None] = self._loop.create_future()
        self._pending: set[PendingRead] = set()
        self._jobs: queue.SimpleQueue[PendingRead | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._current: PendingRead | None = None
        self._socket: socket.socket | None = None
        threading.Thread(target=self._run, name=f"kv-tcp-read-{peer[:12]}", daemon=True).start()

    def submit(self, pending: PendingRead) -> Read:
        self._pending.add(pending)
        pending.read.settled.add_done_callback(lambda _: self._pending.discard(pending))
        self._jobs.put(pending)
        return pending.read

    def abandon(self, pending: PendingRead) -> None:
        """Stop a read: cut the socket, or never start it. The thread settles a read that has begun."""
        with self._lock:
            pending.abandoned = True
            if pending is self._current:
                if self._socket:
                    with contextlib.suppress(OSError):  # not connected yet: connecting has its own time limit
                        self._socket.shutdown(socket.SHUT_RDWR)
                return
        pending.settle()

    async def close(self) -> None:
        for pending in tuple(self._pending):
            pending.fail(PeerLost(f"{self._peer} was given up while {pending.num_bytes} bytes were on their way"))
            self.abandon(pending)
        self._jobs.put(None)
        await asyncio.shield(self._ended)

    def _run(self) -> None:
        while (pending := self._jobs.get()) is not None:
            with self._lock:
                if pending.abandoned:
                    continue
                self._current = pending
            begun = time.perf_counter()
            error = self._attempt(pending)
            with self._lock:
                self._current = None
            if error:
                self._disconnect()
                pending.post(pending.abort, error)
            else:
                pending.post(pending.complete, time.perf_counter() - begun)
        self._disconnect()
        call_loop(self._loop, _resolve, self._ended)

    def _attempt(self, pending: PendingRead) -> Exception | None:
        """Fetch it; returns the error for the read's future, so that the thread survives every failure."""
        where = f"{self._peer} at {self.address.host}:{self.address.port}"
        try:
            link = self._socket or self._connect(pending)
            self._fetch(link, pending)
        except TimeoutError as error:
            return TransferTimeout(f"{where} did not answer within {pending.deadline_s} s: {error}")
        except (OSError, ProtocolError) as error:
            return unreachable(where, error)
        except Exception as error:
            return error
        return None

    def _connect(self, pending: PendingRead) -> socket.socket:
        found = socket.getaddrinfo(self.address.host, self.address.port, type=socket.SOCK_STREAM)
        family, kind, protocol, _, place = found[0]
        link = socket.socket(family, kind, protocol)
        with self._lock:
            self._socket = link
            link.settimeout(0.001 if pending.abandoned else pending.deadline_s)
        link.connect(place)
        blocking.tune(link)
        blocking.greet_listener(link, CallerHandshake(PROTOCOL, self._secret, self._peer, self._peer))
        link.settimeout(None)  # from here on the event loop's deadline cuts the socket
        return link

    def _fetch(self, link: socket.socket, pending: PendingRead) -> None:
        ours = self._region.bytes()
        for number, first in enumerate(range(0, len(pending.copies), MAX_RANGES)):
            batch = pending.copies[first : first + MAX_RANGES]
            if pending.abandoned:
                raise ConnectionError("the read was cancelled")
            call = b"".join(RANGE.pack(*each) for each in _joined(batch[:, [0, 2]]))
            blocking.send_frame(link, Kind.CALL, number, [memoryview(call)])
            views = [ours[start : start + size] for start, size in _joined(batch[:, 1:])]
            num_bytes = sum(view.nbytes for view in views)
            if blocking.receive_header(link, num_bytes) != (Kind.REPLY, number, num_bytes):
                raise ConnectionError("the owner sent something else than the reply to this call")
            blocking.receive_into(link, views)

    def _disconnect(self) -> None:
        with self._lock:
            link, self._socket = self._socket, None
        if link:
            link.close()


def _joined(ranges: NDArray[np.int64]) -> tuple[tuple[int, int], ...]:
    """Ranges (offset, length) with adjacent ones joined. On a stream each side may join its own ranges."""
    offsets, lengths = ranges.T
    firsts = np.flatnonzero(np.concatenate(([True], offsets[:-1] + lengths[:-1] != offsets[1:])))
    return tuple(zip(offsets[firsts].tolist(), np.add.reduceat(lengths, firsts).tolist(), strict=True))


def _resolve(ended: "asyncio.Future[None]") -> None:
    if not ended.done():
        ended.set_result(None)
