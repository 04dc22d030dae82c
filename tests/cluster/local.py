"""A whole cluster in this process, with simulated or real workers, for tests that look inside."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import wraps
from typing import Any, ParamSpec
from unittest import mock

from cluster.control.controller import Controller
from cluster.dispatch.dispatcher import Dispatcher
from cluster.events import Completed, Delta, Event
from cluster.frontend.context import GatewayContext
from cluster.offline.sim import clock
from cluster.runtime.interface import WorkerOrder
from cluster.runtime.local import LocalRuntime, LocalService
from cluster.serving import serve
from cluster.spec import ClusterSpec, GatewaySpec, HealthSpec, PoolSpec, Role
from diptych.view import ClusterView
from kvtransfer.open import SharedMemory
from workers.build import build_worker
from workers.config import EngineConfig, TransferConfig
from workers.costs import CostModel, LinearCost
from workers.request import Request, SamplingParams
from workers.server import WorkerServer
from workers.worker import Worker

FAST = LinearCost(0.001, 0.00002, 0.0, 0.0005, 0.0, 0.0, 0.0)
VOCAB = 1000
P = ParamSpec("P")


def in_virtual_time(test: Callable[P, Coroutine[Any, Any, None]]) -> Callable[P, None]:
    """The test on the simulator's clock: waiting takes no time, and a busy machine changes nothing.

    For simulated workers in this process, without sockets; what they compute in threads (digests) is computed at once.
    """

    @wraps(test)
    def run(*args: P.args, **kwargs: P.kwargs) -> None:
        with mock.patch.object(clock.VirtualLoop, "run_in_executor", _at_once):
            clock.run(test(*args, **kwargs))

    return run


def _at_once(loop: clock.VirtualLoop, _: object, function: Callable[..., Any], *args: Any) -> "asyncio.Future[Any]":
    done = loop.create_future()
    try:
        done.set_result(function(*args))
    except Exception as error:
        done.set_exception(error)
    return done


def split_spec(
    prefills: int = 1, decodes: int = 1, *, backends: tuple[str, ...] = ("memory",), **engine: Any
) -> ClusterSpec:
    config = EngineConfig(**({"kv_blocks": 130, "max_batch_tokens": 64, "max_running": 16} | engine))
    return ClusterSpec(
        model="simulated",
        executor="simulated",
        pools=(
            PoolSpec("prefill", Role.PREFILL, prefills, engine=config),
            PoolSpec("decode", Role.DECODE, decodes, engine=config),
        ),
        transfer=TransferConfig(backends=backends, lease_s=2.0),
        gateway=GatewaySpec(placement_timeout_s=5.0),
        health=HealthSpec(heartbeat_s=0.05, dead_after_s=1.0),
    )


def mixed_spec(workers: int = 1, **engine: Any) -> ClusterSpec:
    split = split_spec(**engine)
    return replace(split, pools=(PoolSpec("mixed", Role.MIXED, workers, engine=split.pools[0].engine),))


class Cluster:
    """The dispatchers of its gateways, mostly one, and the workers behind them."""

    def __init__(self, dispatchers: list[Dispatcher], runtime: LocalRuntime, controller: Controller) -> None:
        self.dispatchers = dispatchers
        self.runtime = runtime
        self.controller = controller

    @property
    def dispatcher(self) -> Dispatcher:
        return self.dispatchers[0]

    @property
    def workers(self) -> dict[str, Worker]:
        return self.runtime.workers

    async def run(self, request: Request, **options: Any) -> list[Event]:
        return [event async for event in generate(self.dispatcher, request, **options)]

    async def begin(self, request: Request, num_tokens: int) -> "asyncio.Task[list[Event]]":
        """Start a request; returns its task once it has `num_tokens` tokens."""
        events: list[Event] = []
        reached = asyncio.Event()

        async def collect() -> list[Event]:
            async for event in generate(self.dispatcher, request):
                events.append(event)
                if len(tokens_of(events)) >= num_tokens:
                    reached.set()
            return events

        task = asyncio.ensure_future(collect())
        async with asyncio.timeout(20.0):
            await reached.wait()
        return task

    async def until(self, is_so: Callable[[ClusterView], bool], timeout_s: float = 20.0) -> ClusterView:
        """Wait until the gateway sees it."""
        async with asyncio.timeout(timeout_s):
            while not is_so(view := self.dispatcher.view):
                await self.dispatcher.view_change()
        return view

    async def settle(self, timeout_s: float = 5.0) -> None:
        """Wait until every worker is empty, then prove that nothing leaked."""
        async with asyncio.timeout(timeout_s):
            while any(_busy(worker) for worker in self.workers.values()):
                await asyncio.sleep(0.01)
        for worker in self.workers.values():
            worker.engine.check()
            stats = worker.engine.stats()
            assert stats.free_blocks == stats.total_blocks, f"{worker.config.name} leaked: {stats}"


def _busy(worker: Worker) -> bool:
    """Whether it has blocks, sequences or calls. A cancellation arrives a moment after its caller is gone."""
    stats = worker.engine.stats()
    holds = stats.free_blocks != stats.total_blocks or stats.running or stats.waiting or stats.reserved
    return bool(holds or worker._subscribers.routes or worker._kv_fetcher.fetches or worker._reservations)


async def generate(
    dispatcher: Dispatcher, request: Request, *, deadline_s: float | None = None
) -> AsyncGenerator[Event, None]:
    """The events of one request. Closing the iterator cancels it on every worker."""
    events: asyncio.Queue[Event | None] = asyncio.Queue()
    task = asyncio.ensure_future(dispatcher.run(request, events.put_nowait, deadline_s=deadline_s))
    task.add_done_callback(lambda _: events.put_nowait(None))
    try:
        while (event := await events.get()) is not None:
            yield event
        await task
    finally:
        task.cancel()
        await asyncio.wait([task])


@asynccontextmanager
async def cluster(
    spec: ClusterSpec,
    cost: CostModel = FAST,
    build: Callable[[WorkerOrder], WorkerServer] | None = None,
    runtime: LocalRuntime | None = None,
) -> AsyncIterator[Cluster]:
    """Its workers are made by `build`, or run in `runtime`."""
    shared = SharedMemory()

    def build_here(order: WorkerOrder) -> WorkerServer:
        return build_worker(order.config, heartbeat_s=order.heartbeat_s, shared=shared, cost=cost)

    runtime = runtime or LocalRuntime(build or build_here)
    dispatchers: list[Dispatcher] = []
    serving = await serve(spec, runtime=runtime, make_server=lambda context: _FakeServer(context, dispatchers))
    try:
        assert isinstance(serving.controller, LocalService)
        yield Cluster(dispatchers, runtime, serving.controller.target)
    finally:
        await serving.close()


class _FakeServer:
    """No server: hands the dispatcher to the test."""

    http_url = ""

    def __init__(self, context: GatewayContext, dispatchers: list[Dispatcher]) -> None:
        assert isinstance(context.dispatcher, Dispatcher)
        dispatchers.append(context.dispatcher)

    async def open(self) -> str:
        return "nowhere:0"

    async def close(self, grace_s: float) -> None:
        """Nothing listens."""


def request(name: str, length: int = 20, *, max_tokens: int = 8, first: int = 1, **sampling: object) -> Request:
    params = SamplingParams(**({"temperature": 0.0, "seed": 7, "max_tokens": max_tokens} | sampling))  # type: ignore[arg-type]
    return Request(name, tuple((first + index) % (VOCAB - 1) + 1 for index in range(length)), params)


def tokens_of(events: list[Event]) -> list[int]:
    return [token for event in events if isinstance(event, Delta) for token in event.tokens]


def completed(events: list[Event]) -> Completed:
    last = events[-1]
    assert isinstance(last, Completed), f"the stream ended with {last}"
    return last
