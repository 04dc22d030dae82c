"""KV between GPUs of one host, or within one: CUDA maps the owner's pool into the reader, which copies from it.

    connect ── open the handle, once for each owner ── read: copy, wait for its event ── forget: unmap

One thread does all of this in order, so nothing is unmapped while a copy reads it. A launched copy cannot be cancelled:
after its deadline a read settles when its event has passed. A mapping keeps the memory of an ended owner allocated, so
the first read that notices the end unmaps it. A read succeeds only if the owner still runs when the copy has ended.
The owner takes no part.
"""

import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import msgspec

from kvtransfer.backends.pending_read import NO_COPIES, PendingRead, ended
from kvtransfer.copies import refuse_outside
from kvtransfer.errors import (
    PeerLost,
    PeerRefused,
    TransferError,
    TransportUnavailable,
    is_gone,
    not_connected,
)
from kvtransfer.host import ProcessWatch
from kvtransfer.ticket import HostIdentity, ShardAddress
from kvtransfer.transport import Copies, Read, Region

OPEN_S = 60.0  # to load the driver and share the pool
CLOSE_S = 60.0  # for the copies in flight to end, before what they read is unmapped


class IpcAddress(msgspec.Struct, frozen=True):
    """What `CudaIpcTransport.address` packs: the allocation's handle and the pool's offset in it."""

    handle: bytes
    offset: int
    num_bytes: int
    device: str
    identity: HostIdentity
    started: str  # see `kvtransfer.host.ProcessWatch`

    @classmethod
    def parse(cls, data: bytes) -> "IpcAddress":
        try:
            return msgspec.msgpack.decode(data, type=cls)
        except msgspec.MsgspecError as error:
            raise PeerRefused(f"the peer's CUDA IPC address cannot be read: {error}") from error


class IpcDriver(Protocol):
    """Memory that processes share. All calls come from the thread that made it. Mappings are the driver's own."""

    device: str  # the same in all processes

    def export(self) -> tuple[bytes, int]:
        """The handle of the allocation that holds our pool, and the pool's offset in it."""
        ...

    def open(self, handle: bytes, offset: int, num_bytes: int) -> Any:
        """Map a peer's allocation until `unmap`. Raises `TransportUnavailable`."""
        ...

    def copy(self, mapping: Any, copies: Copies) -> None:
        """Copy into our pool. Returns or raises once nothing is written any more."""
        ...

    def unmap(self, mapping: Any) -> None: ...

    def close(self) -> None: ...


def open_driver(region: Region) -> IpcDriver:
    """Loads torch only for a pool on a GPU."""
    if region.device == "cpu":
        raise TransportUnavailable("the pool is in host memory")
    from kvtransfer.backends.cuda_driver import CudaDriver

    return CudaDriver(region)


@dataclass(frozen=True, slots=True)
class _Mapped:
    address: IpcAddress
    owner: ProcessWatch
    memory: Any

    def has_ended(self) -> bool:
        return self.owner.started() != self.address.started


