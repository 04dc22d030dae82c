"""A client's network dies, so that no packet says goodbye: its requests end all the same, idle or in mid-stream."""

import asyncio
import json
import os
import socket
import sys
from asyncio.subprocess import DEVNULL, PIPE

import pytest

from tests.ray.namespaces import LEFT, Link, linked_nodes, why_not
from tests.ray.served import ROOT

pytestmark = [pytest.mark.full, pytest.mark.skipif(bool(why_not()), reason=why_not() or "two nodes")]

START_S = 60.0
NOTICED_S = 90.0  # both servers have 40 s; without a bound of its own TCP sends again for a quarter of an hour
ENV = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, (ROOT, ROOT / "proto")))}
BODY = json.dumps({"prompt": "hello", "max_tokens": 4000, "stream": True}).encode()
HTTP = b"POST /v1/completions HTTP/1.1\r\nhost: h\r\ncontent-type: application/json\r\n" + (
    b"content-length: %d\r\n\r\n%s" % (len(BODY), BODY)
)
GRPC = """
import asyncio, sys
from diptych.client import AsyncClient
async def main():
    async with AsyncClient(sys.argv[1]) as client:
        async for event in client.generate("hello", max_tokens=4000):
            print(event, flush=True)
asyncio.run(main())
"""


def http_client(link: Link, port: int) -> socket.socket:
    """Has got the first token."""
    client = link.right.socket()
    client.settimeout(START_S)
    client.connect((LEFT, port))
    client.sendall(HTTP)
    received = b""
    while b'"text"' not in received:
        received += client.recv(4096)
    return client


async def read(process: asyncio.subprocess.Process, within_s: float) -> str:
    assert process.stdout is not None
    async with asyncio.timeout(within_s):
        line = await process.stdout.readline()
    assert line, "it ended"
    return line.decode()


async def started(*command: str) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(*command, stdout=PIPE, stderr=DEVNULL, env=ENV, cwd=ROOT)


async def test_requests_end_when_their_clients_network_is_dead() -> None:
    """One server whose streams have sent a token and wait, and one whose streams go on sending."""
    module = (sys.executable, "-m", "tests.frontend.behind_link")
    with linked_nodes() as link:
        servers = [await started(*link.left.inside(*module, LEFT, step_s)) for step_s in ("1000", "0.5")]
        http_clients, processes = [], [*servers]
        for server in servers:
            grpc_port, http_port = (await read(server, START_S)).split()
            http_clients.append(await asyncio.to_thread(http_client, link, int(http_port)))
            grpc = await started(*link.right.inside(sys.executable, "-c", GRPC, f"{LEFT}:{grpc_port}"))
            await read(grpc, START_S)
            processes.append(grpc)
            while await read(server, START_S) != "2\n":
                pass
        link.cut()
        for server in servers:
            while await read(server, NOTICED_S) != "0\n":
                pass
        for client in http_clients:
            client.close()
    for process in processes:  # they ended with their nodes
        await asyncio.wait_for(process.communicate(), START_S)
