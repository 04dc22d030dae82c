"""A gateway without a cluster: its dispatcher answers from memory, at once or at a fixed pace.

As a program it serves gRPC and HTTP until its input ends: `python -m benchmarks.stub_gateway PERIOD_S`.
"""

import asyncio
import sys
from collections.abc import AsyncGenerator, Awaitable, Callable
from functools import partial

from benchmarks.shutdown import wait_for_shutdown
from cluster.dispatch.capacity import ServingCapacity
from cluster.events import Accepted, Completed, Delta, Event
from cluster.frontend.context import GatewayContext
from cluster.frontend.grpc.server import GrpcServer
from cluster.frontend.servers import load_tokenizer
from cluster.observe.ledger import Stopwatch, now_ns
from cluster.policy.slo_attainment import GatewayAttainment
from cluster.spec import ClusterSpec, GatewaySpec, PoolSpec, Role
from diptych.history import Recent, RequestTrace, Window
from diptych.shapes import Shape, Timings
from diptych.view import Adapter, CachedPrompt, ClusterView, ModelView, WorkerState, WorkerView
from workers.errors import InvalidRequest
from workers.request import FinishReason, Request

MODEL, VOCABULARY, CONTEXT, CAPACITY = "smollm2-135m", 49_152, 4096, 1 << 20
MAX_REQUESTS = 4096  # requests in flight
TOKEN, TEXT = 970, " way"  # an ordinary one of the vocabulary


class StubDispatcher:
    """A `RequestDispatcher` without a cluster: one event per token, `period_s` apart."""

    def __init__(self, model: ModelView, period_s: float = 0.0) -> None:
        worker = WorkerView("none", "none", Role.MIXED, WorkerState.READY, capacity_tokens=CAPACITY)
        self.view = ClusterView(1, "server", model, (worker,))
        self.capacity = ServingCapacity(CAPACITY, CAPACITY, MAX_REQUESTS, 1)
        self.adapters: dict[str, Adapter] = {}
        self._tokens = (TOKEN,)
        self._period_s = period_s

    async def run(
        self,
        request: Request,
        emit: Callable[[Event], None],
        *,
        deadline_s: float | None = None,
        arrived_ns: int | None = None,
    ) -> None:
        watch = Stopwatch(now_ns, arrived_ns)
        count = request.sampling.max_tokens or 1
        emit(Accepted(request.id, 0, len(request.prompt), "none", "none", "stub gateway"))
        async for position in paced(count, self._period_s):
            emit(Delta(self._tokens, position))
        watch.lap("admission")
        emit(Completed(FinishReason.LENGTH, len(request.prompt), count, 0, 1, watch.ledger(), ()))

    def finish(self, request_id: str) -> None:
        """Answers end at their length."""

    async def audit(self) -> ClusterView:
        return self.view

    async def measure(self, worker: str, shape: Shape, repeats: int) -> Timings:
        raise InvalidRequest("worker", "a stub gateway has no workers")

    async def warm(self, request: Request, pool: str, ttl_s: float) -> tuple[CachedPrompt, ...]:
        return ()

    async def unpin(self, request: Request | None, pool: str) -> tuple[CachedPrompt, ...]:
        return ()

    def slo_attainment(self) -> GatewayAttainment:
        return GatewayAttainment()

    def count_refusal(self, class_name: str, cause: str) -> None:
        """A stub gateway keeps no scores."""

    def recent(self) -> Recent:
        return Recent()

    def window(self, begin_ns: int, end_ns: int) -> Window:
        return Window()

    def oldest_requests(self, most: int) -> list[RequestTrace]:
        return []

    def view_change(self) -> Awaitable[object]:
        return asyncio.get_running_loop().create_future()


async def paced(count: int, period_s: float) -> AsyncGenerator[int, None]:
    """Yield 0, 1, ... below `count`, the first at once, then one per period."""
    loop = asyncio.get_running_loop()
    start_s = loop.time()
    for position in range(count):
        await asyncio.sleep(max(0.0, start_s + position * period_s - loop.time()))
        yield position


async def serve(period_s: float) -> None:
    from cluster.frontend.http.server import HttpServer  # needs the http extra

    model = ModelView(MODEL, CONTEXT, VOCABULARY)
    gateway = GatewaySpec(grpc_port=0, http_port=0, max_requests=MAX_REQUESTS)
    spec = ClusterSpec(MODEL, (PoolSpec("mixed", Role.MIXED),), "servers", gateway=gateway)
    context = GatewayContext("servers", spec, model, StubDispatcher(model, period_s))
    grpc = GrpcServer(context, partial(load_tokenizer, model.name, model.context_length))
    endpoint = await grpc.open()
    http = HttpServer(grpc.models, grpc.guard)
    try:
        print(f"open {endpoint} {await http.open()}", flush=True)
        await wait_for_shutdown()
    finally:
        await http.drain(0.0)
        await grpc.close(0.0)
        await http.close()


if __name__ == "__main__":
    asyncio.run(serve(float(sys.argv[1])))
