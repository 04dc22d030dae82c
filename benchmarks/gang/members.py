"""The other ranks of a measured gang, each a process: `RankLauncher`, and the program that it starts.

A rank that computes nothing loads and answers like any other; only the model is never asked.
"""

import asyncio
import ctypes
import signal
import subprocess
import sys
from collections.abc import Awaitable, Sequence
from typing import Any

import msgspec

from workers.engine.step import StepPlan
from workers.executor.rank_spec import RankSpec

END_TIMEOUT_S = 5.0
PR_SET_PDEATHSIG = 1


class Member(msgspec.Struct, frozen=True):
    """What one rank's process reads before it starts."""

    spec: RankSpec
    computes: bool


class ProcessRanks:
    """`RankLauncher` by programs of this machine; they end with the process that started them."""

    def __init__(self, computes: bool) -> None:
        self._computes = computes
        self._started: list[subprocess.Popen[bytes]] = []

    def launch(self, specs: Sequence[RankSpec]) -> Sequence[Awaitable[object]]:
        for spec in specs:
            process = subprocess.Popen([sys.executable, "-m", "benchmarks.gang.members"], stdin=subprocess.PIPE)
            assert process.stdin is not None
            process.stdin.write(msgspec.msgpack.encode(Member(spec, self._computes)))
            process.stdin.close()
            self._started.append(process)
        return [asyncio.ensure_future(asyncio.to_thread(process.wait)) for process in self._started]

    async def end(self) -> None:
        """They end when their leader hangs up; one that does not is killed after a while."""
        for process in self._started:
            try:
                await asyncio.to_thread(process.wait, END_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                process.kill()


def compute_nothing() -> None:
    """From now on, plans of this process' rank cost nothing: every chunk that draws gets its own last token."""
    from workers.executor import rank

    module: Any = rank

    def answered(*given: object) -> rank.RankStep:
        (plan,) = (each for each in given if isinstance(each, StepPlan))
        tokens = tuple(None if chunk.draw is None else chunk.tokens[-1] for chunk in plan.chunks)
        return rank.RankStep(tokens, (None,) * len(tokens), (), 0.0)

    module.compute = answered


def main() -> None:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    member = msgspec.msgpack.decode(sys.stdin.buffer.read(), type=Member)
    if not member.computes:
        compute_nothing()
    from workers.build import serve_rank

    asyncio.run(serve_rank(member.spec))


if __name__ == "__main__":
    main()
