"""Waits for a device: calls to a GPU return before their kernels have run.

    compute thread    write KV ── record event ── ... ── event.synchronize ──> the step counts as done
    device            ................ write KV ... event ┘

A step must wait for its event before its blocks are read, freed or reused: transfers do not use the device's queue. On
a CPU calls return when they are done, and there is nothing to wait for.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Protocol

import torch


class Event(Protocol):
    """A point in a device's queue, such as a `torch.cuda.Event`."""

    def synchronize(self) -> None:
        """Wait until the device has reached it. Raises `RuntimeError` if the device failed."""
        ...


RecordEvent = Callable[[], Event | None]
"""Called on the thread that launches kernels: an event after all of them, or None if they are done already."""


def record_event_on(device: torch.device) -> RecordEvent:
    """The `RecordEvent` for this device."""
    if device.type != "cuda":
        return lambda: None

    def record_event() -> Event:
        # blocking: the waiting thread sleeps instead of spinning.
        event: Any = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(device))
        marked: Event = event
        return marked

    return record_event


SideStream = Callable[[], AbstractContextManager[None]]
"""Work inside it runs beside the steps, in a queue of its own, and is done when it ends. For any thread."""


def side_stream_on(device: torch.device) -> SideStream:
    """The `SideStream` for this device."""
    if device.type != "cuda":
        return nullcontext
    stream: Any = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    record_event = record_event_on(device)

    @contextmanager
    def side_stream() -> Iterator[None]:
        with torch.cuda.stream(stream):
            try:
                yield
            finally:
                wait(record_event())

    return side_stream


def wait(event: Event | None) -> None:
    if event is not None:
        event.synchronize()
