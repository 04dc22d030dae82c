"""The planner as a process of its own, one for each question: it may take long, take memory, or die, and the caller
goes on. The question goes in as a pickle, the answer comes back as a line of JSON; what searches is a module that the
process is started with, and which nothing here imports.
"""

import asyncio
import os
import pickle
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from cluster.control.replanning import LIMIT_S, PlanFailed, Planned, Question
from cluster.spec import Role

MODULE = "cluster.offline.plan.child"
MEMORY_BYTES = 2 << 30  # of address space
NICENESS = 10
ONE_THREAD = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}


@dataclass(frozen=True, slots=True)
class Order:
    """What a process is to do. `what` is "roles" or "fleet". It ends itself at its limits, whoever is still there."""

    what: str
    question: Question
    limit_s: float
    memory_bytes: int
    niceness: int


class Answer(msgspec.Struct, frozen=True):
    """One of these. `counts` are (pool, role, workers)."""

    failed: str = ""
    words: str = ""
    counts: tuple[tuple[str, Role, int], ...] = ()
    attained: float = 0.0
    attained_now: float = 0.0
    simulated: int = 0

    @classmethod
    def of(cls, planned: Planned) -> "Answer":
        counts = tuple((pool, role, count) for (pool, role), count in planned.counts.items())
        return cls("", "", counts, planned.attained, planned.attained_now, planned.simulated)

    @property
    def planned(self) -> Planned:
        counts = {(pool, role): count for pool, role, count in self.counts}
        return Planned(counts, self.attained, self.attained_now, self.simulated)


class ChildPlanner:
    """See `cluster.control.replanning.Planner`. A call that is cancelled ends its process."""

    def __init__(
        self,
        module: str = MODULE,
        memory_bytes: int = MEMORY_BYTES,
        limit_s: float = LIMIT_S,
        niceness: int = NICENESS,
    ) -> None:
        self._module = module
        self._memory_bytes = memory_bytes
        self._limit_s = limit_s
        self._niceness = niceness

    async def roles(self, question: Question) -> Planned:
        return (await self._ask("roles", question)).planned

    async def fleet(self, question: Question) -> str:
        return (await self._ask("fleet", question)).words

    async def _ask(self, what: str, question: Question) -> Answer:
        order = Order(what, question, self._limit_s, self._memory_bytes, self._niceness)
        pipe = asyncio.subprocess.PIPE
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", self._module), stdin=pipe, stdout=pipe, env=_environment(os.environ)
        )
        try:
            assert process.stdin is not None and process.stdout is not None
            process.stdin.write(pickle.dumps(order))
            process.stdin.close()
            line = await process.stdout.readline()
            ended = await process.wait()
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
        return _read(line, ended)


def _environment(own: Mapping[str, str]) -> dict[str, str]:
    """It finds what this process found, and computes on one core."""
    return {**own, **ONE_THREAD, "PYTHONPATH": os.pathsep.join(each or os.getcwd() for each in sys.path)}


def _read(line: bytes, ended: int) -> Answer:
    try:
        answer = msgspec.json.decode(line, type=Answer)
    except msgspec.DecodeError:
        how = f"by signal {-ended}" if ended < 0 else f"with status {ended}"
        raise PlanFailed(f"the planner's process ended {how} and without an answer") from None
    if answer.failed:
        raise PlanFailed(answer.failed)
    return answer


def encoded(answer: Answer) -> bytes:
    """As the process writes it."""
    return msgspec.json.encode(answer) + b"\n"


def order_from(document: bytes) -> Order:
    """As the process reads it. Only of a parent's pipe: a pickle can do anything."""
    order: Any = pickle.loads(document)
    assert isinstance(order, Order), f"the parent sent {type(order).__name__}"
    return order
