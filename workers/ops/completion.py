"""When a device has done what it was given: a GPU's calls return long before their kernels have run.

    compute thread    write KV ── mark ── ... ── event.synchronize ──> the step counts as done
    device            ......... write KV ... event ┘

A step whose blocks may be read, freed or given away must have waited for its event: readers, and transfers into blocks,
know nothing of the device's queue. A CPU's calls return when they are done, and there is nothing to wait for.
"""

from collections.abc import Callable
from typing import Any, Protocol

import torch


class Event(Protocol):
    """A point in a device's queue, as `torch.cuda.Event` is one."""

    def synchronize(self) -> None:
        """Wait until the device has passed it. Raises `RuntimeError` when the device failed before."""
        ...


Mark = Callable[[], Event | None]
"""Called on the thread that gives the device its work: the point behind all of it, None where that is done already."""


def mark_on(device: torch.device) -> Mark:
    """How to mark the present point of the calling thread's queue on this device."""
    if device.type != "cuda":
        return lambda: None

    def mark() -> Event:
        # Whoever waits sleeps: others need the core.
        event: Any = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(device))
        marked: Event = event
        return marked

    return mark


def wait(event: Event | None) -> None:
    if event is not None:
        event.synchronize()
