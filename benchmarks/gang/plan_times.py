"""Wall time of an executor's plans and its ranks, measured around their calls, and the pipeline bubble.

The bubble is that of Huang et al., GPipe (NeurIPS'19).
"""

import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

from workers.engine.step import StepPlan, StepResult


@dataclass(frozen=True, slots=True)
class RankTime:
    """One rank's seconds with a plan, and of these the seconds in collectives and waiting for the previous stage."""

    seconds: float
    comm_s: float
    wait_s: float


@dataclass(frozen=True, slots=True)
class PlanTime:
    """A plan from its call to its result. `ranks` are in order of stages."""

    begun_s: float
    ended_s: float
    ranks: tuple[RankTime, ...]


class PlanRecorder:
    """Records every plan of this process' executor after `install`. `executor`: the last one that ran a plan."""

    def __init__(self) -> None:
        self.executor: Any = None
        self.plans: list[PlanTime] = []
        self._ranks: dict[int, dict[int, RankTime]] = {}  # id of a plan in flight -> rank -> its time

    def install(self, *, simulated: bool) -> None:
        executors: list[Any]
        ranks: list[Any]
        if simulated:
            from workers.executor.simulated import SimulatedExecutor

            executors, ranks = [SimulatedExecutor], []
        else:
            from workers.executor.gang import GangExecutor
            from workers.executor.rank import Rank
            from workers.executor.remote_rank import RemoteRank

            executors, ranks = [GangExecutor], [Rank, RemoteRank]
        for executor in executors:
            executor.execute = self._of_executor(executor.execute)
        for rank in ranks:
            rank.execute = self._of_rank(rank.execute)

    def _of_executor(self, execute: Callable[..., Awaitable[StepResult]]) -> Callable[..., Awaitable[StepResult]]:
        async def executed(executor: Any, plan: StepPlan) -> StepResult:
            self.executor = executor
            times = self._ranks.setdefault(id(plan), {})
            begun_s = time.perf_counter()
            result = await execute(executor, plan)
            ended_s = time.perf_counter()
            del self._ranks[id(plan)]
            # A simulated executor has no ranks: its stages share the plan's seconds.
            stage = RankTime(result.seconds / executor.depth, 0.0, 0.0)
            ranks = tuple(times[rank] for rank in sorted(times)) or (stage,) * executor.depth
            self.plans.append(PlanTime(begun_s, ended_s, ranks))
            return result

        return executed

    def _of_rank(self, execute: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
        alone = self._of_executor(execute)

        async def executed(rank: Any, plan: StepPlan) -> Any:
            if id(plan) not in self._ranks:  # no gang's executor has it: the rank is the executor
                return await alone(rank, plan)
            step = await execute(rank, plan)
            self._ranks[id(plan)][getattr(rank, "rank", 0)] = RankTime(step.seconds, step.comm_s, step.wait_s)
            return step

        return executed


def bubble_share(plans: Sequence[PlanTime], stages: int, since_s: float = float("-inf")) -> float:
    """1 - busy stage seconds / (stages * seconds with a plan in flight). Raises ValueError without plans.

    `since_s`: for plans from the middle of a run, the end of the plan before them.
    """
    if not plans:
        raise ValueError("no plan was executed")
    busy_s = covered_s = 0.0
    covered_to_s = since_s
    for plan in sorted(plans, key=lambda plan: plan.ended_s):
        covered_s += max(0.0, plan.ended_s - max(plan.begun_s, covered_to_s))
        covered_to_s = max(covered_to_s, plan.ended_s)
        tensor = len(plan.ranks) // stages
        parts = [plan.ranks[start : start + tensor] for start in range(0, len(plan.ranks), tensor)]
        busy_s += sum(max(rank.seconds - rank.wait_s for rank in part) for part in parts)
    return 1.0 - busy_s / (stages * covered_s)


def equal_parts_bubble(num_plans: int, stages: int) -> float:
    """The bubble of `num_plans` plans of equal cost on every stage: fill and drain."""
    return (stages - 1) / (num_plans + stages - 1)
