"""Which workers an attempt gets: the policy's answer, now or when its turn has come, and again while it has not begun.

Knows lines as names, and no worker's words.
"""

import asyncio
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from cluster.dispatch.admission_queue import AdmissionQueue
from cluster.dispatch.attempt import Attempt, Phase
from cluster.dispatch.discovery import WorkerDiscovery
from cluster.events import Completed, Event, Rejected, Unservable
from cluster.observe.ledger import Stopwatch
from cluster.observe.request_timing import RequestTiming
from cluster.policy.admission.classes import Classes
from cluster.policy.policy import Policy
from cluster.policy.routing.router import Ask, Later, Placement, Refusal
from cluster.spec import ClusterSpec, Role
from kvtransfer.ticket import TransferReport
from workers.log_fields import log_fields
from workers.request import FinishReason, Request

logger = logging.getLogger(__name__)

MOST_ANEW = 3  # times that a prompt which has not begun is placed anew
WORTH_TELLING_S = 0.001  # workers are told of a longer wait, lest they take a deadline for later than it is


class PlacedAnew(Exception):
    """The attempt had not begun, and another one has been placed: nothing failed."""


@dataclass(slots=True)
class Life:
    """One request's locals, seen also by `finish`."""

    request: Request
    watch: Stopwatch
    emit: Callable[[Event], None]
    timing: RequestTiming
    stop: asyncio.Future[None] = field(default_factory=lambda: asyncio.get_running_loop().create_future())
    sent: list[int] = field(default_factory=list)
    transfers: list[TransferReport] = field(default_factory=list)
    avoid: set[str] = field(default_factory=set)  # workers that failed or refused this request
    cached_tokens: int = 0
    placement: Placement | None = None  # the latest
    attempt: Attempt | None = None  # the one that runs
    anew: tuple[Request, Placement] | None = None  # the attempt that comes instead, begun with the policy
    placed_anew: asyncio.Event = field(default_factory=asyncio.Event)
    num_anew: int = 0
    decode_workers: tuple[str, ...] = ()  # of the latest attempt
    moves: list[tuple[int, str]] = field(default_factory=list)  # when its decode moved (ns), and to whom
    num_counted: int = 0  # transfers of the attempt that runs
    phase: Phase = Phase.QUEUEING
    finish: FinishReason | None = None
    completed: Completed | None = None
    error: BaseException | None = None


