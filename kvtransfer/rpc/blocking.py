"""Frames and handshake on a blocking socket, for bulk data: bodies move between memory and the kernel without a copy.

The length of all data is bounded before it is read. Knows sockets; knows no pool and no thread.
"""

import socket
import time
from collections.abc import Callable, Sequence

from kvtransfer.errors import TransferError
from kvtransfer.rpc.frames import HEADER_BYTES, Kind, ProtocolError, expect, pack_header, parse_header
from kvtransfer.rpc.handshake import HANDSHAKE_BYTES, CallerHandshake, ListenerHandshake

MAX_IOVECS = 512  # below the kernel's 1024 for one call


def tune(link: socket.socket) -> None:
    """Send small packets at once, and detect the loss of the peer's host within half a minute."""
    link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    link.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (("TCP_KEEPIDLE", 15), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 3)):
        if hasattr(socket, option):
            link.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)


def receive_into(link: socket.socket, views: Sequence[memoryview], stop_s: float | None = None) -> None:
    """Fill all views in order, directly from the kernel. Raises `ConnectionError` when the peer closes early.

    `stop_s` (of `time.monotonic`) bounds the whole call; a socket's own timeout restarts with every byte.
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


def receive_exactly(link: socket.socket, num_bytes: int, stop_s: float | None = None) -> bytes:
    buffer = bytearray(num_bytes)
    receive_into(link, [memoryview(buffer)], stop_s)
    return bytes(buffer)


def receive_header(link: socket.socket, max_bytes: int, stop_s: float | None = None) -> tuple[int, int, int]:
    """Kind, number and length of the next frame; its body follows."""
    return parse_header(receive_exactly(link, HEADER_BYTES, stop_s), max_bytes)


def send_frame(link: socket.socket, kind: Kind, number: int, views: Sequence[memoryview]) -> None:
    """Send all views in order as one body, without joining them."""
    header = pack_header(kind, number, sum(view.nbytes for view in views))
    pending = [memoryview(header), *(view for view in views if view.nbytes)]
    first = 0
    while first < len(pending):
        first = _advance(pending, first, link.sendmsg(pending[first : first + MAX_IOVECS]))


def _advance(pending: list[memoryview], first: int, num_bytes: int) -> int:
    """The first view that is not complete; a partly moved view is shortened in place."""
    while first < len(pending) and num_bytes >= pending[first].nbytes:
        num_bytes -= pending[first].nbytes
        first += 1
    if num_bytes:
        pending[first] = pending[first][num_bytes:]
    return first


def greet_listener(link: socket.socket, handshake: CallerHandshake) -> None:
    """The caller's half of the handshake. Raises `CallerHandshake`'s errors, or `OSError`."""
    try:
        _send_handshake(link, handshake.claim(_receive_handshake(link)))
        handshake.accept(_receive_handshake(link))
    except ProtocolError as error:
        raise handshake.wrong_protocol(str(error)) from error


def greet_caller(
    link: socket.socket, handshake: ListenerHandshake, admit: Callable[[str], None], stop_s: float
) -> None:
    """The listener's half, until `stop_s`. `admit` is called with the target of a caller that knows the secret.

    Raises the `TransferError` with which the caller is refused, msgspec's errors, `OSError`, `ProtocolError`.
    """
    link.settimeout(max(1e-3, stop_s - time.monotonic()))
    _send_handshake(link, handshake.hello)
    claim = _receive_handshake(link, stop_s)
    try:
        admit(handshake.verify(claim))
    except TransferError as error:
        _send_handshake(link, handshake.refusal(error))
        raise
    _send_handshake(link, handshake.welcome())


def _send_handshake(link: socket.socket, body: bytes) -> None:
    send_frame(link, Kind.HANDSHAKE, 0, [memoryview(body)])


def _receive_handshake(link: socket.socket, stop_s: float | None = None) -> bytes:
    kind, _, length = receive_header(link, HANDSHAKE_BYTES, stop_s)
    expect(kind, Kind.HANDSHAKE)
    return receive_exactly(link, length, stop_s)
