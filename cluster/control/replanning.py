"""When the load is no longer the one that was planned for, the planner is asked again: what the roles should be.

A shell beside the steward's: hears the same reports, asks every period whether the shape has moved for good, makes a
question of the latest requests and hands the answer on, as an aim of the elastic rule or as advice. Without an answer
the rule goes on by its closed forms. Knows no simulator: the planner is a port, in production another process.
"""

import asyncio
import logging
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle
from typing import Protocol, TypeVar

from cluster.control.changes import Taken
from cluster.control.supervised import Failures, supervised
from cluster.policy.scaling.evidence import Decision, Report
from cluster.policy.scaling.load_shift import Drift, Moved, Seen
from cluster.spec import ClusterSpec, Role
from diptych.view import ClusterView, WorkerState
from workers.request import SLO

logger = logging.getLogger(__name__)

T = TypeVar("T")
Counts = Mapping[tuple[str, Role], int]  # workers by pool and role

LIMIT_S = 120.0  # for one answer of the planner
REMEMBERED = 16
ADVISED, UNDER_WAY, DONE = "advised", "under way", "done"


class PlanFailed(Exception):
    """There is no plan; the message says why."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """A request as it was seen. `at_s` counts from the first."""

    at_s: float
    prompt_tokens: int
    computed_tokens: int
    output_tokens: int


@dataclass(frozen=True, slots=True)
class Question:
    """Which roles should the workers in `counts` have, under `requests` at `rate` a second and promised `slo`?

    `kv_token_bytes` by pool. It goes to another process.
    """

    spec: ClusterSpec
    counts: Counts
    kv_token_bytes: Mapping[str, int]
    requests: tuple[Wanted, ...]
    rate: float
    slo: SLO


@dataclass(frozen=True, slots=True)
class Planned:
    """`attained`: the share of requests that keep both promises with `counts`; `attained_now` with the roles as they
    were. From `simulated` requests.
    """

    counts: Counts
    attained: float
    attained_now: float
    simulated: int


class Planner(Protocol):
    """Errors: `PlanFailed`. A call that is cancelled leaves nothing behind."""

    async def roles(self, question: Question) -> Planned: ...

    async def fleet(self, question: Question) -> str:
        """What other cuts of the model, or fewer or more GPUs, would do, in words; empty: nothing better is known."""
        ...


class Aimed(Protocol):
    """Who takes the steps: see `cluster.policy.scaling.elastic.Elastic`."""

    @property
    def aims(self) -> bool: ...
    def aim(self, counts: Counts | None, reason: str) -> None: ...


@dataclass(slots=True)
class _Entry:
    decision: Decision
    at_s: float
    outcome: str
    counts: Counts | None = None


class Replanner:
    """Owned by the Controller. `look` gives its view; `aimed` None: plans are advice."""

    def __init__(
        self, spec: ClusterSpec, planner: Planner, look: Callable[[], ClusterView], aimed: Aimed | None
    ) -> None:
        elastic = spec.elastic
        self._spec = spec
        self._planner = planner
        self._look = look
        self._aimed = aimed
        self._drift = Drift(elastic.window_s, elastic.replan_after_s, spec.gateway.slo)
        self._limit_s = limit_s(spec)
        self._entries: deque[_Entry] = deque(maxlen=REMEMBERED)
        self._task: asyncio.Task[None] | None = None

    def begin(self, failures: Failures) -> None:
        self._task = asyncio.ensure_future(supervised("judging the load", self._round, failures))

    def close(self) -> None:
        if self._task is not None:
            self._task.cancel()

    def told(self, report: Report) -> None:
        """What one gateway saw lately."""
        self._drift.told(report, asyncio.get_running_loop().time())

    def taken(self) -> tuple[Taken, ...]:
        """The latest plans, the last one last."""
        now_s = asyncio.get_running_loop().time()
        return tuple(Taken(each.decision, now_s - each.at_s, each.outcome) for each in self._entries)

    async def _round(self) -> None:
        await asyncio.sleep(self._spec.elastic.period_s)
        self._follow()
        moved = self._drift.moved(asyncio.get_running_loop().time())
        if moved is not None:
            await self._replan(moved)

    async def _replan(self, moved: Moved) -> None:
        self._drift.tried(asyncio.get_running_loop().time())
        self._drop("the load changed again")
        logger.info("the load has changed, and the planner is asked: %s", moved)
        try:
            question = self._question(moved)
            planned = await self._in_time(self._planner.roles(question))
            _refuse_misfits(planned.counts, counted(self._look()))
        except PlanFailed as error:
            logger.warning("no plan, and roles follow the load as before: %s", error)
            self._note(Decision("plan", str(moved)), f"failed: {error}")
            self._drift.tried(asyncio.get_running_loop().time())
            return
        self._drift.planned(moved.after, asyncio.get_running_loop().time())
        reason = told(planned, question.counts)
        logger.info("planned: %s; %s", reason, moved)
        self._note(
            Decision("plan", f"{reason}; {moved}"), ADVISED if self._aimed is None else UNDER_WAY, planned.counts
        )
        if self._aimed is not None:
            self._aimed.aim(planned.counts, reason)
        if not any(pool.hardware for pool in self._spec.pools):
            return  # nobody knows what another fleet would do
        try:
            if advice := await self._in_time(self._planner.fleet(question)):
                logger.info("advised: %s", advice)
                self._note(Decision("plan", advice), ADVISED)
        except PlanFailed as error:
            logger.info("whether another fleet would do better is not known: %s", error)

    async def _in_time(self, asked: Awaitable[T]) -> T:
        """Raises `PlanFailed` for whatever goes wrong there."""
        try:
            async with asyncio.timeout(self._limit_s):
                return await asked
        except TimeoutError:
            raise PlanFailed(f"the planner did not answer within {self._limit_s:.0f} s") from None
        except PlanFailed:
            raise
        except Exception as error:
            raise PlanFailed(f"{type(error).__name__}: {error}") from error

    def _question(self, moved: Moved) -> Question:
        view = self._look()
        slo = moved.after.slo
        if slo.ttft_s is None and slo.tpot_s is None:
            raise PlanFailed("requests were promised nothing; set gateway.slo")
        kv = {worker.pool: worker.kv_token_bytes for worker in view.workers if worker.kv_token_bytes}
        return Question(self._spec, counted(view), kv, _requests(self._drift.recent()), moved.after.rate, slo)

    def _follow(self) -> None:
        """Whether the roles are those of the plan by now."""
        entry = next((each for each in self._entries if each.outcome == UNDER_WAY), None)
        if entry is None or self._aimed is None:
            return
        if counted(self._look()) == entry.counts:
            entry.outcome = DONE
            logger.info("the roles are as planned")
        elif not self._aimed.aims:
            self._end(entry, "steps elsewhere did much better, or none led on")

    def _drop(self, why: str) -> None:
        """The last plan is no longer one."""
        if self._aimed is None:
            return
        self._aimed.aim(None, "")
        for entry in self._entries:
            if entry.outcome == UNDER_WAY:
                self._end(entry, why)

    def _end(self, entry: _Entry, why: str) -> None:
        entry.outcome = f"failed: {why}"
        logger.warning("the plan is given up: %s", why)

    def _note(self, decision: Decision, outcome: str, counts: Counts | None = None) -> None:
        self._entries.append(_Entry(decision, asyncio.get_running_loop().time(), outcome, counts))


def limit_s(spec: ClusterSpec) -> float:
    """For one answer of the planner: no later than the next question."""
    return min(LIMIT_S, spec.elastic.replan_after_s)


def counted(view: ClusterView) -> Counts:
    """Ready workers by pool and role; nothing for roles that nobody has."""
    return dict(Counter((each.pool, each.role) for each in view.workers if each.state is WorkerState.READY))


def told(planned: Planned, now: Counts) -> str:
    """`prefill 2, decode 1, mixed 0 would keep 94 % instead of 71 %`, with the pools where there are several."""
    words = ", ".join(f"{role.value} {sum(_of_role(planned.counts, role))}" for role in _ROLES)
    pools = list(dict.fromkeys(pool for pool, _ in planned.counts))
    if len(pools) > 1:
        words += f" ({'; '.join(_in_pool(planned.counts, pool) for pool in pools)})"
    if planned.counts == now:
        return f"{words}, as it is, keeps {planned.attained:.0%}"
    return f"{words} would keep {planned.attained:.0%} instead of {planned.attained_now:.0%}"


_ROLES = (Role.PREFILL, Role.DECODE, Role.MIXED)


def _of_role(counts: Counts, role: Role) -> list[int]:
    return [count for (_, each), count in counts.items() if each is role]


def _in_pool(counts: Counts, pool: str) -> str:
    parts = (f"{count} {role.value}" for role in _ROLES if (count := counts.get((pool, role), 0)))
    return f"{pool}: {', '.join(parts)}"


def _refuse_misfits(planned: Counts, now: Counts) -> None:
    """Raises `PlanFailed` for a plan of other workers than there are."""
    for pool in dict.fromkeys(pool for pool, _ in (*planned, *now)):
        wanted, there = (sum(count for (each, _), count in counts.items() if each == pool) for counts in (planned, now))
        if wanted != there:
            raise PlanFailed(f"it is for {wanted} workers of pool {pool}, and there are {there} now")


def _requests(seen: Sequence[Seen]) -> tuple[Wanted, ...]:
    """Who was turned away wanted an answer too: as long as those of others were, in turn, and as much of it cached."""
    served = [each.sample for each in seen if each.sample.output_tokens]
    if not served:
        raise PlanFailed("nobody was served, so nothing is known of answers")
    others, made = cycle(served), []
    for each in seen:
        sample = each.sample
        like = next(others) if sample.refused or not sample.output_tokens else sample
        computed = round(sample.prompt_tokens * like.computed_tokens / max(1, like.prompt_tokens))
        lengths = sample.prompt_tokens, max(1, computed), like.output_tokens
        made.append(Wanted(each.arrived_s - seen[0].arrived_s, *lengths))
    return tuple(made)
