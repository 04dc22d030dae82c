"""The bytes on our own TCP link: a handshake, then requests for byte ranges and their raw answers.

    owner  -> reader   magic, nonce
    reader -> owner    magic, nonce, proof, length + incarnation it means to meet
    owner  -> reader   verdict, proof, length + reason
    reader -> owner    "READ", number of ranges, total bytes, (offset, length) each        } repeated
    owner  -> reader   "DATA", total bytes, the bytes of all ranges in order               }

Knows sockets and secrets; knows no pool and no thread. Everything a peer sends is bounded before it is believed.
"""

import socket
import struct
import time
from collections.abc import Callable, Sequence

from kvtransfer.challenge import NONCE_BYTES, PROOF_BYTES, nonce, proof, proves
from kvtransfer.errors import PeerLost, PeerRefused, TransportUnavailable

MAGIC = b"DKV2"
MAX_INCARNATION_BYTES = 256
MAX_RANGES = 1 << 16
MAX_IOVECS = 512  # below the kernel's 1024 for one call

WELCOME, WRONG_SECRET, WRONG_INCARNATION, FULL = 0, 1, 2, 3

_HELLO = struct.Struct(f"!4s{NONCE_BYTES}s")
_ANSWER = struct.Struct(f"!4s{NONCE_BYTES}s{PROOF_BYTES}sH")
_VERDICT = struct.Struct(f"!B{PROOF_BYTES}sH")
_REQUEST = struct.Struct("!4sIQ")
_RANGE = struct.Struct("!QQ")
_DATA = struct.Struct("!4sQ")

Ranges = tuple[tuple[int, int], ...]


class Malformed(Exception):
    """The peer does not speak this protocol: hang up, and nothing else."""


def tune(link: socket.socket) -> None:
    """No waiting for full packets, and a peer whose host vanished is noticed within half a minute."""
    link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    link.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (("TCP_KEEPIDLE", 15), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 3)):
        if hasattr(socket, option):
            link.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)


def receive_exactly(link: socket.socket, num_bytes: int, stop_s: float | None = None) -> bytes:
    buffer = bytearray(num_bytes)
    receive_into(link, [memoryview(buffer)], stop_s)
    return bytes(buffer)


def receive_into(link: socket.socket, views: Sequence[memoryview], stop_s: float | None = None) -> None:
    """Fill all views in order, straight from the kernel. Raises `ConnectionError` when the peer ends early.

    `stop_s` (of `time.monotonic`) bounds the whole: a socket's own timeout begins again with every byte that comes.
    """
    pending = [view for view in views if view.nbytes]
    first = 0
    while first < len(pending):
        if stop_s is not None:
            link.settimeout(max(1e-3, stop_s - time.monotonic()))
        got, *_ = link.recvmsg_into(pending[first : first + MAX_IOVECS], 0, socket.MSG_WAITALL)
        if got == 0:
            raise ConnectionError("the peer closed the connection")
        first = _advance(pending, first, got)


def send_views(link: socket.socket, views: Sequence[memoryview]) -> None:
    """Send all views in order without joining them."""
    pending = [view for view in views if view.nbytes]
    first = 0
    while first < len(pending):
        first = _advance(pending, first, link.sendmsg(pending[first : first + MAX_IOVECS]))


def _advance(pending: list[memoryview], first: int, num_bytes: int) -> int:
    """Skip what was moved; a view moved in part is shortened in place."""
    while first < len(pending) and num_bytes >= pending[first].nbytes:
        num_bytes -= pending[first].nbytes
        first += 1
    if num_bytes:
        pending[first] = pending[first][num_bytes:]
    return first


