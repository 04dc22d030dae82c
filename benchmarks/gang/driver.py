"""A whole worker with one rank or several, asked line by line: `python -m benchmarks.gang.driver ORDER`.

plan NAME NUMBER               so many executions of that plan, one after another, past the engine
prompts COUNT TOKENS           all at once through the engine, to their first tokens
answers COUNT TOKENS STEPS     so many sequences decode: the plan before, and those while all do
"""

import asyncio
import itertools
import json
import sys
from collections import Counter
from dataclasses import asdict
from typing import Any, Literal

import msgspec

from benchmarks.engine.drivers.lines import MARK, READY
from benchmarks.gang.members import ProcessRanks, compute_nothing
from benchmarks.gang.plans import PLANS
from benchmarks.gang.recorded import Executed, Recorder
from workers.build import build_worker
from workers.config import EngineConfig, ParallelConfig, TransferConfig, WorkerConfig
from workers.costs import LinearCost
from workers.request import FailedOut, Request, SamplingParams, TokensOut
from workers.worker import Worker

KV_BLOCKS = 1024
MAX_BATCH_TOKENS = 512
SUBSCRIBER = "bench"
UNTIMED_STEPS = 3  # of a decode, once all sequences decode
WARM_UP = 1
# A modelled worker's: 128 tokens take 48 ms, a decode of 16 takes 42 ms, so that timers are no matter.
COST = LinearCost(0.010, 0.0003, 0.0, 0.002, 0.0, 0.0, 0.0)


class Order(msgspec.Struct, frozen=True):
    """What to run. "nothing": real ranks whose model is never asked; "modelled": no ranks, only their time."""

    model: str
    tensor: int
    pipeline: int
    threads: int
    computes: Literal["model", "nothing", "modelled"] = "model"


class Driver:
    """A started worker, the clocks around its plans, and the loop that both live on."""

    def __init__(self, order: Order) -> None:
        modelled = order.computes == "modelled"
        self._recorder = Recorder()
        self._recorder.install(modelled=modelled)
        if order.computes == "nothing":
            compute_nothing()
        config = WorkerConfig(
            "bench",
            "bench",
            order.model,
            EngineConfig(kv_blocks=KV_BLOCKS, max_batch_tokens=MAX_BATCH_TOKENS, threads=order.threads),
            ParallelConfig(order.tensor, order.pipeline),
            TransferConfig(backends=("modelled",) if modelled else ("tcp",), host="127.0.0.1"),
            executor="modelled" if modelled else "torch",
            secret="bench",
        )
        self._server = build_worker(config, launcher=ProcessRanks(order.computes == "model"), cost=COST)
        self._numbers = itertools.count()
        self._received = 0

    async def start(self) -> None:
        self._worker: Worker = await self._server.open()

    async def close(self) -> None:
        await self._server.close()

    async def answer(self, task: list[str | int]) -> list[Executed]:
        match task:
            case ["plan", str(name), int(number)]:
                return await self._plan(name, number)
            case ["prompts", int(count), int(num_tokens)]:
                return await self._prompts(count, num_tokens)
            case ["answers", int(count), int(num_tokens), int(steps)]:
                return await self._answers(count, num_tokens, steps)
        raise ValueError(f"{task} is no task")

    async def _plan(self, name: str, number: int) -> list[Executed]:
        for _ in range(WARM_UP + number):
            await self._recorder.executor.execute(PLANS[name])
        return self._recorder.plans[-number:]

    async def _prompts(self, count: int, num_tokens: int) -> list[Executed]:
        first = len(self._recorder.plans)
        keys = [await self._ask(num_tokens, 1) for _ in range(count)]
        given: Counter[str] = Counter()
        while len(given) < len(keys):
            given.update(await self._tokens())
        return self._recorder.plans[first:]

    async def _answers(self, count: int, num_tokens: int, steps: int) -> list[Executed]:
        most = steps + 2 * UNTIMED_STEPS + 4 * count  # the first decode while the last are still prompts
        keys = [await self._ask(num_tokens, most) for _ in range(count)]
        given = Counter({key: 0 for key in keys})
        while min(given.values()) < UNTIMED_STEPS:
            given.update(await self._tokens())
        first, timed = len(self._recorder.plans), Counter({key: 0 for key in keys})
        while min(timed.values()) < steps:
            timed.update(await self._tokens())
        plans = self._recorder.plans[first - 1 :]
        for key in keys:
            await self._worker.cancel(key)
        while (await self._bundle()).stats.running:
            continue  # steps that began end; every poll waits for news or a heartbeat
        return plans

    async def _ask(self, prompt_tokens: int, num_tokens: int) -> str:
        number = next(self._numbers)
        prompt = tuple(7919 * (number * prompt_tokens + index) % 997 + 1 for index in range(prompt_tokens))
        sampling = SamplingParams(temperature=0.0, seed=0, max_tokens=num_tokens, ignore_eos=True)
        request = Request(str(number), prompt, sampling, fresh=True, reply_to=SUBSCRIBER)
        await self._worker.generate(request)
        return request.key

    async def _tokens(self) -> Counter[str]:
        """How many tokens each sequence got, from the next bundle."""
        given: Counter[str] = Counter()
        for output in (await self._bundle()).outputs:
            assert not isinstance(output, FailedOut), output.reason
            if isinstance(output, TokensOut):
                given[output.key] += len(output.tokens)
        return given

    async def _bundle(self) -> Any:
        bundle = await self._worker.poll(SUBSCRIBER, self._received)
        self._received = bundle.number
        return bundle


async def serve(order: Order) -> None:
    """Answer tasks until the input ends. The loop goes on between them: ranks must hear of their leader."""
    driver = Driver(order)
    await driver.start()
    try:
        print(f"\n{READY}", flush=True)
        while line := await asyncio.to_thread(sys.stdin.readline):
            plans = await driver.answer(json.loads(line))
            print(f"\n{MARK}{json.dumps([asdict(plan) for plan in plans])}", flush=True)
    finally:
        await driver.close()


def main() -> None:
    asyncio.run(serve(msgspec.json.decode(sys.argv[1], type=Order)))


if __name__ == "__main__":
    main()
