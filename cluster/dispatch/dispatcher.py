"""The dispatcher: one coroutine is a request's whole life, from placement through recoveries to the last token.

It owns the request's cancel scope, its deadline, its ledger and the tokens already sent. Workers that die cost an
attempt, never a token: the next attempt gets the prompt plus what the client already has, and draws the same tokens.
It asks the policy and tells it what became of each attempt. Knows workers as lines; knows no text and no wire.
"""

import asyncio
import itertools
import logging
import uuid
import zlib
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine
from dataclasses import replace
from typing import Any

from cluster.dispatch.admission_queue import AdmissionQueue
from cluster.dispatch.attempt import Attempt, Phase
from cluster.dispatch.discovery import REDIAL_S, WatchMembers, WorkerDiscovery
from cluster.dispatch.migration import migrate
from cluster.dispatch.migration_loop import MigrationLoop
from cluster.dispatch.placement import Life, PlacedAnew, Placing
from cluster.dispatch.worker_call import AttemptFailed
from cluster.events import Accepted, AttemptsSpent, Completed, DeadlinePassed, Delta, Event, Rejected, Unservable
from cluster.observe.history import LONGEST_TEXT, History, Recent, RequestTrace, Window
from cluster.observe.ledger import Stopwatch, now_ns
from cluster.observe.load_reporter import LoadReporter
from cluster.observe.request_metrics import RequestMetrics
from cluster.observe.request_timing import RequestTiming
from cluster.policy.admission.classes import Classes
from cluster.policy.policy import open_policy
from cluster.policy.routing.prefix_index import Guesses
from cluster.policy.routing.router import Placement
from cluster.policy.slo_attainment import Ended, GatewayAttainment, SLOScores
from cluster.runtime.errors import WorkerGone
from cluster.spec import ClusterSpec, Role
from diptych.shapes import Shape, Timings
from diptych.view import ClusterView, ModelView
from workers.errors import InvalidRequest, Overloaded, WorkerClosed
from workers.log_fields import log_fields
from workers.request import FinishReason, Request, TokensOut, check_shape

logger = logging.getLogger(__name__)

OnEnd = Callable[[RequestTrace, Request, FinishReason | None], None]

LEAST_RESERVING_S = 0.1
RETRY_S, RETRY_MAX_S = 0.01, 1.0  # doubled with each attempt: failures that repeat at once do not spend them all


