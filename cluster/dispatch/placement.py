"""Which workers an attempt gets: the policy's answer, now or when its turn has come. Reads request states only."""

import asyncio
from collections.abc import Mapping
from dataclasses import replace

from cluster.dispatch.admission_queue import AdmissionQueue
from cluster.dispatch.discovery import WorkerDiscovery
from cluster.dispatch.request_state import Replacement, RequestState
from cluster.events import Rejected, Unservable
from cluster.policy.admission.classes import Classes
from cluster.policy.policy import Policy
from cluster.policy.routing.router import Ask, Later, Placement, Refusal
from cluster.spec import ClusterSpec, Role
from workers.request import Request

MOST_REPLACEMENTS = 3  # times that a prompt which has not begun is placed on other workers


class Placer:
    """Owned by a Dispatcher. `running`: its requests by id."""

    def __init__(
        self,
        spec: ClusterSpec,
        policy: Policy,
        admission_queue: AdmissionQueue,
        discovery: WorkerDiscovery,
        running: Mapping[str, RequestState],
    ) -> None:
        self._gateway = gateway = spec.gateway
        self.uncovered = {pool.role: 0 for pool in spec.pools if pool.role is not Role.MIXED}  # requests
        self._classes = Classes(gateway)
        self._policy = policy
        self._admission_queue = admission_queue
        self._discovery = discovery
        self._running = running

    async def place(self, state: RequestState) -> Placement:
        """Wait for workers that can serve the request, and tell the policy that it goes there.

        Raises `Rejected` when none came in time, or when the policy turns it away.
        """
        limit_s = self._gateway.placement_timeout_s
        if self._policy.queues and not state.request.attempt:
            limit_s += self._classes.of(state.request).patience_s
        try:
            async with asyncio.timeout(limit_s):
                while (placement := await self._valid_turn(state)) is None:
                    if state.avoid:
                        state.avoid.clear()
                        continue
                    self._refuse_unservable(state.request)
                    await self._discovery.change()
        except TimeoutError:
            nobody = self._policy.choose(self.ask(state)) is None
            what, cause = ("healthy worker", "no-worker") if nobody else ("turn came", "waited")
            raise Rejected(f"no {what} within {limit_s:.0f} s", retry_after_s=5.0, cause=cause) from None
        state.watch.lap("recovery" if state.request.attempt else "route")
        if isinstance(placement, Refusal):
            raise Rejected(placement.reason, placement.retry_after_s, "admission")
        self.count_uncovered(placement)
        return placement

    async def _valid_turn(self, state: RequestState) -> Placement | Refusal | None:
        """As `_turn`. Workers may leave between a turn and its coroutine: then it is taken back and asked again."""
        while isinstance(answer := await self._turn(state), Placement) and not self.is_there(answer):
            self._policy.ended(state.request.key, asyncio.get_running_loop().time())
            await asyncio.sleep(0)
        return answer

    async def _turn(self, state: RequestState) -> Placement | Refusal | None:
        """The policy's answer, now or when its turn has come. A placement has begun; None: nobody is ready."""
        if self._policy.queues and not state.request.attempt:
            return await self._admission_queue.turn(state.request, lambda: self.ask(state), state.emit)
        answer = self._policy.choose(ask := self.ask(state))
        assert not isinstance(answer, Later), "only first attempts wait, and in the admission queue"
        if isinstance(answer, Placement):
            self._policy.began(ask, answer)
            return self._policy.for_client(ask, answer)
        return answer

    def is_there(self, placement: Placement) -> bool:
        """Whether its workers can still be sent work."""
        workers = [self._discovery.clients.get(name) for name in (placement.prefill, placement.decode)]
        return all(worker is not None and worker.lost is None for worker in workers)

    def better(self, state: RequestState) -> Replacement | None:
        """Another attempt, for one whose prompt still waits; None: it stays. The policy has replaced it then."""
        if state.attempt is None or not state.attempt.is_waiting or state.request.group or state.stop.done():
            return None
        if state.replacement is not None or state.num_uncounted >= MOST_REPLACEMENTS:
            return None
        key, request = state.request.key, state.request.retry(tuple(state.sent), fresh=False)
        ask = replace(self.ask(state), request=request)
        placement = self._policy.better(ask, key)
        return None if placement is None else Replacement(request, self._policy.again(ask, key, placement))

    def count_uncovered(self, placement: Placement) -> None:
        """A request is served by workers of another role, since none of a pool's own is ready."""
        if placement.colocated:
            for role in self.uncovered:
                self.uncovered[role] += not self._discovery.has_ready(role, Role.MIXED)

    def ask(self, state: RequestState, *, alone: bool = True) -> Ask:
        request = state.request
        beside = self._beside(request.group) if request.group else ""
        now_s = asyncio.get_running_loop().time()
        waited_s = now_s - state.timing.arrived_s
        return Ask(
            self._discovery.picture(), request, self._discovery.sent(), state.avoid, alone, beside, now_s, waited_s
        )

    def _beside(self, group: str) -> str:
        """The worker that computes, or computed, the same prompt for another answer of this group."""
        placements = (each.placement for each in self._running.values() if each.request.group == group)
        return next((placement.prefill for placement in placements if placement), "")

    def may_go_on(self, state: RequestState) -> bool:
        """Whether an answer that ended by its length reached its worker's bound only, and another one can hold more."""
        most, num_tokens = state.request.sampling.max_tokens, len(state.request.prompt) + len(state.sent)
        if most is not None and len(state.sent) >= most:
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
