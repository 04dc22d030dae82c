"""The other ranks of a measured gang, one process each: the `RankLauncher` and the program that it starts.

A rank that computes nothing loads its weights and answers as usual, without running the model.
"""

import asyncio
import ctypes
import signal
import subprocess
import sys
from collections.abc import Awaitable, Sequence
from typing import Any

import msgspec

from workers.engine.step import StepPlan, StepResult
from workers.executor.rank_spec import RankSpec

END_TIMEOUT_S = 5.0
PR_SET_PDEATHSIG = 1


class RankProcessSpec(msgspec.Struct, frozen=True):
    """What a rank's process reads from its input at start."""

    spec: RankSpec
    computes: bool


class ProcessRanks:
    """A `RankLauncher` that starts local processes; they end with their parent."""

    def __init__(self, computes: bool) -> None:
        self._computes = computes
        self._started: list[subprocess.Popen[bytes]] = []

    def launch(self, specs: Sequence[RankSpec]) -> Sequence[Awaitable[object]]:
        for spec in specs:
            process = subprocess.Popen([sys.executable, "-m", "benchmarks.gang.rank_process"], stdin=subprocess.PIPE)
            assert process.stdin is not None
            process.stdin.write(msgspec.msgpack.encode(RankProcessSpec(spec, self._computes)))
            process.stdin.close()
            self._started.append(process)
        return [asyncio.ensure_future(asyncio.to_thread(process.wait)) for process in self._started]

    async def end(self) -> None:
        """Wait for the ranks, which end when their leader disconnects; kill them after `END_TIMEOUT_S`."""
        for process in self._started:
            try:
                await asyncio.to_thread(process.wait, END_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                process.kill()


def compute_nothing() -> None:
    """Patch this process' rank so that a plan costs nothing: every sampled token is the chunk's last one."""
    from workers.executor import rank

    module: Any = rank

    def compute(*arguments: object) -> StepResult:
        (plan,) = (each for each in arguments if isinstance(each, StepPlan))
        tokens = tuple(None if chunk.draw is None else chunk.tokens[-1] for chunk in plan.chunks)
        return StepResult(plan.number, tokens, (None,) * len(tokens), ((),), 0.0)

    module.compute = compute


def main() -> None:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    member = msgspec.msgpack.decode(sys.stdin.buffer.read(), type=RankProcessSpec)
    if not member.computes:
        compute_nothing()
    from workers.build import serve_rank

    asyncio.run(serve_rank(member.spec))


if __name__ == "__main__":
    main()
