"""Tasks that run beside their owner. Knows nothing of their work."""

import asyncio
from collections.abc import Awaitable
from typing import Any, TypeVar

T = TypeVar("T")


class BackgroundTasks(set["asyncio.Future[Any]"]):
    """The running ones: asyncio itself holds no reference to a task. Their owner waits for them, or cancels them."""

    def start(self, work: Awaitable[T]) -> "asyncio.Future[T]":
        task = asyncio.ensure_future(work)
        self.add(task)
        task.add_done_callback(self.discard)
        return task
