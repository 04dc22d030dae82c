"""Ranks of a gang as processes of this machine, for tests: without Ray, and with a failure at a given moment.

They fork from a server that has loaded torch, so that a rank starts in milliseconds.
"""

import asyncio
import multiprocessing
import os
import signal
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from multiprocessing.process import BaseProcess
from typing import Any

from workers.executor import rank, rank_loader, rank_server
from workers.executor.rank_spec import RankSpec
from workers.model.folder import ModelFolder
from workers.ops.collective import PointToPoint
from workers.ops.shared_sum import SharedSum

FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(["tests.model.rank_processes"])

MOMENTS = ("start", "join", "meet", "load", "opened", "warm-up", "in a step", "in a pull", "close")
STEP = 1  # the plan in which something happens "in a step"


@dataclass(frozen=True)
class Fate:
    """A signal that one rank's process sends itself at a given moment."""

    rank: int
    moment: str
    signal: signal.Signals


def run_rank(spec: RankSpec, folder: ModelFolder, fate: Fate | None, leader_silent_s: float) -> None:
    """A rank's process."""
    rank_server.LEADER_SILENT_S = leader_silent_s
    if fate is not None and fate.rank == spec.rendezvous.rank:
        _doom(fate)
    try:
        asyncio.run(rank_server.serve_rank(spec, lambda _: folder))
    finally:
        os._exit(0)


def _doom(fate: Fate) -> None:
    def before(owner: Any, name: str, when: Callable[..., bool] = lambda *_: True) -> None:
        method = getattr(owner, name)

        def doomed(*given: Any) -> Any:
            if when(*given):
                os.kill(os.getpid(), fate.signal)
            return method(*given)

        setattr(owner, name, doomed)

    def note(*given: Any) -> bool:
        computing[:] = [given[2].number]
        return False

    computing: list[int] = [0]
    match fate.moment:
        case "start":
            os.kill(os.getpid(), fate.signal)
        case "join":
            before(rank_server, "_join")
        case "meet":
            before(rank_loader._Loader, "load")
        case "load":
            before(rank_loader._Loader, "_load")
        case "opened":
            before(rank.Rank, "shard")
        case "warm-up":
            before(rank, "compute")
        case "in a step":
            before(rank, "compute", note)
            for owner, name in ((SharedSum, "__call__"), (PointToPoint, "receive"), (PointToPoint, "send")):
                before(owner, name, lambda *_: computing == [STEP])
        case "in a pull":
            before(rank.Rank, "pull")
        case "close":
            before(rank.Rank, "close")


@dataclass
class ProcessRanks:
    """`RankLauncher`. `ended` are the futures it gave."""

    folder: ModelFolder
    fate: Fate | None = None
    leader_silent_s: float = 30.0
    processes: list[BaseProcess] = field(default_factory=list)

    def launch(self, specs: Sequence[RankSpec]) -> Sequence[Awaitable[object]]:
        for spec in specs:
            given = (spec, self.folder, self.fate, self.leader_silent_s)
            process = FORKS.Process(target=run_rank, args=given, daemon=True)
            process.start()
            self.processes.append(process)
        return [ended(process) for process in self.processes]

    async def end(self) -> None:
        for process in self.processes:
            process.kill()


async def ended(process: BaseProcess) -> None:
    """Returns when the process has ended."""
    loop, gone = asyncio.get_running_loop(), asyncio.Event()
    loop.add_reader(process.sentinel, gone.set)
    try:
        await gone.wait()
    finally:
        loop.remove_reader(process.sentinel)
    process.join()


def lead(config: Any, folder: ModelFolder, pipe: Any, block_in_a_step: bool) -> None:
    """A leader's process: sends its rank specs to the process that runs the ranks, and a message once open."""
    from workers.executor.gang import open_gang

    class Elsewhere:
        def launch(self, specs: Sequence[RankSpec]) -> Sequence[Awaitable[object]]:
            pipe.send(list(specs))
            return [asyncio.get_running_loop().create_future() for _ in specs]

        async def end(self) -> None:
            """The owner of the pipe ends them."""

    def stopped(*_: object) -> Any:
        signal.pause()

    async def main() -> None:
        gang = await open_gang(config, folder, "w-1", Elsewhere())
        pipe.send("open")
        if block_in_a_step:
            compute: Any = stopped
            rank.compute = compute
            from tests.model.test_gang import plans

            await gang.execute(plans()[0])
        await asyncio.Event().wait()

    asyncio.run(main())
