"""Compute threads and cores of one rank; makes sure that no other worker computes on the same cores.

Each worker claims as many cores as it has threads, by locks on small files, which end with the process. The claims are
per machine and user. Oversubscribed OpenMP threads spin while they wait for each other: two workers of two threads on
two cores run 17 to 50 times slower, so a failed claim is reported.
"""

import asyncio
import fcntl
import logging
import math
import os
import tempfile
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import IO, TypeVar

import torch

from workers.errors import ModelError

logger = logging.getLogger(__name__)

T = TypeVar("T")


def usable_cores() -> tuple[int, ...]:
    """The cores on which this process may run, at most as many as its cgroup's CPU quota."""
    cores = sorted(os.sched_getaffinity(0))
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        allowed = math.ceil(int(quota) / int(period))  # "max", hence ValueError, when unlimited
    except (OSError, ValueError):
        return tuple(cores)
    return tuple(cores[: max(1, allowed)])


def parse_cores(text: str) -> tuple[int, ...]:
    """Cores from "auto" (all usable ones) or a list like "0,2-3". Raises `ModelError`."""
    usable = usable_cores()
    if text == "auto":
        return usable
    cores: set[int] = set()
    try:
        for part in text.split(","):
            first, dash, last = part.partition("-")
            cores.update(range(int(first), int(last if dash else first) + 1))
    except ValueError:
        raise ModelError(f'engine.cores {text!r} is neither "auto" nor a list of cores such as "0,2-3"') from None
    missing = sorted(cores - set(usable))
    if missing or not cores:
        raise ModelError(f"engine.cores {text!r}: this process may run on cores {usable}, not on {missing}")
    return tuple(sorted(cores))


class CoreClaim:
    """Cores reserved for this worker until `release` or the end of the process."""

    def __init__(self, candidates: Iterable[int], count: int) -> None:
        """Claims up to `count` of the candidates; `cores` has those that were free."""
        folder = Path(tempfile.gettempdir()) / f"diptych-cores-{os.getuid()}"
        folder.mkdir(mode=0o700, exist_ok=True)
        self._files: dict[int, IO[str]] = {}
        for core in candidates:
            if len(self._files) == count:
                break
            file = (folder / str(core)).open("a")
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                file.close()
                continue
            self._files[core] = file

    @property
    def cores(self) -> tuple[int, ...]:
        return tuple(self._files)

    def release(self) -> None:
        for file in self._files.values():
            file.close()
        self._files.clear()


class ComputeThread:
    """A thread with its own number of torch threads. Runs calls one at a time, in order.

    `cores` as in `engine.cores`; "" lets the system place the threads. Raises `ModelError` if other workers have
    claimed the named cores; without names it only logs a warning when too few cores are free.
    """

    def __init__(self, name: str, torch_threads: int, cores: str = "") -> None:
        self.num_threads = torch_threads
        self._claim = CoreClaim(parse_cores(cores or "auto"), torch_threads)
        claimed = self._claim.cores
        if len(claimed) < torch_threads:
            what = f"{name}: {torch_threads} compute threads wanted, {len(claimed)} of cores {usable_cores()} are free"
            fewer = "have fewer workers on this machine (pools[].replicas)"
            fewer = f"lower engine.threads, or {fewer}" if torch_threads > 1 else fewer
            if cores:
                self._claim.release()
                raise ModelError(f"{what}; {fewer}, or widen engine.cores")
            logger.warning("%s: workers will slow each other down many times over; %s", what, fewer)
        self._cores = claimed if cores else ()
        # OpenMP's number of threads is per calling thread, so it must be set on this one.
        self._pool = ThreadPoolExecutor(1, name, initializer=self._settle)

    def _settle(self) -> None:
        if self._cores:
            os.sched_setaffinity(0, self._cores)  # of this thread; OpenMP's threads inherit it
        torch.set_num_threads(self.num_threads)

    async def run(self, work: Callable[[], T]) -> T:
        """The result of `work`. Cancelling the caller does not stop the work."""
        return await asyncio.get_running_loop().run_in_executor(self._pool, work)

    async def close(self) -> None:
        """Returns when all calls have ended."""
        await self.run(lambda: None)
        self._pool.shutdown()
        self._claim.release()