class Dispatcher:
    """Owned by one gateway. `start` before use, `close` after. `told_ends` hears of each request in its own task."""

    def __init__(
        self,
        spec: ClusterSpec,
        model: ModelView,
        watch_members: WatchMembers,
        name: str = "gateway",
        told_ends: OnEnd | None = None,
    ) -> None:
        self._spec = spec
        self._name = name
        self._told_ends = told_ends
        self._process = f"{name}-{uuid.uuid4().hex[:8]}"  # a gateway that is started again keeps its name
        self._numbers = itertools.count(1)
        self._policy = open_policy(spec, seed=zlib.crc32(name.encode()))  # gateways do not all draw the same
        self._lives: dict[str, Life] = {}
        self._background: set[asyncio.Task[None]] = set()
        self._moved_bytes = 0
        caches = self._policy.index if self._policy.wants_caches else None
        self.history = History(spec.gateway.trace_requests, spec.gateway.trace_s, now_ns)
        self.roster = WorkerDiscovery(spec, model, watch_members, name, caches, self.history)
        self._classes = Classes(spec.gateway)
        self._promises = SLOScores()
        self._request_metrics = RequestMetrics(spec.gateway.classes, spec.transfer.backends)
        self.load_reporter = LoadReporter(name, spec.gateway.slo, lambda: asyncio.get_running_loop().time())
        self._admission_queue = AdmissionQueue(spec.gateway, self._policy, spec.health.heartbeat_s, self.roster.change)
        self._placing = Placing(spec, self._policy, self._admission_queue, self.roster, self._lives)
        verbs = self._contexts, self._move_attempt, self._place_anew
        self._moving = MigrationLoop(
            self._policy.mover, self._policy.requeue, self.roster.picture, self.roster.change, *verbs
        )

    async def start(self) -> None:
        """Learn the members, and follow them from now on."""
        await self.roster.start()
        self._moving.start(self.roster.failures)

    async def close(self) -> None:
        """End everything still running."""
        if self._background:
            await asyncio.wait(self._background, timeout=1.0)
        await self._moving.close()
        await self._admission_queue.close()
        await self.roster.close()

    # ---- requests --------------------------------------------------------------------------------------------

    async def generate(
        self, request: Request, *, deadline_s: float | None = None, arrived_ns: int | None = None
    ) -> AsyncGenerator[Event, None]:
        """Run one request: Accepted, Delta..., Completed. Closing the iterator ends it on every worker.

        `arrived_ns` (of `cluster.observe.ledger.now_ns`) lets the ledger count what the gateway did before.
        Errors: `cluster.events`.
        """
        events: asyncio.Queue[Event | None] = asyncio.Queue()  # bounded by the request's own tokens
        running = self.run(request, events.put_nowait, deadline_s=deadline_s, arrived_ns=arrived_ns)
        task = asyncio.ensure_future(running)
        task.add_done_callback(lambda _: events.put_nowait(None))
        try:
            while (event := await events.get()) is not None:
                yield event
            await task
        finally:
            task.cancel()
            await asyncio.wait([task])

    async def run(
        self,
        request: Request,
        emit: Callable[[Event], None],
        *,
        deadline_s: float | None = None,
        arrived_ns: int | None = None,
    ) -> None:
        """Like `generate`, for a caller who takes each event at the moment it happens.

        Raises `InvalidRequest`, too, for a class or a tenant that the specification does not have.
        """
        if request.id in self._lives:
            raise Unservable(f"request id {request.id!r} is already running here")
        request = replace(self._classes.resolved(request), origin=f"{self._process}.{next(self._numbers)}")
        arrived_ns = now_ns() if arrived_ns is None else arrived_ns
        arrived_s = arrived_ns / 1e9
        with self.load_reporter.seen(request, emit, arrived_s, self._policy.expected_tokens(request)) as told:
            life = self._lives[request.id] = Life(
                request, Stopwatch(now_ns, arrived_ns), told, RequestTiming(arrived_s)
            )
            try:
                await self._live(life, deadline_s)
            except BaseException as error:
                life.error = error
                raise
            finally:
                del self._lives[request.id]
                if life.anew is not None:
                    self._policy.ended(life.anew[0].key, asyncio.get_running_loop().time())
                self._score(life)

    def _score(self, life: Life) -> None:
        """The request is over."""
        ended = life.timing.ended(self._classes.slo_of(life.request), life.error, asyncio.get_running_loop().time())
        self._promises.ended(ended)
        self._request_metrics.ended(ended, life.completed, life.transfers)
        self._policy.answered(life.request, len(life.sent), life.finish)
        if ended.outcome == "refused":
            self.history.happened("refused", "", f"{ended.refusal}: {life.error}", life.request.id)
        if logger.isEnabledFor(logging.INFO):
            self._log_ended(life, ended.outcome)
        if self.history.keeps_trails or self._told_ends is not None:
            trail = self._trail(life, ended.outcome)
            self.history.ended(trail)
            if self._told_ends is not None:
                self._told_ends(trail, life.request, life.finish)

    def _trail(self, life: Life, outcome: str = "") -> RequestTrace:
        """How a request went, so far if it has no outcome."""
        attempt, request, ledger = life.attempt, life.request, life.watch.ledger()
        phase = life.phase if attempt is None else attempt.phase
        transfers = [*life.transfers, *(() if attempt is None else attempt.transfers)]
        decoding = life.decode_workers if attempt is None else tuple(attempt.decode_workers)
        arrived_ns = life.watch.started_ns
        return RequestTrace(
            request_id=request.id,
            class_name=request.slo.class_name,
            outcome=outcome,
            detail="" if life.error is None else str(life.error)[:LONGEST_TEXT],
            arrived_ns=arrived_ns,
            ledger=ledger,
            phase=phase,
            open_ns=0 if outcome == "completed" else max(0, now_ns() - arrived_ns - ledger.total_ns),
            prompt_tokens=len(request.prompt),
            cached_tokens=life.cached_tokens if attempt is None else attempt.cached_tokens,
            output_tokens=len(life.sent),
            attempts=request.attempt + 1 - life.num_anew,
            prefill_worker=life.placement.prefill if life.placement is not None else "",
            decode_worker=decoding[0] if decoding else "",
            moves=tuple(life.moves),
            transfer_bytes=sum(report.num_bytes for report in transfers),
            transfer_ns=round(1e9 * sum(report.elapsed_s for report in transfers)),
        )

    async def move(self, request_id: str, worker: str, timeout_s: float | None = None) -> bool:
        """Have another worker go on with this request's decode, while it goes on; False when it stays where it is.

        `timeout_s` None: as long as a read may take. Its last step ends with the worker's answer.
        """
        life, line = self._lives.get(request_id), self.roster.lines.get(worker)
        if life is None or life.attempt is None or line is None or line.lost is not None:
            return False
        attempt, key, before = life.attempt, life.request.key, len(life.attempt.transfers)
        moved = await migrate(attempt, line, timeout_s or self._spec.transfer.read_timeout_s)
        if moved and life.attempt is attempt:
            self._policy.moved(key, worker, asyncio.get_running_loop().time())
        if moved:
            life.moves.append((now_ns(), worker))
            self.history.happened("move", worker, f"from {attempt.decode_workers[-2]}", request_id)
        self._moved_bytes += sum(report.num_bytes for report in attempt.transfers[before:])
        return moved

    async def _move_attempt(self, key: str, worker: str) -> bool:
        life = self._placing.find(key)
        return life is not None and await self.move(life.request.id, worker)

    def _place_anew(self, key: str) -> bool:
        life, done = self._placing.find(key), self._placing.anew(key)
        if done and life is not None and life.anew is not None:
            placement = life.anew[1]
            self.history.happened("anew", placement.prefill, placement.reason, life.request.id)
        return done

    def _contexts(self) -> dict[str, int]:
        """The tokens so far of each attempt that decodes."""
        return {
            life.request.key: len(life.request.prompt) + len(life.sent)
            for life in self._lives.values()
            if life.attempt is not None and life.attempt.phase is Phase.DECODE
        }

    def finish(self, request_id: str) -> None:
        """The caller has all it wants (a stop string): the next event is Completed(STOP). Unknown ids are ignored."""
        life = self._lives.get(request_id)
        if life is not None and not life.stop.done():
            life.stop.set_result(None)

    async def _live(self, life: Life, deadline_s: float | None) -> None:
        bound = asyncio.timeout(deadline_s)
        try:
            async with bound:
                life.finish = finish = await self._attempts(life)
        except TimeoutError:
            if bound.expired():
                raise DeadlinePassed(life.phase) from None
            raise
        life.completed = Completed(
            finish=finish,
            prompt_tokens=len(life.request.prompt),
            completion_tokens=len(life.sent),
            cached_tokens=life.cached_tokens,
            attempts=life.request.attempt + 1 - life.num_anew,
            ledger=life.watch.ledger(),
            transfers=tuple(life.transfers),
            decode_workers=life.decode_workers,
        )
        life.emit(life.completed)

    async def _attempts(self, life: Life) -> FinishReason:
        life.watch.lap("admission")
        while True:
            try:
                finish = await self._attempt(life)
                if finish is not FinishReason.LENGTH or not self._placing.may_go_on(life):
                    return finish
                self._go_on_elsewhere(life)
            except PlacedAnew:
                continue
            except AttemptFailed as failure:
                spent = life.request.attempt + 1 - life.num_anew
                told = log_fields(self._name, life.request.id, attempt=spent, worker=failure.worker)
                logger.warning("request %s, attempt %d failed at %s", life.request.id, spent, failure, extra=told)
                life.avoid.add(failure.worker)
                # A full decode pool is no reason to decode on prefill workers; a dead one is.
                full = failure.refused_s is not None
                nobody_else = self._policy.choose(self._placing.ask(life, alone=not full)) is None
                if failure.refused_s is not None and nobody_else:
                    raise Rejected(str(failure), failure.refused_s, "no-room") from None
                if spent >= self._spec.gateway.max_attempts:
                    raise AttemptsSpent(f"{spent} attempts failed, the last at {failure}") from None
                if nobody_else:
                    life.avoid.clear()
                life.request = life.request.retry(tuple(life.sent), fresh=failure.corrupt)
                life.phase = Phase.RECOVERY
                await asyncio.sleep(min(RETRY_MAX_S, RETRY_S * 2**life.request.attempt))

    def _go_on_elsewhere(self, life: Life) -> None:
        """Its worker was full, its answer is not at its end: nothing failed, and a worker with more room goes on."""
        told = log_fields(self._name, life.request.id, worker=life.decode_workers[-1])
        logger.info("request %s fills %s, and goes on elsewhere", life.request.id, life.decode_workers[-1], extra=told)
        life.request = life.request.retry(tuple(life.sent), fresh=False)
        life.num_anew += 1
        life.phase = Phase.RECOVERY

    async def _attempt(self, life: Life) -> FinishReason:
        placement = self._placing.placed_before(life) or await self._placing.place(life)
        key = life.request.key
        attempt = Attempt(
            life.request,
            prefill=self.roster.lines[placement.prefill],
            decode=self.roster.lines[placement.decode],
            watch=life.watch,
            on_tokens=lambda output: self._on_tokens(life, output),
            background=self._in_background,
            cut_tokens=placement.cut(life.request),
            prefix_owner=self.roster.lines.get(placement.prefix_owner),
            prefix_fetch_s=self._spec.transfer.read_timeout_s,
        )
        life.attempt, life.num_counted, attempt_tokens = attempt, 0, 0
        try:
            if not placement.colocated:
                await attempt.reserve(self._reserving_s(life))
                self._policy.reserved(key, asyncio.get_running_loop().time())
            life.emit(
                Accepted(
                    request_id=life.request.id,
                    attempt=life.request.attempt,
                    prompt_tokens=len(life.request.prompt),
                    prefill_worker=placement.prefill,
                    decode_worker=placement.decode,
                    reason=placement.reason,
                    predicted_ttft_s=placement.predicted_ttft_s,
                    predicted_tpot_s=placement.predicted_tpot_s,
                )
            )
            self._log_accepted(life.request, placement)
            finish = await self._run_or_stop(life, attempt)
            attempt_tokens = len(life.sent) - len(life.request.generated)
            return finish
        finally:
            life.phase, life.attempt = attempt.phase, None
            life.decode_workers = tuple(attempt.decode_workers)
            self._policy.ended(key, asyncio.get_running_loop().time(), attempt_tokens)
            self._admission_queue.changed()
            attempt.release()
            self._count_transfers(life, attempt)
            life.transfers += attempt.transfers
            life.cached_tokens = max(life.cached_tokens, attempt.cached_tokens)

    def _log_accepted(self, request: Request, placement: Placement) -> None:
        prefill, decode, reason = placement.prefill, placement.decode, placement.reason
        told = log_fields(self._name, request.id, attempt=request.attempt, prefill_worker=prefill, decode_worker=decode)
        logger.info("request %s goes to %s and %s: %s", request.id, prefill, decode, reason, extra=told)

    def _log_ended(self, life: Life, outcome: str) -> None:
        ledger, tokens, request_id = life.watch.ledger(), len(life.sent), life.request.id
        figures = {
            "prompt_tokens": len(life.request.prompt),
            "output_tokens": tokens,
            "class_name": life.request.slo.class_name,
        }
        times = {"ttft_ms": ledger.ttft_ns / 1e6 if tokens else None, "total_ms": ledger.total_ns / 1e6}
        told = log_fields(self._name, request_id, outcome=outcome, **figures, **times)
        words = f": {life.error}" if isinstance(life.error, Exception) else ""
        logger.info("request %s %s after %d tokens%s", request_id, outcome, tokens, words, extra=told)

    def _reserving_s(self, life: Life) -> float:
        """How long to wait for one worker's word of blocks and a slot; no longer than a promise can be kept."""
        request = life.request
        others = len(self.roster.picture().ready(Role.DECODE, Role.MIXED)) - len(life.avoid)
        limit_s = self._spec.gateway.placement_timeout_s / max(1, others)
        if request.slo.ttft_s is None or not request.slo.promised or not self._classes.rejects(request):
            return limit_s
        left_s = request.slo.ttft_s - (asyncio.get_running_loop().time() - life.timing.arrived_s)
        return limit_s if request.generated else min(limit_s, max(left_s, LEAST_RESERVING_S))

    async def _run_or_stop(self, life: Life, attempt: Attempt) -> FinishReason:
        """The attempt's end, or STOP as soon as the caller asks for it. Open laps are closed either way.

        Raises `PlacedAnew` when it has been given up.
        """
        running = asyncio.ensure_future(attempt.run())
        anew = asyncio.ensure_future(life.placed_anew.wait())
        either: set[asyncio.Future[Any]] = {running, life.stop, anew}
        try:
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            if life.placed_anew.is_set():
                life.watch.lap("prefill_queue")
                raise PlacedAnew
            if running.done() and running.exception() is None:
                return running.result()
            attempt.close_lap()
            if running.done():
                return running.result()  # raises
            return FinishReason.STOP
        finally:
            running.cancel()
            anew.cancel()
            await asyncio.wait({running})

    def _on_tokens(self, life: Life, output: TokensOut) -> None:
        assert output.first_position == len(life.sent), (
            f"request {life.request.id}: token {output.first_position} came after {len(life.sent)} tokens"
        )
        life.sent.extend(output.tokens)
        gap_s = life.timing.tokens(len(output.tokens), asyncio.get_running_loop().time())
        self._request_metrics.came(life.request.slo.class_name, len(output.tokens), gap_s)
        life.emit(Delta(output.tokens, output.first_position, output.logprobs, output.prompt_logprobs))
        if (attempt := life.attempt) is not None:
            self.history.of(attempt.decode_workers[-1]).output_tokens += len(output.tokens)
            if len(attempt.transfers) > life.num_counted:
                self._count_transfers(life, attempt)
        if output.prefilled:
            self._prefilled(life, output)

    def _count_transfers(self, life: Life, attempt: Attempt) -> None:
        """Those that have come since the last call, at who decodes now."""
        traffic = self.history.of(attempt.decode_workers[-1])
        for report in attempt.transfers[life.num_counted :]:
            traffic.transfers += 1
            traffic.transfer_bytes += report.num_bytes
            traffic.transfer_s += report.elapsed_s
        life.num_counted = len(attempt.transfers)

    def _prefilled(self, life: Life, output: TokensOut) -> None:
        """Tell the policy. Raises `Rejected` when it turns the request away now."""
        if life.placement is not None:
            traffic = self.history.of(life.placement.prefill)
            traffic.prompts += 1
            traffic.prompt_tokens += len(life.request.prompt)
            traffic.cached_tokens += output.cached_tokens
        told = output.cached_tokens, output.timing.compute_s
        self._policy.prefilled(life.request.key, asyncio.get_running_loop().time(), *told)
        self._admission_queue.changed()
        if self._policy.looks_behind_prefill and output.finish is None and life.placement is not None:
            refusal = self._policy.judge(self._placing.ask(life), life.placement.decode)
            if refusal is not None:
                raise Rejected(refusal.reason, refusal.retry_after_s, "behind-prefill")

    def _in_background(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.ensure_future(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)

    # ---- what a door asks ------------------------------------------------------------------------------------

    @property
    def view(self) -> ClusterView:
        """Membership as published, statistics as last heard; a worker whose line is lost counts as dead."""
        return self.roster.view()

    async def audit(self) -> ClusterView:
        """The view, with every ready worker's proof that its blocks are accounted for."""
        return await self.roster.audit()

    def standing(self) -> GatewayAttainment:
        """How this gateway has kept its promises, and what it moved to keep them."""
        return replace(
            self._promises.attainment(self._policy.lengths.calibration()),
            moves=self._moving.counts(),
            moved_bytes=self._moved_bytes,
            role_changes=self.roster.role_changes(),
            queued=len(self._admission_queue.room),
            uncovered=tuple((role.value, count) for role, count in self._placing.uncovered.items()),
            tally=self._request_metrics.told(),
        )

    def turned_away(self, class_name: str, cause: str) -> None:
        """A request never came here: the door refused it."""
        ended = Ended("refused", class_name, cause)
        self._promises.ended(ended)
        self._request_metrics.ended(ended, None, ())
        self.history.happened("refused", "", cause)

    def recent(self) -> Recent:
        """What went through each worker since this gateway began, and what happened lately."""
        return self.history.recent(member.view.name for member in self.roster.membership.members)

    def remembered(self, begin_ns: int, end_ns: int) -> Window:
        """What is still known of a stretch of time, of `cluster.observe.ledger.now_ns`; requests under way too."""
        return self.history.window(begin_ns, end_ns, map(self._trail, tuple(self._lives.values())))

    def under_way(self, most: int) -> list[RequestTrace]:
        """How the oldest `most` requests under way go."""
        return [self._trail(life) for life in itertools.islice(self._lives.values(), most)]

    @property
    def guesses(self) -> Guesses:
        """How right this gateway was about what workers had cached."""
        return self._policy.index.guesses

    def view_change(self) -> Awaitable[object]:
        """Done after the next change of membership or state; statistics alone are none."""
        return self.roster.change()

    async def measure(self, worker: str, shape: Shape, repeats: int) -> Timings:
        """Have this idle worker time steps of a shape. Errors: `InvalidRequest`; `Rejected`: it has work or is gone."""
        line = self.roster.lines.get(worker)
        if line is None or line.lost is not None:
            names = ", ".join(self.roster.lines) or "none"
            raise InvalidRequest("worker", f"{worker!r} is not ready here; ready are: {names}")
        (pool,) = (pool for pool in self._spec.pools if pool.name == line.view.pool)
        check_shape(pool.engine, shape, repeats)
        clock = asyncio.get_running_loop()
        begun_s = clock.time()
        try:
            timings = await line.handle.measure(shape, repeats)
        except Overloaded as error:
            raise Rejected(f"{worker}: {error}", error.retry_after_s) from None
        except (WorkerGone, WorkerClosed) as error:
            raise Rejected(f"{worker} is gone: {error}", REDIAL_S) from None
        return replace(timings, call_s=clock.time() - begun_s - timings.elapsed_s)
