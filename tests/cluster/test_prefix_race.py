"""A prompt is computed while its prefix arrives from another worker: real bytes, real models, one process."""

import asyncio
from dataclasses import replace

from kvtransfer.open import SharedMemory
from kvtransfer.transport import PullOrder, Read
from tests.cluster.pairs import colocated, parallel_worker
from tests.cluster.test_remote_prefix_fetch import ENGINE, PAIRS, PROMPT, ended, model
from workers.config import EngineConfig, ParallelConfig
from workers.engine.step import StepPlan, StepResult
from workers.request import Request, SamplingParams
from workers.worker import Worker

__all__ = ["model"]

LONGER = Request("longer", (*PROMPT, *range(5, 25)), SamplingParams(temperature=0.0, seed=1, max_tokens=9))


class Gate:
    """No read of this worker ends before its first step has begun, which takes until `most` of them have ended."""

    def __init__(self, worker: Worker, most: int) -> None:
        self.orders: list[PullOrder] = []
        self._worker = worker
        self._executor = worker._executor
        self._pull, self._execute = self._executor.pull, self._executor.execute
        self._most = most
        self._is_open = asyncio.Event()
        self.has_begun = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []
        self.computed: list[int] = []  # positions
        self._executor.pull, self._executor.execute = self.pull, self.execute

    def pull(self, order: PullOrder) -> Read:
        self.orders.append(order)
        loop = asyncio.get_running_loop()
        late, read = Read(loop.create_future(), loop.create_future()), self._pull(order)
        self._tasks.append(asyncio.ensure_future(self._delay(read, late)))
        return late

    async def _delay(self, read: Read, late: Read) -> None:
        await self._is_open.wait()
        await read.settled
        late.settled.set_result(None)
        if late.done.cancelled():
            return
        if (error := read.done.exception()) is not None:
            late.done.set_exception(error)
        else:
            late.done.set_result(read.done.result())

    async def execute(self, plan: StepPlan) -> StepResult:
        self.computed += [chunk.first_position + index for chunk in plan.chunks for index in range(len(chunk.tokens))]
        result = await self._execute(plan)
        if not self.has_begun.is_set():
            self.has_begun.set()
            await self.until_ended()
        return result

    async def until_asked(self, count: int) -> None:
        async with asyncio.timeout(30.0):
            while len(self.orders) < count:
                await asyncio.sleep(0.001)

    async def until_ended(self) -> None:
        self._is_open.set()
        async with asyncio.timeout(30.0):
            while len(self._worker.engine.prefix_fetches) and sum(each.done() for each in self._tasks) < self._most:
                await asyncio.sleep(0.001)


async def pair(model: str, owner: tuple[int, int], reader: tuple[int, int], engine: EngineConfig) -> list[Worker]:
    shared, backends = SharedMemory(), ("tcp",)
    settings = (("owner", owner, ENGINE), ("reader", reader, engine))
    return [
        await parallel_worker(name, model, ParallelConfig(*each), sizes, shared, backends, prefix_tokens=24)
        for name, each, sizes in settings
    ]


async def check(workers: list[Worker]) -> None:
    for worker in workers:
        worker.engine.expire(float("inf"))
        await worker.check()
        stats = worker.engine.stats()
        assert stats.free_blocks == stats.total_blocks and not len(worker.engine.prefix_fetches)


@PAIRS
async def test_what_has_arrived_from_the_back_is_not_computed(
    model: str, owner: tuple[int, int], reader: tuple[int, int], engine: EngineConfig
) -> None:
    holder, taker = workers = await pair(model, owner, reader, engine)
    try:
        await colocated(holder, [replace(LONGER, prompt=PROMPT, id="first")])
        (expected,) = await colocated(taker, [LONGER])
        await taker.check()
        taker.engine.pool.clear_cache()
        ticket = await holder.hold_prefix(LONGER)
        assert ticket is not None and ticket.num_tokens == 64
        gate = Gate(taker, most=3)
        again = replace(LONGER, id="again")
        assert await taker.fetch_prefix(again, ticket, 30.0) == 64
        await gate.until_asked(2)
        assert await colocated(taker, [again]) == [expected]
        await ended(taker)
        first, second, *_ = gate.orders
        assert (first.first_token, second.first_token) == (0, first.num_tokens), "from the front until then"
        computed = [position for position in gate.computed if position < len(LONGER.prompt)]
        fetched = taker.engine.pool.hits.tokens["fetched"]
        assert fetched < 64, "a part of it was computed"
        assert len(computed) == len(set(computed)) == len(LONGER.prompt) - fetched
        await check(workers)
    finally:
        for worker in workers:
            await worker.close()


@PAIRS
async def test_an_owner_that_ends_in_the_middle_of_a_fetch_costs_no_token(
    model: str, owner: tuple[int, int], reader: tuple[int, int], engine: EngineConfig
) -> None:
    holder, taker = await pair(model, owner, reader, engine)
    try:
        await colocated(holder, [replace(LONGER, prompt=PROMPT, id="first")])
        (expected,) = await colocated(taker, [LONGER])
        await taker.check()
        taker.engine.pool.clear_cache()
        ticket = await holder.hold_prefix(LONGER)
        assert ticket is not None
        gate = Gate(taker, most=99)
        again = replace(LONGER, id="again")
        assert await taker.fetch_prefix(again, ticket, 30.0) == 64
        answering = asyncio.ensure_future(colocated(taker, [again]))
        await gate.until_asked(1)
        await holder.close()
        assert await answering == [expected]
        await ended(taker)
        await check([taker])
    finally:
        await taker.close()


async def test_a_canceled_prompt_ends_its_fetch_and_what_arrived_stays(model: str) -> None:
    holder, taker = workers = await pair(model, (1, 1), (1, 1), ENGINE)
    try:
        await colocated(holder, [replace(LONGER, prompt=PROMPT, id="first")])
        ticket = await holder.hold_prefix(LONGER)
        assert ticket is not None
        gate = Gate(taker, most=2)
        assert await taker.fetch_prefix(LONGER, ticket, 30.0) == 64
        await gate.until_ended()
        await taker.cancel(LONGER.key)
        await ended(taker)
        assert taker.engine.cached_tokens(LONGER) >= 16
        await check(workers)
    finally:
        for worker in workers:
            await worker.close()
