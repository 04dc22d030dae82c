"""The limit: plan and answer over one blocking socket, without event loop, threads or typed frames.

The leader blocks its event loop, which a worker cannot do.
"""

import socket
import tempfile
from pathlib import Path

from benchmarks.gang.transports import DEADLINE_S, Compute, Start


class SocketDelivery:
    def __init__(self, pid: int, connection: socket.socket, listener: socket.socket) -> None:
        self.pid = pid
        self._connection = connection
        self._listener = listener

    async def deliver(self, plan: bytes) -> bytes:
        _send(self._connection, plan)
        return _receive(self._connection)

    def close(self) -> None:
        self._connection.close()
        self._listener.close()


async def lead(start: Start) -> SocketDelivery:
    with tempfile.TemporaryDirectory(prefix="diptych-bench-") as folder:
        listener = socket.socket(socket.AF_UNIX)
        listener.settimeout(DEADLINE_S * 10)
        listener.bind(str(Path(folder) / "socket"))
        listener.listen(1)
        pid = start(str(Path(folder) / "socket"))
        connection, _ = listener.accept()
    connection.settimeout(DEADLINE_S)
    return SocketDelivery(pid, connection, listener)


def serve(address: str, compute: Compute) -> None:
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(address)
        while True:
            try:
                data = _receive(connection)
            except EOFError:
                return
            _send(connection, compute(data))


def _send(connection: socket.socket, data: bytes) -> None:
    connection.sendall(len(data).to_bytes(4, "big") + data)


def _receive(connection: socket.socket) -> bytes:
    return _exactly(connection, int.from_bytes(_exactly(connection, 4), "big"))


def _exactly(connection: socket.socket, num_bytes: int) -> bytes:
    data = connection.recv(num_bytes)
    while len(data) < num_bytes:
        more = connection.recv(num_bytes - len(data))
        if not more:
            raise EOFError("the other end disconnected")
        data += more
    return data
