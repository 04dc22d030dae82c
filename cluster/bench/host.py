"""The program inside `hosted`: serves clusters in this process until its input ends, telling where their doors are.

Its argument is a JSON file: {"way": "ray" | "local" | "door", "specs": [...]}. All clusters share one Ray. "local" is
everything in this process; "door" is the gRPC door alone, over a dispatcher that answers from memory.
"""

import asyncio
import json
import signal
import sys
from collections.abc import AsyncGenerator, Awaitable
from contextlib import AsyncExitStack
from pathlib import Path

from cluster.api.server import open_door
from cluster.events import Accepted, Completed, Delta, Event
from cluster.history import Recent, Window
from cluster.ledger import Stopwatch, now_ns
from cluster.policy.promises import Standing
from cluster.serving import GatewayContext, serve
from cluster.spec import ClusterSpec, Role, parse_spec
from cluster.view import ClusterView, ModelView, WorkerState, WorkerView
from workers.errors import InvalidRequest
from workers.request import FinishReason, Request
from workers.shapes import Shape, Timings

VOCABULARY, CONTEXT, CAPACITY = 1000, 4096, 1 << 20


class InstantDispatcher:
    """A `RequestDispatcher` with no cluster behind it: every token at once, each in an event of its own."""

    def __init__(self, model: ModelView) -> None:
        worker = WorkerView("none", "none", Role.MIXED, WorkerState.READY, capacity_tokens=CAPACITY)
        self.view = ClusterView(1, "door", model, (worker,))

    async def generate(
        self, request: Request, *, deadline_s: float | None = None, arrived_ns: int | None = None
    ) -> AsyncGenerator[Event, None]:
        watch = Stopwatch(now_ns, arrived_ns)
        count = request.sampling.max_tokens or 1
        yield Accepted(request.id, 0, len(request.prompt), "none", "none", "no cluster behind this door")
        for position in range(count):
            await asyncio.sleep(0)  # the door's turn, as between two steps of a worker
            yield Delta((1 + position % (VOCABULARY - 1),), position)
        watch.lap("admission")
        yield Completed(FinishReason.LENGTH, len(request.prompt), count, 0, 1, watch.ledger(), ())

    def finish(self, request_id: str) -> None:
        """Answers end by their length."""

    async def audit(self) -> ClusterView:
        return self.view

    async def measure(self, worker: str, shape: Shape, repeats: int) -> Timings:
        raise InvalidRequest("worker", "there is none behind this door")

    def standing(self) -> Standing:
        return Standing()

    def turned_away(self, class_name: str, cause: str) -> None:
        """Nobody keeps scores here."""

    def recent(self) -> Recent:
        return Recent()

    def remembered(self, begin_ns: int, end_ns: int) -> Window:
        return Window()

    def view_change(self) -> Awaitable[object]:
        return asyncio.get_running_loop().create_future()


async def host(way: str, specs: list[ClusterSpec]) -> None:
    async with AsyncExitStack() as clusters:
        for spec in specs:
            endpoint = await (_open_bare(spec, clusters) if way == "door" else _open(spec, way, clusters))
            print(f"open {spec.name} {endpoint}", flush=True)
        print("all open", flush=True)
        await _told_to_end()


async def _open(spec: ClusterSpec, way: str, clusters: AsyncExitStack) -> str:
    serving = await serve(spec, door=open_door, runtime=way, progress=lambda line: print(line, flush=True))
    clusters.push_async_callback(serving.close)
    return serving.endpoint


async def _open_bare(spec: ClusterSpec, clusters: AsyncExitStack) -> str:
    model = ModelView(spec.model, CONTEXT, VOCABULARY)
    door = open_door(GatewayContext("door", spec, model, InstantDispatcher(model)))
    clusters.push_async_callback(door.close, 0.0)
    return await door.open()


async def _told_to_end() -> None:
    """The end of our input: whoever started us asks for it, or is gone. Or SIGTERM."""
    loop, end = asyncio.get_running_loop(), asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, end.set)
    loop.add_reader(sys.stdin, end.set)
    await end.wait()
    loop.remove_reader(sys.stdin)


if __name__ == "__main__":
    order = json.loads(Path(sys.argv[1]).read_text())
    asyncio.run(host(order["way"], [parse_spec(each) for each in order["specs"]]))
