"""Chooses the workers of an attempt: the policy's answer, at once or after a wait in the admission queue.

Takes and returns values; knows no running request.
"""

import asyncio
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace

from cluster.dispatch.admission_queue import AdmissionQueue
from cluster.dispatch.discovery import WorkerDiscovery
from cluster.events import Event, Rejected, Unservable
from cluster.policy.admission.classes import Classes
from cluster.policy.policy import Policy
from cluster.policy.routing.router import Enqueue, Placement, PlacementQuery, Refusal
from cluster.spec import ClusterSpec, Role
from workers.request import Request


@dataclass(frozen=True, slots=True)
class PlacementInput:
    """The request-specific input of a placement. `avoid`: workers that failed or refused the request."""

    request: Request
    arrived_s: float
    avoid: frozenset[str]


class Placer:
    """Owned by a RequestRunner. `sibling_worker` returns the prefill worker of another answer of a group, or ""."""

    def __init__(
        self,
        spec: ClusterSpec,
        policy: Policy,
        admission_queue: AdmissionQueue,
        discovery: WorkerDiscovery,
        sibling_worker: Callable[[str], str],
    ) -> None:
        self._gateway = gateway = spec.gateway
        self._stats_s = spec.health.heartbeat_s
        self.fallbacks = {pool.role: 0 for pool in spec.pools if pool.role is not Role.MIXED}  # requests
        self._classes = Classes(gateway)
        self._policy = policy
        self._admission_queue = admission_queue
        self._discovery = discovery
        self._sibling_worker = sibling_worker

    async def place(
        self, given: PlacementInput, emit: Callable[[Event], None]
    ) -> tuple[Placement | Refusal, frozenset[str]]:
        """Wait for workers that can serve the request. Returns the answer, and the workers to avoid from now on.

        Avoided workers are used again when no other worker is ready. A placement is recorded with the policy.
        Raises `Rejected` when no worker is ready in time, `Unservable` when the prompt fits on no worker.
        """
        limit_s = self._gateway.placement_timeout_s
        if self._waits_in_queue(given.request):
            limit_s += self._classes.of(given.request).patience_s
        try:
            async with asyncio.timeout(limit_s):
                while (answer := await self._live_answer(given, emit)) is None:
                    if given.avoid:
                        given = replace(given, avoid=frozenset())
                        continue
                    self._refuse_unservable(given.request)
                    await self._change(given.request)
        except TimeoutError:
            what, cause = "turn came", "waited"
            if self._waits_for_memory(given.request):
                what = "memory on several workers"
            elif self._policy.choose(self.query(given)) is None:
                what, cause = "healthy worker", "no-worker"
            raise Rejected(f"no {what} within {limit_s:.0f} s", retry_after_s=5.0, cause=cause) from None
        if isinstance(answer, Placement):
            self.count_fallback(answer)
        return answer, given.avoid

    async def _change(self, request: Request) -> None:
        """Wait for a change of the membership, or, where a request waits for the memory of several workers, for new
        statistics.
        """
        with suppress(TimeoutError):
            async with asyncio.timeout(self._stats_s if self._waits_for_memory(request) else None):
                await self._discovery.change()

    def _waits_for_memory(self, request: Request) -> bool:
        """Whether only several workers together can hold it."""
        return 0 < self._largest_alone() <= request.num_tokens

    async def _live_answer(self, given: PlacementInput, emit: Callable[[Event], None]) -> Placement | Refusal | None:
        """Like `_answer`, but asks again if a worker was lost before this coroutine continued."""
        while isinstance(answer := await self._answer(given, emit), Placement) and not self.is_live(answer):
            self._policy.ended(given.request.key, asyncio.get_running_loop().time())
            await asyncio.sleep(0)
        return answer

    async def _answer(self, given: PlacementInput, emit: Callable[[Event], None]) -> Placement | Refusal | None:
        """The policy's answer, after a wait in the queue if necessary. None: no worker is ready."""
        if self._waits_in_queue(given.request):
            return await self._admission_queue.admit(given.request, lambda: self.query(given), emit)
        answer = self._policy.choose(query := self.query(given))
        assert not isinstance(answer, Enqueue), "only first attempts wait, and in the admission queue"
        if isinstance(answer, Placement):
            self._policy.began(query, answer)
            return self._policy.for_client(query, answer)
        return answer

    def _waits_in_queue(self, request: Request) -> bool:
        return self._policy.queues and not request.attempt

    def is_live(self, placement: Placement) -> bool:
        """Whether its workers are still connected."""
        workers = [self._discovery.clients.get(name) for name in (placement.prefill, placement.decode)]
        return all(worker is not None and worker.lost is None for worker in workers)

    def better(self, given: PlacementInput, key: str) -> Placement | None:
        """Better workers for a prompt that still waits, or None. In the policy, they replace the attempt `key`."""
        placement = self._policy.requeue.better_placement(query := self.query(given), key, self._policy.choose)
        return None if placement is None else self._policy.replace(query, key, placement)

    def count_fallback(self, placement: Placement) -> None:
        """Count a request that runs on workers of another role because no worker of its role is ready."""
        if placement.colocated:
            for role in self.fallbacks:
                self.fallbacks[role] += not self._discovery.has_ready(role, Role.MIXED)

    def query(self, given: PlacementInput, *, may_colocate: bool = True) -> PlacementQuery:
        request, now_s = given.request, asyncio.get_running_loop().time()
        return PlacementQuery(
            view=self._discovery.routing_view(),
            request=request,
            sent=self._discovery.sent(),
            avoid=given.avoid,
            may_colocate=may_colocate,
            sibling_worker=self._sibling_worker(request.group) if request.group else "",
            now_s=now_s,
            waited_s=now_s - given.arrived_s,
        )

    def has_more_room(self, num_tokens: int) -> bool:
        """Whether some worker, or several together, can hold a sequence of more than `num_tokens`."""
        return self._largest() > num_tokens

    def _largest(self) -> int:
        return max(self._discovery.together(), self._largest_alone())

    def _largest_alone(self) -> int:
        return max((worker.capacity_tokens for worker in self._discovery.sized()), default=0)

    def _refuse_unservable(self, request: Request) -> None:
        largest = self._largest()
        if not all(worker.capacity_tokens for worker in self._discovery.sized()):
            return  # it is not known yet
        if largest and request.num_tokens >= largest:
            who = (
                f"the workers hold {largest} together"
                if self._discovery.together()
                else f"the largest worker holds {largest}"
            )
            raise Unservable(f"prompt: has {request.num_tokens} tokens; {who}, with the answer")
