"""Frames and handshake as steps of a `Poller`, for bulk data: bodies move between memory and kernel without a copy.

The length of all data is bounded before it is read. Knows sockets; knows no pool.
"""

import contextlib
import os
import socket
import struct
import time
from collections.abc import Callable, Iterable
from errno import EALREADY, EINPROGRESS, EISCONN
from itertools import chain
from typing import Any

from kvtransfer.errors import TransferError
from kvtransfer.rpc.frames import HEADER_BYTES, Kind, ProtocolError, expect, pack_header, parse_header
from kvtransfer.rpc.handshake import HANDSHAKE_BYTES, HANDSHAKE_S, CallerHandshake, ListenerHandshake
from kvtransfer.rpc.poller import AGAIN, IDLE, SLICE_S, Steps

MAX_BUFFERS = 512  # in one system call; below the kernel's 1024
STEP_BYTES = 1 << 20  # in one system call, about; then other links have their turn
ALONE_BYTES = 8 << 20  # while no other link moves data
_TIMEOUT = struct.pack("@ll", 0, int(SLICE_S * 1e6))  # a timeval


class Buffers:
    """The memory of one body, a few buffers at a time."""

    def __init__(self, views: Iterable[memoryview]) -> None:
        self._rest = iter(views)
        self._batch: list[memoryview] = []
        self.num_bytes = 0  # of the batch

    def batch(self, most_bytes: int) -> list[memoryview]:
        """The buffers for the next system call, of about this many bytes; none at the end."""
        while self.num_bytes < most_bytes and len(self._batch) < MAX_BUFFERS:
            view = next(self._rest, None)
            if view is None:
                break
            if view.nbytes:
                self._batch.append(view)
                self.num_bytes += view.nbytes
        return self._batch

    def moved(self, num_bytes: int) -> bool:
        """The kernel took or filled this many bytes of the batch. Returns whether these were all."""
        self.num_bytes -= num_bytes
        count = 0
        while count < len(self._batch) and num_bytes >= self._batch[count].nbytes:
            num_bytes -= self._batch[count].nbytes
            count += 1
        del self._batch[:count]
        if num_bytes:
            self._batch[0] = self._batch[0][num_bytes:]
        return not self._batch


def views_of(memory: memoryview, ranges: Iterable[tuple[int, int]]) -> Iterable[memoryview]:
    """Views of ranges (offset, length), none longer than one system call moves."""
    for offset, length in ranges:
        for start in range(offset, offset + length, STEP_BYTES):
            yield memory[start : min(start + STEP_BYTES, offset + length)]


def tune(link: socket.socket) -> None:
    """Send small packets at once, detect the loss of the peer's host within half a minute, block for `SLICE_S`."""
    link.setblocking(True)
    link.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, _TIMEOUT)
    link.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, _TIMEOUT)
    link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    link.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (("TCP_KEEPIDLE", 15), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 3)):
        if hasattr(socket, option):
            link.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)


def connect(link: socket.socket, place: Any, stop_s: float) -> Steps[None]:
    """Connect a non-blocking socket to what `getaddrinfo` found. Raises `OSError`, also `TimeoutError` at `stop_s`."""
    error = link.connect_ex(place)
    while error in (EINPROGRESS, EALREADY):
        yield stop_s
        error = link.connect_ex(place)
    if error not in (0, EISCONN):
        raise OSError(error, os.strerror(error))


def receive_into(link: socket.socket, views: Iterable[memoryview], stop_s: float = IDLE) -> Steps[None]:
    """Fill all views in order, directly from the kernel, until `stop_s` (of `time.monotonic`).

    Raises `ConnectionError` when the peer closes early, `TimeoutError`, or `OSError`.
    """
    buffers, is_alone = Buffers(views), False
    while batch := buffers.batch(ALONE_BYTES if is_alone else STEP_BYTES):
        asked, got = buffers.num_bytes, -1
        with contextlib.suppress(BlockingIOError):
            got = link.recvmsg_into(batch, 0, socket.MSG_WAITALL if is_alone else socket.MSG_DONTWAIT)[0]
            if got == 0:
                raise ConnectionError("the peer closed the connection")
            if buffers.moved(got) and not buffers.batch(STEP_BYTES):
                return
        is_alone = yield AGAIN if got == asked else stop_s


def receive_exactly(link: socket.socket, num_bytes: int, stop_s: float) -> Steps[bytes]:
    buffer = bytearray(num_bytes)
    yield from receive_into(link, [memoryview(buffer)], stop_s)
    return bytes(buffer)


def receive_header(link: socket.socket, max_bytes: int, stop_s: float = IDLE) -> Steps[tuple[int, int, int]]:
    """Kind, number and length of the next frame; its body follows."""
    return parse_header((yield from receive_exactly(link, HEADER_BYTES, stop_s)), max_bytes)


def send_frame(
    link: socket.socket, kind: Kind, number: int, length: int, views: Iterable[memoryview], stall_s: float
) -> Steps[None]:
    """Send views of `length` bytes in order as one body, without joining them.

    Raises `TimeoutError` when the peer takes nothing for `stall_s`, or `OSError`.
    """
    buffers, is_alone = Buffers(chain([memoryview(pack_header(kind, number, length))], views)), False
    while batch := buffers.batch(ALONE_BYTES if is_alone else STEP_BYTES):
        asked, sent = buffers.num_bytes, -1
        with contextlib.suppress(BlockingIOError):
            sent = link.sendmsg(batch, (), 0 if is_alone else socket.MSG_DONTWAIT)
            if buffers.moved(sent) and not buffers.batch(STEP_BYTES):
                return
        is_alone = yield AGAIN if sent == asked else time.monotonic() + stall_s


def greet_listener(link: socket.socket, handshake: CallerHandshake, stop_s: float) -> Steps[None]:
    """The caller's half of the handshake, until `stop_s`. Raises `CallerHandshake`'s errors, or `OSError`."""
    try:
        yield from _send_handshake(link, handshake.claim((yield from _receive_handshake(link, stop_s))))
        handshake.accept((yield from _receive_handshake(link, stop_s)))
    except ProtocolError as error:
        raise handshake.wrong_protocol(str(error)) from error


def greet_caller(
    link: socket.socket, handshake: ListenerHandshake, admit: Callable[[str], None], stop_s: float
) -> Steps[None]:
    """The listener's half, until `stop_s`. `admit` is called with the target of a caller that knows the secret.

    Raises the `TransferError` with which the caller is refused, msgspec's errors, `OSError`, `ProtocolError`.
    """
    yield from _send_handshake(link, handshake.hello)
    claim = yield from _receive_handshake(link, stop_s)
    try:
        admit(handshake.verify(claim))
    except TransferError as error:
        yield from _send_handshake(link, handshake.refusal(error))
        raise
    yield from _send_handshake(link, handshake.welcome())


def _send_handshake(link: socket.socket, body: bytes) -> Steps[None]:
    return send_frame(link, Kind.HANDSHAKE, 0, len(body), [memoryview(body)], HANDSHAKE_S)


def _receive_handshake(link: socket.socket, stop_s: float) -> Steps[bytes]:
    kind, _, length = yield from receive_header(link, HANDSHAKE_BYTES, stop_s)
    expect(kind, Kind.HANDSHAKE)
    return (yield from receive_exactly(link, length, stop_s))
