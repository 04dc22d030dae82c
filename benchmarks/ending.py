"""When a measured program ends. Knows who started it by its input alone."""

import asyncio
import signal
import sys


async def told_to_end() -> None:
    """The end of our input: whoever started us asks for it, or is gone. Or SIGTERM."""
    loop, end = asyncio.get_running_loop(), asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, end.set)
    loop.add_reader(sys.stdin, end.set)
    await end.wait()
    loop.remove_reader(sys.stdin)
