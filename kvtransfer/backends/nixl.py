"""KV over NIXL on UCX: memory to memory between processes of one host (CMA), or over RDMA and NVLink.

Reads only. A NIXL read cannot be cancelled: one that outlives its deadline stays quarantined until it ends.
After `quarantine_s` the whole agent is destroyed and rebuilt, because nothing else stops its writes. Then `address`
changes, and every peer must be connected again. UCX installs exit handlers that can crash a process on hosts with
rdma-core: end such a process with `os._exit` after `close`.
"""

import asyncio
from collections.abc import Callable

from kvtransfer.backends.nixl_agent import NixlAddress, NixlAgent, load_nixl
from kvtransfer.backends.nixl_pump import NixlPump
from kvtransfer.backends.pending_read import NO_COPIES, PendingRead, ended
from kvtransfer.errors import TransferTimeout, TransportUnavailable
from kvtransfer.ticket import HostIdentity, ShardAddress
from kvtransfer.transport import Copies, Read, Region

OPEN_S = 60.0  # to start an agent and register the pool: seconds, where UCX looks for many devices
CLOSE_S = 60.0  # to drop a peer, or to destroy the agent, which stops the reads in flight


class NixlTransport:
    """`Transport` over one NIXL agent. Raises `TransportUnavailable` when NIXL cannot work in this process."""

    name = "nixl"

    def __init__(self, region: Region, *, identity: HostIdentity, quarantine_s: float) -> None:
        api = load_nixl()
        self._pending: set[PendingRead] = set()
        self._pump = NixlPump(lambda: NixlAgent(api, region, identity), region.num_bytes, quarantine_s)
        try:
            self._pump.submit(self._pump.start).result(OPEN_S)
        except BaseException as error:
            self._pump.submit(self._pump.stop)
            if isinstance(error, TimeoutError):
                raise TransportUnavailable(f"NIXL has not started within {OPEN_S:g} s") from None
            raise

    def address(self) -> bytes:
        return self._pump.address

    async def connect(self, peer: str, shard: ShardAddress, *, deadline_s: float) -> str:
        address = NixlAddress.parse(dict(shard.transports)[self.name])
        pending = PendingRead(peer, NO_COPIES, deadline_s)
        await self._launch(pending, lambda begun: self._pump.connect(begun, address)).done
        path = self._pump.submit(lambda: self._pump.path(peer))
        return await ended(path, deadline_s, f"NIXL did not tell the path to {peer} within {deadline_s:g} s")

    def read(self, peer: str, copies: Copies, *, deadline_s: float) -> Read:
        return self._launch(PendingRead(peer, copies, deadline_s), self._pump.read)

    def _launch(self, pending: PendingRead, begin: Callable[[PendingRead], None]) -> Read:
        self._pending.add(pending)
        pending.read.settled.add_done_callback(lambda _: self._pending.discard(pending))
        self._pump.submit(lambda: begin(pending))
        return pending.read

    async def forget(self, peer: str) -> None:
        for pending in [pending for pending in self._pending if pending.peer == peer]:
            pending.drop()
        forgotten = self._pump.submit(lambda: self._pump.forget(peer))
        await ended(forgotten, CLOSE_S, f"a read over NIXL has not ended within {CLOSE_S:g} s: end this process")

    async def close(self) -> None:
        for pending in list(self._pending):
            pending.drop()
        self._pump.submit(self._pump.stop)
        await asyncio.to_thread(self._pump.thread.join, CLOSE_S)
        if self._pump.thread.is_alive():
            raise TransferTimeout(f"NIXL has not stopped within {CLOSE_S:g} s and may still write: end this process")
