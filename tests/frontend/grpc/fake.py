"""A dispatcher for servers under test: deterministic, no workers."""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import Any, TypeVar

from cluster.dispatch.capacity import ServingCapacity, serving_capacity
from cluster.events import Accepted, Completed, Delta, Event
from cluster.frontend.context import GatewayContext
from cluster.frontend.gateway import Gateway
from cluster.frontend.text import Tokenizer
from cluster.observe.ledger import Stopwatch, now_ns
from cluster.policy.estimate.lengths import Calibration
from cluster.policy.slo_attainment import Ended, GatewayAttainment, SLOScores
from cluster.spec import ClusterSpec, GatewaySpec, PoolSpec, Role
from diptych.history import Recent, RequestTrace, Window
from diptych.shapes import Shape, Timings
from diptych.view import Adapter, CachedPrompt, ClusterView, ModelView, WorkerState, WorkerView
from kvtransfer.ticket import LinkReport, TransferReport
from workers.config import EngineConfig, ParallelConfig
from workers.request import FinishReason, Grammar, Request, TokenLogprobs
from workers.stats import WorkerStats

T = TypeVar("T")
MODEL = ModelView("bytes", context_length=8192, vocab_size=256)
REPORT = TransferReport("lease-1", "memory", "in-process copy", 3, 4096, 1, 3, 1, 3, 0.002, 0.001, 0.003)
LINK = LinkReport("decode-0", "prefill-0", "memory", "in-process copy", 1e-4, 2e9, ("nixl: not installed",))


def counting(request: Request) -> bytes:
    """Letters without end."""
    most = request.sampling.max_tokens or 0
    return bytes(ord("a") + index % 26 for index in range(most))


class FakeDispatcher:
    """Answers with `script(request)`, `step_s` after each token; `hold` stops it before its first token.

    `error` is raised instead of an answer. `running` and `closed` tell what became of each request.
    """

    def __init__(self, script: Callable[[Request], bytes] = counting, step_s: float = 0.0, chunk: int = 1) -> None:
        self.script = script
        self.step_s = step_s
        self.chunk = chunk
        self.error: Exception | None = None
        self.hold: asyncio.Event | None = None
        self.requests: list[Request] = []
        self.running: set[str] = set()
        self.produced: dict[str, int] = {}
        self.deadlines: list[float | None] = []
        self._stops: dict[str, asyncio.Event] = {}
        self._slo_scores = SLOScores()
        self._changed = asyncio.Event()
        self._view = view()
        self.pools: tuple[PoolSpec, ...] = ()
        self.past, self.remembered = Recent(), Window()
        self.traces: list[RequestTrace] = []
        self.queued = 0
        self.adapters: dict[str, Adapter] = {}

    async def run(
        self,
        request: Request,
        emit: Callable[[Event], None],
        *,
        deadline_s: float | None = None,
        arrived_ns: int | None = None,
    ) -> None:
        async with aclosing(self.generate(request, deadline_s=deadline_s, arrived_ns=arrived_ns)) as events:
            async for event in events:
                emit(event)

    async def generate(
        self, request: Request, *, deadline_s: float | None = None, arrived_ns: int | None = None
    ) -> AsyncGenerator[Event, None]:
        watch = Stopwatch(now_ns, arrived_ns)
        self.requests.append(request)
        self.deadlines.append(deadline_s)
        self.running.add(request.id)
        stop = self._stops[request.id] = asyncio.Event()
        try:
            watch.lap("admission")
            if self.error is not None:
                raise self.error
            yield Accepted(request.id, 0, len(request.prompt), "prefill-0", "decode-0", "the only pair", 0.5, None)
            if self.hold is not None:
                await self.hold.wait()
            tokens = self.script(request)[: request.sampling.max_tokens]
            sent = 0
            while sent < len(tokens) and not stop.is_set():
                part = tuple(tokens[sent : sent + self.chunk])
                yield Delta(
                    part, sent, self._logprobs(request, part), self._prompt_logprobs(request) if not sent else ()
                )
                sent += len(part)
                self.produced[request.id] = sent
                await asyncio.sleep(self.step_s)
                watch.lap("prefill_compute" if sent == len(part) else "decode_compute")
                watch.first_token()
            finish = FinishReason.STOP if stop.is_set() else FinishReason.LENGTH
            yield Completed(finish, len(request.prompt), sent, 16, 1, watch.ledger(), (REPORT,))
        finally:
            self.running.discard(request.id)

    def finish(self, request_id: str) -> None:
        self._stops[request_id].set()

    @property
    def capacity(self) -> ServingCapacity:
        return serving_capacity(self.pools, self._view.workers)

    @property
    def view(self) -> ClusterView:
        return self._view

    @view.setter
    def view(self, view: ClusterView) -> None:
        self._view = view
        self._changed.set()
        self._changed = asyncio.Event()

    async def audit(self) -> ClusterView:
        return replace(self.view, workers=tuple(replace(worker, audit="clean") for worker in self.view.workers))

    def slo_attainment(self) -> GatewayAttainment:
        return replace(self._slo_scores.attainment(Calibration(7, 0.5, 0.875, 12.0, 90.0)), queued=self.queued)

    def count_refusal(self, class_name: str, cause: str) -> None:
        self._slo_scores.ended(Ended("refused", class_name, cause))

    async def warm(self, request: Request, pool: str, ttl_s: float) -> Sequence[CachedPrompt]:
        self.requests.append(request)
        return CachedPrompt("prefill-0", len(request.prompt)), CachedPrompt("prefill-1", problem=f"{pool}, {ttl_s:g} s")

    async def unpin(self, request: Request | None, pool: str) -> Sequence[CachedPrompt]:
        return (CachedPrompt("prefill-0", 0 if request is None else len(request.prompt)),)

    async def measure(self, worker: str, shape: Shape, repeats: int) -> Timings:
        raise NotImplementedError("nothing here can be measured")

    def recent(self) -> Recent:
        return self.past

    def window(self, begin_ns: int, end_ns: int) -> Window:
        return self.remembered

    def oldest_requests(self, most: int) -> Sequence[RequestTrace]:
        return self.traces[:most]

    def view_change(self) -> Awaitable[object]:
        return self._changed.wait()

    @staticmethod
    def _prompt_logprobs(request: Request) -> tuple[TokenLogprobs, ...]:
        if request.sampling.prompt_logprobs is None:
            return ()
        return tuple(TokenLogprobs(-token / 256) for token in request.prompt[1:])

    @staticmethod
    def _logprobs(request: Request, tokens: Sequence[int]) -> tuple[TokenLogprobs, ...]:
        if request.sampling.logprobs is None:
            return ()
        top = tuple((rank, -1.0 - rank) for rank in range(request.sampling.logprobs))
        return tuple(TokenLogprobs(-token / 256, top) for token in tokens)


