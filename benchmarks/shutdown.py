"""How a measured program learns that it should end."""

import asyncio
import signal
import sys


async def wait_for_shutdown() -> None:
    """Wait for the end of standard input, which the parent process closes, or for SIGINT or SIGTERM."""
    loop, end = asyncio.get_running_loop(), asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, end.set)
    loop.add_reader(sys.stdin, end.set)
    await end.wait()
    loop.remove_reader(sys.stdin)
