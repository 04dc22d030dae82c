"""Runs one request as one coroutine: placement, attempts, recovery, the last token, within its deadline.

When a worker dies, the next attempt gets the prompt and the tokens that the client has, and samples the same tokens. No
token is lost or repeated. Reports the end of each attempt to the policy, and each event to the observer.
"""

import asyncio
import logging
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial

from cluster.dispatch.admission_queue import AdmissionQueue
from cluster.dispatch.attempt import Attempt, Phase
from cluster.dispatch.discovery import WorkerDiscovery
from cluster.dispatch.migration import migrate
from cluster.dispatch.placement import Placer
from cluster.dispatch.request_state import Replacement, RequestState
from cluster.dispatch.worker_call import AttemptFailed
from cluster.events import Accepted, AttemptsExhausted, Completed, DeadlineExceeded, Delta, Event, Rejected, Unservable
from cluster.observe.ledger import Stopwatch, now_ns
from cluster.observe.request_observer import RequestEnd, RequestObserver
from cluster.observe.request_timing import RequestTiming
from cluster.policy.admission.classes import Classes
from cluster.policy.policy import Policy
from cluster.policy.routing.router import Placement, Refusal
from cluster.spec import ClusterSpec
from diptych.background_tasks import BackgroundTasks
from diptych.history import RequestTrace
from workers.log_fields import log_fields
from workers.request import FinishReason, Request, TokensOut

logger = logging.getLogger(__name__)

MIN_RESERVING_S = 0.1
MIN_WAITED_S = 0.001  # longer waits are sent to workers, because deadlines count from the request's arrival
RETRY_S, RETRY_MAX_S = 0.01, 1.0  # doubled with each attempt, so that immediate failures do not use up all attempts
LENDERS_S = 5.0  # until a request that found no lender tries again; it may compute its prompt in vain
MAX_REPLACEMENTS = 3  # how often an attempt that has not begun is replaced