class Placing:
    """Owned by a Dispatcher, whose `lives` it reads."""

    def __init__(
        self,
        spec: ClusterSpec,
        policy: Policy,
        admission_queue: AdmissionQueue,
        roster: WorkerDiscovery,
        lives: Mapping[str, Life],
    ) -> None:
        self._gateway = gateway = spec.gateway
        self.uncovered = {pool.role: 0 for pool in spec.pools if pool.role is not Role.MIXED}  # requests
        self._classes = Classes(gateway)
        self._policy = policy
        self._admission_queue = admission_queue
        self._discovery = roster
        self._lives = lives

    async def place(self, life: Life) -> Placement:
        """Wait for workers that can serve the request, and tell the policy that it goes there.

        Raises `Rejected` when none came in time, or when the policy turns it away.
        """
        limit_s = self._gateway.placement_timeout_s
        if self._policy.queues and not life.request.attempt:
            limit_s += self._classes.of(life.request).patience_s
        try:
            async with asyncio.timeout(limit_s):
                while (placement := await self._standing_turn(life)) is None:
                    if life.avoid:
                        life.avoid.clear()
                        continue
                    self._refuse_unservable(life.request)
                    await self._discovery.change()
        except TimeoutError:
            nobody = self._policy.choose(self.ask(life)) is None
            what, cause = ("healthy worker", "no-worker") if nobody else ("turn came", "waited")
            raise Rejected(f"no {what} within {limit_s:.0f} s", retry_after_s=5.0, cause=cause) from None
        life.watch.lap("recovery" if life.request.attempt else "route")
        if isinstance(placement, Refusal):
            raise Rejected(placement.reason, placement.retry_after_s, "admission")
        return self._placed(life, placement)

    async def _standing_turn(self, life: Life) -> Placement | Refusal | None:
        """As `_turn`. Workers may leave between a turn and its coroutine: then it is taken back and asked again."""
        while isinstance(answer := await self._turn(life), Placement) and not self._is_there(answer):
            self._policy.ended(life.request.key, asyncio.get_running_loop().time())
            await asyncio.sleep(0)
        return answer

    def _is_there(self, placement: Placement) -> bool:
        lines = [self._discovery.lines.get(name) for name in (placement.prefill, placement.decode)]
        return all(line is not None and line.lost is None for line in lines)

    def anew(self, key: str) -> bool:
        """Give up an attempt whose prompt waits, for one on other workers; False when it stays where it is."""
        life = self.find(key)
        if life is None or life.attempt is None or not life.attempt.is_waiting or life.request.group:
            return False
        if life.stop.done() or life.anew is not None or life.num_anew >= MOST_ANEW:
            return False
        ask = replace(self.ask(life), request=life.request.retry(tuple(life.sent), fresh=False))
        placement = self._policy.better(ask, key)
        if placement is None:
            return False
        told = log_fields(key=key, worker=placement.prefill)
        logger.info("%s has not begun, and goes to %s: %s", key, placement.prefill, placement.reason, extra=told)
        life.anew = ask.request, self._policy.again(ask, key, placement)
        life.num_anew += 1
        life.attempt.release()  # from now on nothing is heard of it
        life.placed_anew.set()
        return True

    def placed_before(self, life: Life) -> Placement | None:
        """The attempt that was placed instead of one that had not begun, if its workers are still there."""
        if life.anew is None:
            return None
        (life.request, placement), life.anew = life.anew, None
        life.placed_anew.clear()
        if not self._is_there(placement):
            self._policy.ended(life.request.key, asyncio.get_running_loop().time())
            return None
        return self._placed(life, placement)

    def _placed(self, life: Life, placement: Placement) -> Placement:
        self._count_uncovered(placement)
        life.placement, now_s = placement, asyncio.get_running_loop().time()
        life.timing.placed(placement, now_s)
        if (waited_s := now_s - life.timing.arrived_s) > WORTH_TELLING_S:
            life.request = replace(life.request, waited_s=waited_s)
        return placement

    def _count_uncovered(self, placement: Placement) -> None:
        """A request is served by workers of another role, since none of a pool's own is ready."""
        if placement.colocated:
            for role in self.uncovered:
                self.uncovered[role] += not self._discovery.has_ready(role, Role.MIXED)

    async def _turn(self, life: Life) -> Placement | Refusal | None:
        """The policy's answer, now or when its turn has come. A placement has begun; None: nobody is ready."""
        if self._policy.queues and not life.request.attempt:
            return await self._admission_queue.turn(life.request, lambda: self.ask(life), life.emit)
        answer = self._policy.choose(ask := self.ask(life))
        assert not isinstance(answer, Later), "only first attempts wait, and in the admission_queue"
        if isinstance(answer, Placement):
            self._policy.began(ask, answer)
            return self._policy.for_client(ask, answer)
        return answer

    def find(self, key: str) -> Life | None:
        """Whose attempt has this key now."""
        life = self._lives.get(key.partition("/")[0])
        return life if life is not None and life.request.key == key else None

    def ask(self, life: Life, *, alone: bool = True) -> Ask:
        request = life.request
        beside = self._beside(request.group) if request.group else ""
        now_s = asyncio.get_running_loop().time()
        waited_s = now_s - life.timing.arrived_s
        return Ask(
            self._discovery.picture(), request, self._discovery.sent(), life.avoid, alone, beside, now_s, waited_s
        )

    def _beside(self, group: str) -> str:
        """The worker that computes, or computed, the prompt of a sibling."""
        placements = (each.placement for each in self._lives.values() if each.request.group == group)
        return next((placement.prefill for placement in placements if placement), "")

    def may_go_on(self, life: Life) -> bool:
        """Whether an answer that ended by its length reached its worker's bound only, and another one can hold more."""
        most, num_tokens = life.request.sampling.max_tokens, len(life.request.prompt) + len(life.sent)
        if most is not None and len(life.sent) >= most:
            return False
        return any(member.view.capacity_tokens > num_tokens for member in self._discovery.membership.members)

    def _refuse_unservable(self, request: Request) -> None:
        capacities = [
            member.view.capacity_tokens for member in self._discovery.membership.members if member.view.capacity_tokens
        ]
        if capacities and request.num_tokens >= max(capacities):
            raise Unservable(
                f"prompt: has {request.num_tokens} tokens; the largest worker holds {max(capacities)} with the answer"
            )