class CudaIpcTransport:
    """`Transport` over CUDA IPC. Raises `TransportUnavailable` where this process cannot share its pool."""

    name = "cuda_ipc"

    def __init__(self, region: Region, *, identity: HostIdentity) -> None:
        self._region = region
        self._identity = identity
        self._pending: set[PendingRead] = set()
        self._mapped: dict[str, _Mapped] = {}  # the thread's
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="kv-cuda-ipc")
        self._closing: Future[None] | None = None
        try:
            self._driver, self._address = self._thread.submit(self._open).result(OPEN_S)
        except BaseException as error:
            self._thread.shutdown(wait=False)
            if isinstance(error, TimeoutError):
                raise TransportUnavailable(f"CUDA IPC has not started within {OPEN_S:g} s") from None
            if isinstance(error, Exception) and not isinstance(error, TransportUnavailable):
                raise TransportUnavailable(f"CUDA IPC cannot start here: {error}") from error
            raise

    def address(self) -> bytes:
        return self._address

    async def connect(self, peer: str, shard: ShardAddress, *, deadline_s: float) -> str:
        address = IpcAddress.parse(dict(shard.transports)[self.name])
        self._refuse(address.identity)
        pending = PendingRead(peer, NO_COPIES, deadline_s)
        await self._launch(pending, partial(self._map, peer, address)).done
        return "CUDA IPC within a GPU" if address.device == self._driver.device else f"CUDA IPC from {address.device}"

    def read(self, peer: str, copies: Copies, *, deadline_s: float) -> Read:
        pending = PendingRead(peer, copies, deadline_s)
        return self._launch(pending, partial(self._copy, peer, copies))

    async def forget(self, peer: str) -> None:
        for pending in [pending for pending in self._pending if pending.peer == peer]:
            pending.drop()
        if self._closing is None:
            await ended(self._thread.submit(self._unmap, peer), CLOSE_S, _hangs())

    async def close(self) -> None:
        for pending in list(self._pending):
            pending.drop()
        if self._closing is None:
            self._closing = self._thread.submit(self._release)
            self._thread.shutdown(wait=False)
        await ended(self._closing, CLOSE_S, _hangs())

    def _refuse(self, theirs: HostIdentity) -> None:
        """Raise `TransportUnavailable` where CUDA opens no handle. The driver finds out whether the GPUs connect."""
        ours = self._identity
        if not ours.boot_id or ours.boot_id != theirs.boot_id:
            raise TransportUnavailable("another host: CUDA IPC works within one")
        if ours.pid_namespace != theirs.pid_namespace:
            raise TransportUnavailable("same host, but another pid namespace: CUDA opens no handle from there")
        if ours.pid == theirs.pid:
            raise TransportUnavailable("same process: CUDA opens no handle where it was made")

    def _launch(self, pending: PendingRead, action: Callable[[], None]) -> Read:
        if self._closing is not None:
            pending.abort(PeerLost(f"{pending.peer} is not connected: this end is closed"))
            return pending.read
        self._pending.add(pending)
        pending.read.settled.add_done_callback(lambda _: self._pending.discard(pending))
        self._thread.submit(self._run, pending, action)
        return pending.read

    # On the thread:

    def _open(self) -> tuple[IpcDriver, bytes]:
        driver = open_driver(self._region)
        try:
            handle, offset = driver.export()
        except BaseException:
            driver.close()
            raise
        identity = self._identity
        watch = ProcessWatch(identity.pid)
        started = watch.started()
        watch.close()
        address = IpcAddress(handle, offset, self._region.pool_bytes, driver.device, identity, started)
        return driver, msgspec.msgpack.encode(address)

    def _run(self, pending: PendingRead, action: Callable[[], None]) -> None:
        if not pending.begin():
            return
        begun_s = time.perf_counter()
        try:
            action()
        except (TransferError, ValueError) as error:
            pending.post(pending.abort, error)
        except Exception as error:
            pending.post(pending.abort, TransferError(f"CUDA failed on a read from {pending.peer}: {error}"))
        else:
            pending.post(pending.complete, time.perf_counter() - begun_s)

    def _map(self, peer: str, address: IpcAddress) -> None:
        known = self._mapped.get(peer)
        if known and known.address == address and not known.has_ended():
            return
        self._unmap(peer)
        owner = ProcessWatch(address.identity.pid)
        try:
            if owner.started() != address.started:
                raise is_gone(peer)
            memory = self._driver.open(address.handle, address.offset, address.num_bytes)
        except BaseException:
            owner.close()
            raise
        self._mapped[peer] = _Mapped(address, owner, memory)

    def _copy(self, peer: str, copies: Copies) -> None:
        mapped = self._mapped.get(peer)
        if mapped is None:
            raise not_connected(peer)
        refuse_outside(copies, mapped.address.num_bytes, self._region.num_bytes)
        if not len(copies):
            return
        self._driver.copy(mapped.memory, copies)
        if mapped.has_ended():
            self._unmap(peer)  # else its memory would stay allocated
            raise is_gone(peer)

    def _unmap(self, peer: str) -> None:
        mapped = self._mapped.pop(peer, None)
        if mapped:
            mapped.owner.close()
            self._driver.unmap(mapped.memory)

    def _release(self) -> None:
        for peer in list(self._mapped):
            self._unmap(peer)
        self._driver.close()


def _hangs() -> str:
    return f"a copy by CUDA IPC has not ended within {CLOSE_S:g} s: end this process"
