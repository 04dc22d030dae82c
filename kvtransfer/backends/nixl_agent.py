"""One NIXL agent: a registration of the whole pool, the peers it knows, and reads from them.

Blocking and single-threaded: `kvtransfer.backends.nixl_pump` calls it from one thread. An agent never changes its name
or its registration: a fence destroys it and creates another.
"""

import hashlib
import importlib
import logging
import os
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import msgspec
import numpy as np

from kvtransfer.backends import ucx_report
from kvtransfer.backends.buffers import buffer_on
from kvtransfer.errors import PeerLost, PeerRefused, TransportUnavailable
from kvtransfer.host import check_process_memory, rdma_devices
from kvtransfer.ticket import HostIdentity
from kvtransfer.transport import Copies, Region

logger = logging.getLogger(__name__)

FRAME_VERSION = 1
MODULES = ("nixl", "nixl_cu13", "nixl_cu12")  # the meta package first: it matches torch's CUDA version
TRIAL_BYTES = 64
# Pause of the agent's progress thread between rounds, which NIXL rounds up to a millisecond. Reads over a fabric wait
# for that thread; reads within a host do not, so there an idle agent wakes 50 times a second, not 860 times.
FABRIC_PAUSE_US, HOST_PAUSE_US = 1000, 20_000
# NIXL's thread has no CUDA context, and UCX crashes in it (https://github.com/ai-dynamo/nixl/issues/2102). The agent of
# a pool on a GPU has none, and whoever drives the agent calls `progress` this often.
PROGRESS_S = 0.002


class NixlAddress(msgspec.Struct, frozen=True):
    """The content of a shard's NIXL address. It has a digest, because NIXL does not check its metadata."""

    version: int
    metadata: bytes
    metadata_digest: bytes
    base: int
    num_bytes: int
    block_bytes: int
    device: str
    fabrics: tuple[str, ...]
    identity: HostIdentity

    @classmethod
    def parse(cls, data: bytes) -> "NixlAddress":
        try:
            address = msgspec.msgpack.decode(data, type=cls)
        except msgspec.MsgspecError as error:
            raise PeerRefused(f"the peer's NIXL address cannot be read: {error}") from error
        if address.version != FRAME_VERSION or hashlib.sha256(address.metadata).digest() != address.metadata_digest:
            raise PeerRefused("the peer's NIXL address is damaged or of another version")
        return address


@dataclass(slots=True, eq=False)
class NixlPeer:
    """A peer that this agent knows: its agent's name and the prepared list of its blocks."""

    name: str
    address: NixlAddress
    path: str
    blocks: Any


def load_nixl() -> ModuleType:
    """The first NIXL that imports here. Raises `TransportUnavailable`."""
    reasons = []
    with ucx_report.environment():
        for name in MODULES:
            try:
                return importlib.import_module(name + "._api")
            except ImportError as error:
                reasons.append(f"{name}: {error}")
    raise TransportUnavailable("no NIXL module imports (pip install 'diptych[nixl]'): " + "; ".join(reasons))


def fabrics() -> tuple[str, ...]:
    """Fabrics beyond this host over which a one-sided read is safe."""
    modules = os.environ.get("UCX_MODULES", "")
    rdma = bool(rdma_devices()) and not (modules.startswith("^") and "ib" in modules[1:].split(","))
    return ("rdma",) if rdma else ()


def has_progress_thread(device: str) -> bool:
    return device == "cpu"


@contextmanager
def _calm_progress(bindings: Any, pause_us: int) -> Iterator[None]:
    """Agents created inside pause their progress thread for so long between rounds.

    NIXL 1.5.1's wrapper sets the pause to 0, and an idle agent then uses a whole core. The bindings below accept a
    pause, so it is set where the wrapper passes its configuration to them.
    """
    construct = bindings.nixlAgent

    def calm(name: str, config: Any) -> Any:
        config.pthrDelay = pause_us
        return construct(name, config)

    bindings.nixlAgent = calm
    try:
        yield
    finally:
        bindings.nixlAgent = construct