def renewed(dispatcher: FakeDispatcher, script: Callable[[Request], bytes] = counting) -> FakeDispatcher:
    """The same object as if it were new; it keeps its pools, which `gateway_context` sets."""
    vars(dispatcher).update(vars(FakeDispatcher(script)) | {"pools": dispatcher.pools})
    return dispatcher


def view(state: WorkerState = WorkerState.READY, revision: int = 1, capacity_tokens: int = 4096) -> ClusterView:
    """One prefill and one decode worker, in this state."""
    workers = tuple(
        WorkerView(
            f"{role.value}-0",
            role.value,
            role,
            state,
            f"{role.value}-0.1",
            "node-a",
            4711,
            capacity_tokens=capacity_tokens,
            age_s=0.25,
            parallel=parallel,
            stats=WorkerStats(
                total_blocks=256, free_blocks=200, steps=7, step_s=0.01, bubble_share=(parallel.pipeline - 1) / 4
            ),
        )
        for role, parallel in ((Role.PREFILL, ParallelConfig()), (Role.DECODE, ParallelConfig(2, 2)))
    )
    return ClusterView(revision, "test", MODEL, workers, (LINK,))


def gateway_context(dispatcher: FakeDispatcher, *, model: ModelView = MODEL, **gateway: Any) -> GatewayContext:
    """On any free port of the loopback, unless told otherwise. `max_running` is the decode worker's."""
    engine = EngineConfig(max_running=int(gateway.pop("max_running", 64)))
    pools = (PoolSpec("prefill", Role.PREFILL), PoolSpec("decode", Role.DECODE, engine=engine))
    dispatcher.pools = pools
    options: dict[str, Any] = {"grpc_port": 0} | gateway
    spec = ClusterSpec("bytes", pools, gateway=GatewaySpec(**options))
    return GatewayContext("gateway-0", spec, model, dispatcher)


class InThread:
    """A `Preprocessing` in a thread of this process."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    async def call(self, size: int, function: Callable[..., T], *args: Any) -> T:
        return await asyncio.to_thread(function, self._tokenizer, *args)

    async def check_grammar(self, grammar: Grammar) -> Grammar:
        return await asyncio.to_thread(self._tokenizer.check_grammar, grammar)

    async def aclose(self) -> None:
        """There is nothing to close."""


def gateway_without_servers(context: GatewayContext, tokenizer: Tokenizer) -> Gateway:
    return Gateway(context, tokenizer, InThread(tokenizer))