def greet_reader(link: socket.socket, secret: bytes, incarnation: str, stop_s: float, admit: Callable[[], str]) -> bool:
    """The owner's half of the handshake, until `stop_s`. False: the peer was told why, hang up.

    `admit` is asked once the peer has proven itself; it answers why there is no room for one more reader, else "".
    """
    ours = nonce()
    link.settimeout(max(1e-3, stop_s - time.monotonic()))
    link.sendall(_HELLO.pack(MAGIC, ours))
    magic, theirs, given, length = _ANSWER.unpack(receive_exactly(link, _ANSWER.size, stop_s))
    if magic != MAGIC or length > MAX_INCARNATION_BYTES:
        raise Malformed("not a reader of this protocol")
    wanted = receive_exactly(link, length, stop_s).decode(errors="replace")
    if not proves(given, proof(secret, b"tcp reader", ours, theirs, wanted)):
        link.sendall(_VERDICT.pack(WRONG_SECRET, bytes(PROOF_BYTES), 0))
        return False
    verdict, reason = (WELCOME, "") if wanted == incarnation else (WRONG_INCARNATION, "")
    if verdict == WELCOME and (reason := admit()):
        verdict = FULL
    said = reason.encode()
    link.sendall(_VERDICT.pack(verdict, proof(secret, b"tcp owner", ours, theirs, wanted), len(said)) + said)
    return verdict == WELCOME


def greet_owner(link: socket.socket, secret: bytes, incarnation: str) -> None:
    """The reader's half. Raises `PeerRefused`, `TransportUnavailable` when the owner has no room for another reader,
    or `PeerLost` when another incarnation answers.
    """
    magic, theirs = _HELLO.unpack(receive_exactly(link, _HELLO.size))
    if magic != MAGIC:
        raise PeerRefused(f"{incarnation} does not speak our transfer protocol: check host, port and version")
    ours, name = nonce(), incarnation.encode()
    given = proof(secret, b"tcp reader", theirs, ours, incarnation)
    link.sendall(_ANSWER.pack(MAGIC, ours, given, len(name)) + name)
    verdict, answer, length = _VERDICT.unpack(receive_exactly(link, _VERDICT.size))
    if verdict == WRONG_SECRET or not proves(answer, proof(secret, b"tcp owner", theirs, ours, incarnation)):
        raise PeerRefused(f"{incarnation} and we do not share one secret: start both with the same cluster secret")
    reason = receive_exactly(link, length).decode(errors="replace")
    if verdict == FULL:
        raise TransportUnavailable(f"{incarnation} turned us away: {reason}")
    if verdict != WELCOME:
        raise PeerLost(f"{incarnation} has gone, another incarnation answers at its address: ask for its new ticket")


def send_request(link: socket.socket, ranges: Ranges) -> None:
    total = sum(length for _, length in ranges)
    link.sendall(_REQUEST.pack(b"READ", len(ranges), total) + b"".join(_RANGE.pack(*entry) for entry in ranges))


def receive_request(link: socket.socket, pool_bytes: int, stall_s: float) -> Ranges:
    """Wait for the next request, however long; once it began, its rest must come within `stall_s`."""
    link.settimeout(None)
    head = receive_exactly(link, 1)
    stop_s = time.monotonic() + stall_s
    word, count, total = _REQUEST.unpack(head + receive_exactly(link, _REQUEST.size - 1, stop_s))
    if word != b"READ" or not 0 < count <= MAX_RANGES:
        raise Malformed("not a request")
    ranges = tuple(_RANGE.iter_unpack(receive_exactly(link, count * _RANGE.size, stop_s)))
    link.settimeout(stall_s)
    if sum(length for _, length in ranges) != total:
        raise Malformed("the ranges do not add up")
    if any(length == 0 or offset + length > pool_bytes for offset, length in ranges):
        raise Malformed("a range outside the pool")
    return ranges


def send_data(link: socket.socket, views: Sequence[memoryview]) -> None:
    send_views(link, [memoryview(_DATA.pack(b"DATA", sum(view.nbytes for view in views))), *views])


def receive_data(link: socket.socket, views: Sequence[memoryview]) -> None:
    word, total = _DATA.unpack(receive_exactly(link, _DATA.size))
    if word != b"DATA" or total != sum(view.nbytes for view in views):
        raise ConnectionError("the peer answered out of turn")
    receive_into(link, views)
