"""A Service with an address: each new connection goes to the next ready pod, and stays there.

`service_proxy.py FILE HOST PORT:TARGET...`; FILE has the addresses of the ready pods.
"""

import asyncio
import itertools
import sys
from functools import partial
from pathlib import Path


async def serve(file: Path, host: str, ports: list[tuple[int, int]]) -> None:
    turn = itertools.count()

    def ready() -> list[str]:
        return file.read_text().split()

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, target: int) -> None:
        try:
            found = ready()
            there = await asyncio.open_connection(found[next(turn) % len(found)], target) if found else None
        except OSError:
            there = None
        if there is not None:
            await asyncio.gather(passed(reader, there[1]), passed(there[0], writer))
        writer.close()

    servers = [await asyncio.start_server(partial(connected, target=target), host, port) for port, target in ports]
    await asyncio.gather(*(each.serve_forever() for each in servers))


async def passed(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        while data := await reader.read(65536):
            writer.write(data)
            await writer.drain()
    except OSError:
        pass  # one side is gone; the other is told below
    finally:
        writer.close()


if __name__ == "__main__":
    pairs = [(int(port), int(target)) for port, target in (each.split(":") for each in sys.argv[3:])]
    asyncio.run(serve(Path(sys.argv[1]), sys.argv[2], pairs))
