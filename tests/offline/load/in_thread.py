"""Servers in a loop of another thread, so that commands, which have loops of their own, can be run against them."""

import asyncio
import threading
from collections.abc import Iterator
from contextlib import AbstractAsyncContextManager, contextmanager
from typing import TypeVar

T = TypeVar("T")


@contextmanager
def in_thread(server: AbstractAsyncContextManager[T]) -> Iterator[T]:
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    try:
        opened = asyncio.run_coroutine_threadsafe(server.__aenter__(), loop).result(60)
        try:
            yield opened
        finally:
            asyncio.run_coroutine_threadsafe(server.__aexit__(None, None, None), loop).result(60)
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()
