"""A listening port whose connections a test serves, without a handshake."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from kvtransfer.rpc.frames import FrameStream


async def served(serve: Callable[[FrameStream], Coroutine[Any, Any, None]]) -> asyncio.Server:
    """Listen on a free port of the loopback. The caller closes the server."""
    serving: set[asyncio.Task[None]] = set()

    def accepted(stream: FrameStream) -> None:
        serving.add(asyncio.ensure_future(serve(stream)))

    return await asyncio.get_running_loop().create_server(lambda: FrameStream(accepted), "127.0.0.1", 0)