class NixlAgent:
    """Owned by the transport's thread. After `destroy`, no old read writes any more."""

    def __init__(self, api: ModuleType, region: Region, identity: HostIdentity) -> None:
        self._region = region
        self._identity = identity
        self._memory, self._device = ("DRAM", 0) if region.device == "cpu" else ("VRAM", _ordinal(region.device))
        self.lost: type[Exception] = api.nixlBind.nixlRemoteDisconnectError
        self._paths: dict[str, str] = {}
        self._trial_address, self._trial_owner = buffer_on(region.device, TRIAL_BYTES)
        with ucx_report.environment():
            has_thread = has_progress_thread(region.device)
            self.progress_s = None if has_thread else PROGRESS_S
            config = api.nixl_agent_config(enable_prog_thread=has_thread, backends=[])
            pause_us = FABRIC_PAUSE_US if fabrics() else HOST_PAUSE_US
            with _calm_progress(api.nixlBind, pause_us):
                self._agent: Any = api.nixl_agent(f"diptych-{uuid.uuid4().hex}", config)
            self._agent.create_backend("UCX", {})
        self._registered = [
            self._agent.register_memory([(region.address, region.num_bytes, self._device, "")], self._memory),
            self._agent.register_memory([(self._trial_address, TRIAL_BYTES, self._device, "")], self._memory),
        ]
        size = region.layout.block_bytes
        rows = _rows(region.address, size, region.num_bytes // size, self._device)
        self._blocks: Any = self._agent.prep_xfer_dlist("", rows, mem_type=self._memory)

    def address(self) -> bytes:
        metadata = bytes(self._agent.get_agent_metadata())
        return msgspec.msgpack.encode(
            NixlAddress(
                version=FRAME_VERSION,
                metadata=metadata,
                metadata_digest=hashlib.sha256(metadata).digest(),
                base=self._region.address,
                num_bytes=self._region.pool_bytes,
                block_bytes=self._region.layout.block_bytes,
                device=self._region.device,
                fabrics=fabrics(),
                identity=self._identity,
            )
        )

    def add_peer(self, peer: str, address: NixlAddress) -> NixlPeer:
        """Register a peer's metadata. Raises `TransportUnavailable` if reads would go over emulated TCP."""
        read_route(self._identity, self._region.device, address)
        try:
            name = self._agent.add_remote_agent(address.metadata).decode()
            memory, device = ("DRAM", 0) if address.device == "cpu" else ("VRAM", _ordinal(address.device))
            count = address.num_bytes // address.block_bytes
            rows = _rows(address.base, address.block_bytes, count, device)
            blocks = self._agent.prep_xfer_dlist(name, rows, mem_type=memory)
        except self.lost as error:
            raise PeerLost(f"{peer} was gone before it was connected") from error
        except Exception as error:
            raise PeerRefused(f"NIXL does not accept the metadata of {peer}: {error}") from error
        return NixlPeer(name, address, "", blocks)

    def trial_read(self, peer: NixlPeer) -> Any:
        """Prepare a tiny read of the peer's first bytes into a private buffer, so that UCX must choose a path.

        The buffer is in the pool's kind of memory, since UCX chooses a path for each pair of kinds.
        """
        memory, device = ("DRAM", 0) if peer.address.device == "cpu" else ("VRAM", _ordinal(peer.address.device))
        local = self._agent.get_xfer_descs([(self._trial_address, TRIAL_BYTES, self._device)], mem_type=self._memory)
        remote = self._agent.get_xfer_descs([(peer.address.base, TRIAL_BYTES, device)], mem_type=memory)
        return self._agent.initialize_xfer("READ", local, remote, peer.name, b"")

    def trial_path(self, peer: NixlPeer, log_position: int) -> str:
        """The path as text, from UCX's report on the trial read. Raises `TransportUnavailable` for a path over TCP."""
        route = read_route(self._identity, self._region.device, peer.address)
        paths = ucx_report.read_paths(log_position)
        if any(path.startswith("tcp") or "emulation" in path for path in paths):
            raise TransportUnavailable(f"UCX would read over {', '.join(paths)}, which can crash the owner")
        if paths:
            self._paths[route] = f"UCX {', '.join(paths)} ({route})"
        return self._paths.get(route, f"UCX ({route}; UCX did not report its path)")

    def prepare(self, peer: NixlPeer, copies: Copies) -> Any:
        """A read's handle, not yet posted. Whole blocks are addressed by index, other ranges by address."""
        size = self._region.layout.block_bytes
        source, target, num_bytes = copies.T
        if size == peer.address.block_bytes and not (copies % size).any():
            sources, targets = _indices(source, num_bytes, size), _indices(target, num_bytes, size)
            return self._agent.make_prepped_xfer("READ", self._blocks, targets, peer.blocks, sources, b"")
        memory, device = ("DRAM", 0) if peer.address.device == "cpu" else ("VRAM", _ordinal(peer.address.device))
        local, remote = np.empty((2, len(copies), 3), np.uint64)  # [range, (address, length, device)]
        local[:, 0], remote[:, 0] = self._region.address + target, peer.address.base + source
        local[:, 1] = remote[:, 1] = num_bytes
        local[:, 2], remote[:, 2] = self._device, device
        return self._agent.initialize_xfer(
            "READ",
            self._agent.get_xfer_descs(local, mem_type=self._memory),
            self._agent.get_xfer_descs(remote, mem_type=memory),
            peer.name,
            b"",
        )

    def post(self, handle: Any) -> bool:
        """Start it. True: it has ended already. Over CMA the whole copy happens in this call."""
        return _over(self._agent.transfer(handle))

    def poll(self, handle: Any) -> bool:
        return _over(self._agent.check_xfer_state(handle))

    def progress(self) -> None:
        """Answer readers that connect."""
        log_errors("making progress", self._agent.get_new_notifs)

    def remove_peer(self, peer: NixlPeer) -> None:
        """Forget a peer that has no read in flight."""
        log_errors("releasing a peer's blocks", peer.blocks.release)
        peer.blocks = None
        log_errors("removing a peer", self._agent.remove_remote_agent, peer.name)

    def destroy(self, peers: list[NixlPeer], *, idle: bool) -> None:
        """Drop every reference. `idle`: nothing is in flight, so the memory can be deregistered."""
        for peer in peers:
            log_errors("releasing a peer's blocks", peer.blocks.release)
            peer.blocks = None  # a list keeps the agent alive
        log_errors("releasing our blocks", self._blocks.release)
        if idle:
            for registered in self._registered:
                log_errors("deregistering", self._agent.deregister_memory, registered)
        self._agent.agent = None
        del self._agent, self._blocks


def log_errors(what: str, action: Callable[..., object], *arguments: object) -> None:
    """Call `action` and log its error: NIXL raises for peers that it has dropped itself."""
    try:
        action(*arguments)
    except Exception as error:
        logger.debug("%s failed: %s", what, error)


def read_route(ours: HostIdentity, device: str, theirs: NixlAddress) -> str:
    """Why a one-sided read is safe between the two. Raises `TransportUnavailable` if none is."""
    if set(fabrics()) & set(theirs.fabrics):
        return "rdma on both sides"
    them = theirs.identity
    if not ours.boot_id or ours.boot_id != them.boot_id:
        raise TransportUnavailable("another host, and no RDMA on both sides")
    if ours.pid_namespace != them.pid_namespace:
        raise TransportUnavailable("same host, but another pid namespace: no process may read the other's memory")
    is_host = device == "cpu"
    if is_host != (theirs.device == "cpu"):
        raise TransportUnavailable("same host, but only one pool is on a GPU: UCX would read over TCP")
    chosen = os.environ.get("UCX_TLS", "all")
    names = set(chosen.lstrip("^").split(","))
    path, members = ("CMA", {"cma", "sm", "shm"}) if is_host else ("CUDA IPC", {"cuda_ipc", "cuda"})
    if names & members if chosen.startswith("^") else not names & (members | {"all"}):
        raise TransportUnavailable(f"UCX_TLS={chosen} forbids {path}: UCX would read over TCP")
    if not is_host:
        return "GPUs of one host"
    try:
        check_process_memory(them.pid, theirs.base)
    except OSError as error:
        raise TransportUnavailable(f"same host, but CMA is not allowed: {error.strerror}") from error
    return "same host"


def _over(state: str) -> bool:
    if state == "ERR":
        raise RuntimeError("NIXL reports a failed transfer")
    return state == "DONE"


def _ordinal(device: str) -> int:
    return int(device.partition(":")[2] or 0)


def _rows(base: int, size: int, count: int, device: int) -> "np.ndarray[Any, np.dtype[np.uint64]]":
    rows = np.empty((count, 3), np.uint64)  # [block, (address, length, device)]
    rows[:, 0] = base + np.arange(count, dtype=np.uint64) * np.uint64(size)
    rows[:, 1] = size
    rows[:, 2] = device
    return rows


def _indices(offsets: Any, num_bytes: Any, size: int) -> "np.ndarray[Any, np.dtype[np.int32]]":
    """The indices of the blocks in these ranges, in order."""
    counts = num_bytes // size
    within = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
    indices: np.ndarray[Any, np.dtype[np.int32]] = (np.repeat(offsets // size, counts) + within).astype(np.int32)
    return indices
