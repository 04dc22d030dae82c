"""The admission queue of one gateway: requests wait until the policy admits them. The async shell of `RequestQueue`.

    admit ── policy.choose ──> Placement, Refusal or None: returns at once
            └ Enqueue ──> enters the queue, `Queued` to the client ──> asks the policy again, in order, on changes

A change is the end of a request, a computed prompt, a new membership, or the earliest predicted start. An admitted
request is sent to its workers before the policy is asked about the next one.
"""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace

from cluster.events import Event, Queued, Rejected
from cluster.policy.admission.queue import QueuedRequest, RequestQueue
from cluster.policy.policy import Policy
from cluster.policy.routing.router import Enqueue, Placement, PlacementQuery, Refusal
from cluster.spec import GatewaySpec, Role
from diptych.view import ClusterView
from workers.request import Request

ASKED_AT_ONCE = 4  # requests at the head that may be overtaken while they do not fit
TOLERANCE = 1.3  # predicted waits are rough: refuse a request only if its TTFT is this many times its SLO
RECHECK_S = 1.0  # room that other gateways' requests free shows only in statistics

Answer = Placement | Refusal | None


@dataclass(slots=True, eq=False)
class _Waiting:
    """A queued request. `make_query` returns the current query to the policy; `answer` is awaited by its coroutine."""

    entry: QueuedRequest
    make_query: Callable[[], PlacementQuery]
    answer: asyncio.Future[Answer]
    was_overdue: bool = False  # admitted because it had waited for too long


