"""Streams one answer from a running cluster: `diptych serve`, then `python examples/client.py`."""

import asyncio

from diptych.client import AsyncClient, TextDelta


async def main() -> None:
    async with AsyncClient("127.0.0.1:50051") as client:
        await client.wait_ready(timeout_s=60)
        async for event in client.chat([("user", "Why is the sea salty?")], max_tokens=64, temperature=0.0):
            if isinstance(event, TextDelta):
                print(event.text, end="", flush=True)
        print()


asyncio.run(main())
