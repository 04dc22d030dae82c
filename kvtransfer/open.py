"""Opens the transport backends that work in this process; the only place that chooses among them.

Everything else sees a `TransportSet`.
"""

from collections.abc import Callable

from kvtransfer.backends.memory import MemoryTransport
from kvtransfer.backends.memory import SharedMemory as SharedMemory
from kvtransfer.backends.simulated import LinkModel as LinkModel
from kvtransfer.backends.simulated import SimulatedTransport
from kvtransfer.errors import TransportUnavailable
from kvtransfer.host import host_identity as host_identity
from kvtransfer.links import TransportSet as TransportSet
from kvtransfer.probe import RESERVED_BLOCKS as RESERVED_BLOCKS
from kvtransfer.probe import stamp_probe_block as stamp_probe_block
from kvtransfer.ticket import rank_name
from kvtransfer.transport import Place, Region, Transport

BACKENDS = ("memory", "cuda_ipc", "nixl", "tcp")  # that move bytes, in order of preference


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
    `simulated` moves no bytes, so it works only alone. Raises `TransportUnavailable` when nothing is left.
    """
    if region.device == "cpu" and len(backends) > 1:
        backends = tuple(each for each in backends if each != "cuda_ipc")
    moves_bytes = "simulated" not in backends
    if not moves_bytes and len(backends) > 1:
        raise ValueError("the simulated backend moves no bytes: it cannot be combined with one that does")
    name = rank_name(incarnation, rank)
    openers: dict[str, Callable[[], Transport]] = {
        "memory": lambda: _memory(region, shared),
        "simulated": lambda: _simulated(region, model),
        "cuda_ipc": lambda: _cuda_ipc(region),
        "nixl": lambda: _nixl(region, quarantine_s),
        "tcp": lambda: _tcp(region, host, secret, name, max_readers),
    }
    if unknown := [backend for backend in backends if backend not in openers]:
        raise ValueError(f"transport backend {unknown[0]!r} is not one of {', '.join((*BACKENDS, 'simulated'))}")
    if moves_bytes:
        stamp_probe_block(region, name)
    opened: list[Transport] = []
    reasons: list[str] = []
    for backend in backends:
        try:
            opened.append(openers[backend]())
        except TransportUnavailable as error:
            reasons.append(f"{backend}: {error}")
    if not opened:
        raise TransportUnavailable(f"no transport works here: {'; '.join(reasons)}")
    return TransportSet(region, rank, tuple(opened), tuple(reasons), verifies=moves_bytes, place=place)


def _memory(region: Region, shared: SharedMemory | None) -> Transport:
    if shared is None:
        raise TransportUnavailable("no other worker shares this process")
    return MemoryTransport(region, shared)


def _simulated(region: Region, model: LinkModel | None) -> Transport:
    if model is None:
        raise TransportUnavailable("no link model was given")
    return SimulatedTransport(region, model)


def _cuda_ipc(region: Region) -> Transport:
    from kvtransfer.backends.cuda_ipc import CudaIpcTransport

    return CudaIpcTransport(region, identity=host_identity())


def _nixl(region: Region, quarantine_s: float) -> Transport:
    from kvtransfer.backends.nixl import NixlTransport

    return NixlTransport(region, identity=host_identity(), quarantine_s=quarantine_s)


def _tcp(region: Region, host: str, secret: bytes, name: str, max_readers: int) -> Transport:
    from kvtransfer.backends.tcp import TcpTransport

    if region.device != "cpu":
        raise TransportUnavailable(f"the pool is on {region.device}: sockets read host memory only")
    try:
        return TcpTransport(region, host=host, secret=secret, incarnation=name, max_readers=max_readers)
    except OSError as error:
        raise TransportUnavailable(f"cannot listen on {host}: {error}") from error