class AdmissionQueue:
    """Owned by a Dispatcher. `stats_s`: interval of statistics. `change`: wait for the next membership."""

    def __init__(
        self, gateway: GatewaySpec, policy: Policy, stats_s: float, change: Callable[[], Awaitable[object]]
    ) -> None:
        self.queue = RequestQueue(gateway, policy.expected_tokens)
        self._policy = policy
        self._stats_s = stats_s
        self._change = change
        self._waiting: dict[QueuedRequest, _Waiting] = {}
        self._round_due: asyncio.Handle | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._watching: asyncio.Task[None] | None = None

    async def close(self) -> None:
        """Stop. All requests have ended before."""
        for handle in (self._round_due, self._timer):
            if handle is not None:
                handle.cancel()
        if self._watching is not None:
            self._watching.cancel()
            await asyncio.wait([self._watching])

    async def admit(
        self, request: Request, make_query: Callable[[], PlacementQuery], emit: Callable[[Event], None]
    ) -> Answer:
        """Wait for the policy's answer. A placement is recorded with the policy. None: no worker is ready.

        Raises `Rejected` if the queue is full. Cancellation removes the request from the queue.
        """
        answer = self._policy.choose(query := make_query())
        if answer is None or isinstance(answer, Refusal):
            return answer
        if isinstance(answer, Placement) and (query.sibling_worker or self.queue.outranks(request, query.now_s)):
            return self._begin(query, answer)
        waiting = self._enter(request, query, answer, make_query)
        try:
            self._round()
            if not waiting.answer.done():
                queued = self._queued(waiting.entry, query, answer)
                if refusal := _predicted_miss(request, waiting.entry, queued):
                    self._resolve(waiting).set_result(refusal)
                else:
                    emit(queued)
            return await waiting.answer
        except BaseException:
            self._cancel(waiting, request)
            raise
        finally:
            self._left(waiting)

    def changed(self) -> None:
        """Room may have become free: start a round soon."""
        if self._waiting and self._round_due is None:
            self._round_due = asyncio.get_running_loop().call_soon(self._round)

    # ---- entries -----------------------------------------------------------------------------------------------

    def _enter(
        self,
        request: Request,
        query: PlacementQuery,
        answer: Placement | Enqueue,
        make_query: Callable[[], PlacementQuery],
    ) -> _Waiting:
        if reason := self.queue.full(request):
            retry_after_s = max(RECHECK_S, _start_s(answer, self.queue.in_order(query.now_s), query.view))
            raise Rejected(f"{reason}; try again", retry_after_s, "queue-full")
        entry = self.queue.enter(request, query.now_s - query.waited_s, _need_s(answer))
        waiting = self._waiting[entry] = _Waiting(entry, make_query, asyncio.get_running_loop().create_future())
        if self._watching is None:
            self._watching = asyncio.ensure_future(self._watch())
        return waiting

    def _queued(self, entry: QueuedRequest, query: PlacementQuery, answer: Placement | Enqueue) -> Queued:
        entries = self.queue.in_order(query.now_s)
        position = entries.index(entry)
        start_s = _start_s(answer, entries[:position], query.view)
        return Queued(
            request_id=entry.request_id,
            position=position,
            predicted_start_s=start_s,
            predicted_ttft_s=query.waited_s + start_s + entry.need_s,
            reason=answer.reason if isinstance(answer, Enqueue) else "other requests are ahead",
        )

    def _cancel(self, waiting: _Waiting, request: Request) -> None:
        """The request's coroutine was cancelled: remove the entry, or end a placement that it never got."""
        if self._waiting.pop(waiting.entry, None) is not None:
            self.queue.leave(waiting.entry)
        elif waiting.answer.exception() is None and isinstance(waiting.answer.result(), Placement):
            self._policy.ended(request.key, asyncio.get_running_loop().time())

    def _left(self, waiting: _Waiting) -> None:
        """A request has left the queue, and its coroutine continues. Start the next round.

        After an overdue request, which was admitted despite the load, wait for new statistics or the end of a request.
        """
        if self._waiting:
            if waiting.was_overdue:
                self._wake_in(self._stats_s)
            else:
                self.changed()
            return
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._watching is not None:
            self._watching.cancel()
            self._watching = None

    # ---- rounds ------------------------------------------------------------------------------------------------

    def _round(self) -> None:
        """Ask the policy about the next requests. Admits at most one; `_left` starts the next round."""
        now_s = asyncio.get_running_loop().time()
        self._round_due = None
        for entry in self.queue.to_reject(now_s):
            self._ask(self._waiting[entry], only_refusals=True)
        wake_s = RECHECK_S
        for entry in self.queue.in_order(now_s, ASKED_AT_ONCE):
            waiting = self._waiting[entry]
            answer = self._ask(waiting)
            if isinstance(answer, Placement):
                waiting.was_overdue = entry.claim_s <= now_s
                return
            if isinstance(answer, Enqueue):
                wake_s = min(wake_s, answer.start_s)
        if self._waiting:
            self._wake_in(wake_s)

    def _ask(self, waiting: _Waiting, *, only_refusals: bool = False) -> Placement | Refusal | Enqueue | None:
        """The policy's answer. A placement, which is recorded with the policy, or a refusal removes the entry."""
        if waiting.answer.done():
            return None  # cancelled; its coroutine removes the entry
        try:
            answer = self._policy.choose(query := replace(waiting.make_query(), is_queued=True))
            if isinstance(answer, Placement) and not only_refusals:
                placement = self._begin(query, answer)
                self._resolve(waiting, served=True).set_result(placement)
        except Exception as error:  # its own coroutine raises it
            self._resolve(waiting).set_exception(error)
            return None
        if isinstance(answer, Refusal):
            self._resolve(waiting).set_result(answer)
        return answer

    def _resolve(self, waiting: _Waiting, *, served: bool = False) -> asyncio.Future[Answer]:
        """Remove the entry. `served`: count it toward its tenant's share. Returns the future to set."""
        del self._waiting[waiting.entry]
        (self.queue.take if served else self.queue.leave)(waiting.entry)
        return waiting.answer

    def _begin(self, query: PlacementQuery, placement: Placement) -> Placement:
        """Record the placement. Returns it with predictions from the request's arrival, for the client."""
        self._policy.began(query, placement)
        return self._policy.for_client(query, placement)

    def _wake_in(self, seconds: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = asyncio.get_running_loop().call_later(max(self._stats_s, seconds), self._round)

    async def _watch(self) -> None:
        while True:
            await self._change()
            self.changed()


def _need_s(answer: Placement | Enqueue) -> float:
    if isinstance(answer, Enqueue):
        return answer.need_s
    return answer.predicted_ttft_s or 0.0 if answer.prefill_s is None else answer.prefill_s


def _predicted_miss(request: Request, entry: QueuedRequest, queued: Queued) -> Refusal | None:
    """A refusal if the request would miss its TTFT SLO after the predicted wait."""
    ttft_s, slo_s = queued.predicted_ttft_s, request.slo.ttft_s
    if not entry.rejects or slo_s is None or ttft_s <= TOLERANCE * slo_s:
        return None
    reason = f"behind {queued.position} queued requests the first token would take {ttft_s:.3g} s"
    return Refusal(f"{reason}, the SLO is {slo_s:.3g} s ({queued.reason})", ttft_s - slo_s)


def _start_s(answer: Placement | Enqueue, ahead: list[QueuedRequest], view: ClusterView) -> float:
    """Predicted wait: the policy's for this request, plus the work of those ahead, divided by the workers."""
    prefills = len(view.ready(Role.PREFILL, Role.MIXED)) or len(view.ready(Role.DECODE))
    decodes = len(view.ready(Role.DECODE, Role.MIXED)) or prefills
    start_s, apart_s = (answer.start_s, answer.apart_s) if isinstance(answer, Enqueue) else (0.0, 0.0)
    return start_s + sum(max(entry.need_s / max(1, prefills), apart_s / max(1, decodes)) for entry in ahead)