class RequestRunner:
    """Owned by a Dispatcher. Owns the state of every running request, which nothing else sees. `close` after use."""

    def __init__(
        self,
        spec: ClusterSpec,
        name: str,
        *,
        policy: Policy,
        discovery: WorkerDiscovery,
        admission_queue: AdmissionQueue,
        observer: RequestObserver,
    ) -> None:
        self._spec = spec
        self._name = name
        self._policy = policy
        self._placer = Placer(spec, policy, admission_queue, discovery, self._sibling_worker)
        self._discovery = discovery
        self._admission_queue = admission_queue
        self._observer = observer
        self._classes = Classes(spec.gateway)
        self._running: dict[str, RequestState] = {}  # by request id
        self._background = BackgroundTasks()
        self.moved_bytes = 0

    async def close(self) -> None:
        """Give cancellations on workers a moment to arrive."""
        if self._background:
            await asyncio.wait(self._background, timeout=1.0)

    @property
    def fallbacks(self) -> tuple[tuple[str, int], ...]:
        """By role, requests that ran on workers of another role because none of that role was ready."""
        return tuple((role.value, count) for role, count in self._placer.fallbacks.items())

    def traces(self) -> Iterable[RequestTrace]:
        """Traces of the running requests, oldest first."""
        return (state.trace() for state in self._running.values())

    def decode_contexts(self) -> dict[str, int]:
        """The tokens so far of each attempt that decodes, by key."""
        return {
            state.request.key: state.num_tokens + state.attempt.num_unreported
            for state in self._running.values()
            if state.attempt is not None and state.attempt.phase is Phase.DECODE
        }

    def _find(self, key: str) -> RequestState | None:
        """The request whose current attempt has this key."""
        state = self._running.get(key.partition("/")[0])
        return state if state is not None and state.request.key == key else None

    def _sibling_worker(self, group: str) -> str:
        placements = (each.placement for each in self._running.values() if each.request.group == group)
        return next((placement.prefill for placement in placements if placement), "")

    async def run(
        self, request: Request, emit: Callable[[Event], None], deadline_s: float | None, arrived_ns: int
    ) -> None:
        """Run to the last event. Errors: `cluster.events`."""
        if request.id in self._running:
            raise Unservable(f"request id {request.id!r} is already running here")
        timing = RequestTiming(arrived_ns / 1e9)
        state = self._running[request.id] = RequestState(request, Stopwatch(now_ns, arrived_ns), emit, timing)
        completed: Completed | None = None
        error: BaseException | None = None
        try:
            self._observer.on_arrived(request, timing.arrived_s, self._policy.expected_tokens(request))
            completed = state.completed(await self._run_until(state, deadline_s))
            emit(completed)
        except BaseException as raised:
            error = raised
            raise
        finally:
            if state.replacement is not None:  # the replacement never began
                self._policy.ended(state.replacement.request.key, _now_s())
            self._end(state, completed, error)
            del self._running[request.id]

    def _end(self, state: RequestState, completed: Completed | None, error: BaseException | None) -> None:
        score = state.timing.ended(self._classes.slo_of(state.request), error, _now_s())
        finish = None if completed is None else completed.finish
        decode_worker = state.decode_workers[-1] if state.decode_workers else ""
        self._policy.answered(state.request, state.sent, finish, decode_worker)
        self._observer.on_end(
            RequestEnd(
                request=state.request,
                score=score,
                error=error,
                completed=completed,
                num_tokens=len(state.sent),
                transfers=state.transfers,
                trace=lambda: state.trace(score.outcome, error),
            )
        )

    async def _run_until(self, state: RequestState, deadline_s: float | None) -> FinishReason:
        if deadline_s is None:
            return await self._run_attempts(state)
        bound = asyncio.timeout(deadline_s)
        try:
            async with bound:
                return await self._run_attempts(state)
        except TimeoutError:
            if bound.expired():
                raise DeadlineExceeded(state.phase.value) from None
            raise

    # ---- attempts ----------------------------------------------------------------------------------------------

    async def _run_attempts(self, state: RequestState) -> FinishReason:
        state.watch.lap("admission")
        while True:
            try:
                finish = await self._attempt(state)
            except AttemptFailed as failure:
                await self._recover(state, failure)
                continue
            if finish is None:
                continue  # the attempt was replaced
            most_tokens = state.request.sampling.max_tokens
            is_at_limit = most_tokens is not None and len(state.sent) >= most_tokens
            if finish is not FinishReason.LENGTH or is_at_limit or not self._placer.has_more_room(state.num_tokens):
                return finish
            self._continue_elsewhere(state)

    async def _recover(self, state: RequestState, failure: AttemptFailed) -> None:
        """Prepare the next attempt. Raises `Rejected` or `AttemptsExhausted` where there is none."""
        spent, request = state.num_attempts, state.request
        extra = log_fields(self._name, request.id, attempt=spent, worker=failure.worker)
        logger.warning("request %s, attempt %d failed at %s", request.id, spent, failure, extra=extra)
        if failure.no_memory:
            return await self._wait_for_lenders(state)
        state.avoid |= {failure.worker}
        # Decode on prefill workers only if all decode workers are dead, not if they are full.
        query = self._placer.query(state.placement_input(), may_colocate=failure.refused_s is None)
        no_other_worker = self._policy.choose(query) is None
        if failure.refused_s is not None and no_other_worker:
            raise Rejected(str(failure), failure.refused_s, "no-room") from None
        if spent >= self._spec.gateway.max_attempts:
            raise AttemptsExhausted(f"{spent} attempts failed, the last at {failure}") from None
        if no_other_worker:
            state.avoid = frozenset()
        state.retry(fresh=failure.corrupt)
        await asyncio.sleep(min(RETRY_MAX_S, RETRY_S * 2**state.request.attempt))

    async def _wait_for_lenders(self, state: RequestState) -> None:
        """Other requests have the memory; this is not a failure. Raises `Rejected` after `placement_timeout_s`."""
        now_s, limit_s = _now_s(), self._spec.gateway.placement_timeout_s
        if state.no_memory_s is None:
            state.no_memory_s = now_s
        if now_s - state.no_memory_s >= limit_s:
            raise Rejected(
                f"no memory on several workers within {limit_s:.0f} s", retry_after_s=LENDERS_S, cause="waited"
            )
        state.retry()
        state.num_uncounted += 1
        await asyncio.sleep(LENDERS_S)

    def _continue_elsewhere(self, state: RequestState) -> None:
        """The answer filled its worker's KV pool: continue it on a larger worker. This is not a failure."""
        request_id, worker = state.request.id, state.decode_workers[-1]
        extra = log_fields(self._name, request_id, worker=worker)
        logger.info("request %s fills %s and continues on a larger worker", request_id, worker, extra=extra)
        state.retry()
        state.num_uncounted += 1

    async def _attempt(self, state: RequestState) -> FinishReason | None:
        """The finish reason; None if another attempt replaces this one."""
        placement = self._take_replacement(state) or await self._place(state)
        self._note_placement(state, placement)
        key, num_tokens = state.request.key, 0
        state.attempt = attempt = self._make_attempt(state, placement)
        try:
            if not placement.colocated:
                await attempt.reserve(self._reserving_s(state))
                self._policy.active.reserved(key, _now_s())
            accepted = Accepted(
                request_id=state.request.id,
                attempt=state.request.attempt,
                prompt_tokens=len(state.request.prompt),
                prefill_worker=placement.prefill,
                decode_worker=placement.decode,
                reason=placement.reason,
                predicted_ttft_s=placement.predicted_ttft_s,
                predicted_tpot_s=placement.predicted_tpot_s,
            )
            state.emit(accepted)
            self._observer.on_placed(state.request, accepted)
            state.token_observers = self._observer.token_observers(state.request, placement.decode)
            finish = await self._run_attempt(state, attempt)
            num_tokens = len(state.sent) - len(state.request.generated) if finish is not None else 0
            return finish
        finally:
            self._policy.ended(key, _now_s(), num_tokens)
            self._admission_queue.changed()
            attempt.release()
            state.end_attempt(attempt)

    async def _place(self, state: RequestState) -> Placement:
        answer, state.avoid = await self._placer.place(state.placement_input(), state.emit)
        state.watch.lap("recovery" if state.request.attempt else "route")
        if isinstance(answer, Refusal):
            raise Rejected(answer.reason, answer.retry_after_s, "admission")
        return answer

    def _take_replacement(self, state: RequestState) -> Placement | None:
        """The placement of a replacement, if there is one and its workers are still connected."""
        if state.replacement is None:
            return None
        replacement, state.replacement = state.replacement, None
        state.request = replacement.request
        if not self._placer.is_live(replacement.placement):
            self._policy.ended(state.request.key, _now_s())
            return None
        self._placer.count_fallback(replacement.placement)
        return replacement.placement

    @staticmethod
    def _note_placement(state: RequestState, placement: Placement) -> None:
        state.placement, now_s = placement, _now_s()
        state.timing.placed(placement, now_s)
        if (waited_s := now_s - state.timing.arrived_s) > MIN_WAITED_S:
            state.request = replace(state.request, waited_s=waited_s)

    def _make_attempt(self, state: RequestState, placement: Placement) -> Attempt:
        workers = self._discovery.clients
        return Attempt(
            self._bounded(state.request) if placement.lenders else state.request,
            prefill=workers[placement.prefill],
            decode=workers[placement.decode],
            watch=state.watch,
            answer=state.sent,
            on_tokens=partial(self._on_tokens, state),
            on_transfer=self._observer.on_transfer,
            on_moved=partial(self._on_moved, state),
            on_unlinked=self._discovery.report_unlinked,
            background=self._background.start,
            cut_tokens=placement.cut(state.request),
            prefix_owner=workers.get(placement.prefix_owner),
            prefix_fetch_s=self._spec.transfer.read_timeout_s,
            lenders=[workers[name] for name in placement.lenders if name in workers],
        )

    def _bounded(self, request: Request) -> Request:
        """It borrows: its answer ends where several workers together are full."""
        sampling = request.sampling
        most_tokens = max(self._discovery.together() - len(request.prompt), sampling.min_tokens, 1)
        if sampling.max_tokens is not None and sampling.max_tokens <= most_tokens:
            return request
        return replace(request, sampling=replace(sampling, max_tokens=most_tokens))

    def _reserving_s(self, state: RequestState) -> float:
        """Time limit of one reservation; no longer than the SLO allows."""
        request = state.request
        others = self._discovery.capacity().ready_to_decode - len(state.avoid)
        limit_s = self._spec.gateway.placement_timeout_s / max(1, others)
        if request.slo.ttft_s is None or not request.slo.is_enforced or not self._classes.rejects(request):
            return limit_s
        left_s = request.slo.ttft_s - (_now_s() - state.timing.arrived_s)
        return limit_s if request.generated else min(limit_s, max(left_s, MIN_RESERVING_S))

    async def _run_attempt(self, state: RequestState, attempt: Attempt) -> FinishReason | None:
        """The finish reason: STOP if the caller ended it, None if it was replaced. Ends the current phase."""
        if state.is_stopped:
            attempt.end_phase()
            return FinishReason.STOP
        task = asyncio.current_task()
        assert task is not None
        num_cancels = task.cancelling()
        state.running = asyncio.ensure_future(attempt.run())
        try:
            return await state.running
        except asyncio.CancelledError:
            if task.cancelling() > num_cancels:
                raise
        except Exception:
            if state.replacement is None:
                attempt.end_phase()
                raise
        finally:
            state.running = None
            attempt.decode.report()
        if state.replacement is not None:
            state.watch.lap("prefill_queue")
            return None
        attempt.end_phase()
        return FinishReason.STOP

    # ---- tokens ------------------------------------------------------------------------------------------------

    def _on_tokens(self, state: RequestState, output: TokensOut) -> None:
        assert output.first_position == len(state.sent), (
            f"request {state.request.id}: token {output.first_position} came after {len(state.sent)} tokens"
        )
        state.sent.extend(output.tokens)
        state.no_memory_s = None
        is_first = not state.timing.has_begun
        gaps_s = state.timing.tokens(len(output.tokens), output.token_s or (state.now_s(),))
        for count_tokens in state.token_observers:
            count_tokens(len(output.tokens), gaps_s)
        if is_first:
            self._observer.on_first_token(state.request)
        extra = output.logprobs, output.prompt_logprobs, output.token_s, output.pooled
        delta = Delta(output.tokens, output.first_position, *extra)
        state.emit(delta)
        if output.prefilled:
            self._on_prefilled(state, output)

    def _on_prefilled(self, state: RequestState, output: TokensOut) -> None:
        placement = state.placement
        assert placement is not None, "an attempt has a placement"
        self._observer.on_prefilled(placement.prefill, len(state.request.prompt), output.cached_tokens)
        self._policy.prefilled(state.request.key, _now_s(), output.timing.compute_s)
        self._admission_queue.changed()

    # ---- changes while it runs ---------------------------------------------------------------------------------

    def finish(self, request_id: str) -> None:
        """End the request early: its next event is Completed(STOP). Ignores unknown ids."""
        state = self._running.get(request_id)
        if state is not None:
            state.is_stopped = True
            state.interrupt()

    async def move(self, request_id: str, worker: str, timeout_s: float | None) -> bool:
        """Migrate the running decode to `worker`. False: it stays. `timeout_s` None: the time limit of a KV read."""
        state, client = self._running.get(request_id), self._discovery.clients.get(worker)
        attempt = None if state is None else state.attempt
        if attempt is None or client is None or client.lost is not None:
            return False
        before = len(attempt.transfers)
        moved = await migrate(attempt, client, timeout_s or self._spec.transfer.read_timeout_s)
        self.moved_bytes += sum(report.num_bytes for report in attempt.transfers[before:])
        return moved

    async def move_attempt(self, key: str, worker: str) -> bool:
        """Like `move`, unless another attempt runs by now."""
        state = self._find(key)
        return state is not None and await self.move(state.request.id, worker, None)

    def replace_attempt(self, key: str) -> bool:
        """Replace an attempt whose prompt still waits by one on better workers. False: it stays."""
        state = self._find(key)
        attempt = None if state is None else state.attempt
        if state is None or attempt is None or not attempt.is_waiting or state.request.group or state.is_stopped:
            return False
        if state.replacement is not None or state.num_uncounted >= MAX_REPLACEMENTS:
            return False
        request = state.next_request()
        placement = self._placer.better(replace(state.placement_input(), request=request), key)
        if placement is None:
            return False
        worker, reason = placement.prefill, placement.reason
        extra = log_fields(key=key, worker=worker)
        logger.info("%s has not begun and is placed on %s instead: %s", key, worker, reason, extra=extra)
        state.replacement = Replacement(request, placement)
        state.num_uncounted += 1
        attempt.release()  # ignores its messages from now on
        state.interrupt()
        self._observer.on_replaced(state.request, worker, reason)
        return True

    def _on_moved(self, state: RequestState, source: str, target: str) -> None:
        self._policy.active.moved(state.request.key, target)
        state.moves.append((now_ns(), target))
        state.token_observers = self._observer.token_observers(state.request, target)
        self._observer.on_moved(state.request, source, target)


def _now_s() -> float:
    return asyncio.get_running_loop().time()
