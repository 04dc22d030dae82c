"""Opens the transport backends that work in this process; the only place that chooses among them.

Everything else sees a `TransportSet`.
"""

from dataclasses import dataclass

from kvtransfer.backends.memory import MemoryTransport, SharedMemory
from kvtransfer.backends.modelled import LinkModel, ModelledTransport
from kvtransfer.errors import TransportUnavailable
from kvtransfer.host import host_identity
from kvtransfer.links import TransportSet
from kvtransfer.probe import RESERVED_BLOCKS, stamp_probe_block
from kvtransfer.ticket import rank_name
from kvtransfer.transport import Place, Region, Transport

__all__ = [
    "BACKENDS",
    "RESERVED_BLOCKS",
    "LinkModel",
    "SharedMemory",
    "TransportSet",
    "host_identity",
    "open_transports",
    "stamp_probe_block",
]

BACKENDS = ("memory", "cuda_ipc", "nixl", "tcp")  # that move bytes, in order of preference


@dataclass(frozen=True, slots=True)
class _Opening:
    """The arguments for opening a backend."""

    region: Region
    name: str  # of the rank
    host: str
    secret: bytes
    quarantine_s: float
    max_readers: int
    shared: SharedMemory | None
    model: LinkModel | None


def open_transports(
    region: Region,
    backends: tuple[str, ...] = BACKENDS,
    *,
    incarnation: str,
    secret: bytes,
    host: str,
    quarantine_s: float = 60.0,
    max_readers: int = 256,
    rank: int = 0,
    shared: SharedMemory | None = None,
    model: LinkModel | None = None,
    place: Place | None = None,
) -> TransportSet:
    """Open `backends`, in this order of preference, over one rank's pool, and stamp its probe block.

    `host` is our address that peers can reach; `quarantine_s` bounds how long an unfinished read may hold its target
    blocks; `max_readers` ranks may read over `tcp` at once; `place` converts KV of another dtype into the pool.
    A backend that cannot work here is left out; reports of links say why, but are silent about `cuda_ipc` on a CPU.
    `modelled` moves no bytes, so it works only alone. Raises `TransportUnavailable` when nothing is left.
    """
    if region.device == "cpu" and len(backends) > 1:
        backends = tuple(each for each in backends if each != "cuda_ipc")
    moves_bytes = "modelled" not in backends
    if not moves_bytes and len(backends) > 1:
        raise ValueError("the modelled backend moves no bytes: it cannot be combined with one that does")
    name = rank_name(incarnation, rank)
    opening = _Opening(region, name, host, secret, quarantine_s, max_readers, shared, model)
    if moves_bytes:
        stamp_probe_block(region, name)
    opened: list[Transport] = []
    reasons: list[str] = []
    for backend in backends:
        try:
            opened.append(_open(backend, opening))
        except TransportUnavailable as error:
            reasons.append(f"{backend}: {error}")
    if not opened:
        raise TransportUnavailable(f"no transport works here: {'; '.join(reasons)}")
    return TransportSet(region, rank, tuple(opened), tuple(reasons), verifies=moves_bytes, place=place)


def _open(name: str, opening: _Opening) -> Transport:
    region = opening.region
    if name == "memory":
        if opening.shared is None:
            raise TransportUnavailable("no other worker shares this process")
        return MemoryTransport(region, opening.shared)
    if name == "modelled":
        if opening.model is None:
            raise TransportUnavailable("no link model was given")
        return ModelledTransport(region, opening.model)
    if name == "tcp":
        from kvtransfer.backends.tcp import TcpTransport

        if region.device != "cpu":
            raise TransportUnavailable(f"the pool is on {region.device}: sockets read host memory only")
        try:
            return TcpTransport(
                region,
                host=opening.host,
                secret=opening.secret,
                incarnation=opening.name,
                max_readers=opening.max_readers,
            )
        except OSError as error:
            raise TransportUnavailable(f"cannot listen on {opening.host}: {error}") from error
    if name == "cuda_ipc":
        from kvtransfer.backends.cuda_ipc import CudaIpcTransport

        return CudaIpcTransport(region, identity=host_identity())
    if name == "nixl":
        from kvtransfer.backends.nixl import NixlTransport

        return NixlTransport(region, identity=host_identity(), quarantine_s=opening.quarantine_s)
    raise ValueError(f"transport backend {name!r} is not one of {', '.join((*BACKENDS, 'modelled'))}")
