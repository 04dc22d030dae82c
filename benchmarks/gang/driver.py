"""A worker with one or more ranks that reads one task per line: `python -m benchmarks.gang.driver CONFIG`.

plan NAME NUMBER               execute that plan NUMBER times, one after another, without the engine
prompts COUNT TOKENS           COUNT prompts at once through the engine, up to their first tokens
answers COUNT TOKENS STEPS     COUNT sequences decode for STEPS steps; returns the plan before these, too
"""

import asyncio
import itertools
import json
import sys
from collections import Counter
from dataclasses import asdict
from typing import Literal

import msgspec

from benchmarks.engine.drivers.protocol import MARK, READY
from benchmarks.gang.plan_times import PlanRecorder, PlanTime
from benchmarks.gang.plans import PLANS
from benchmarks.gang.rank_process import ProcessRanks, compute_nothing
from benchmarks.outputs_reader import OutputsReader
from workers.build import build_worker
from workers.config import EngineConfig, ParallelConfig, TransferConfig, WorkerConfig
from workers.costs import LinearCost
from workers.request import EngineOutputs, FailedOut, Request, SamplingParams, TokensOut
from workers.worker import Worker

KV_BLOCKS = 1024
MAX_BATCH_TOKENS = 512
SUBSCRIBER = "bench"
UNTIMED_STEPS = 3  # after all sequences decode
WARM_UP = 1
# Of a simulated worker: 128 tokens take 48 ms, a decode of 16 takes 42 ms, far more than the timers' resolution.
COST = LinearCost(0.010, 0.0003, 0.0, 0.002, 0.0, 0.0, 0.0)


class GangWorkerConfig(msgspec.Struct, frozen=True):
    """The worker to start. "nothing": real ranks that compute nothing; "simulated": no ranks, only their time."""

    model: str
    tensor: int
    pipeline: int
    threads: int
    computes: Literal["model", "nothing", "simulated"] = "model"


class Driver:
    """A started worker that records the time of its plans."""

    def __init__(self, config: GangWorkerConfig) -> None:
        simulated = config.computes == "simulated"
        self._recorder = PlanRecorder()
        self._recorder.install(simulated=simulated)
        if config.computes == "nothing":
            compute_nothing()
        worker = WorkerConfig(
            "bench",
            "bench",
            config.model,
            EngineConfig(kv_blocks=KV_BLOCKS, max_batch_tokens=MAX_BATCH_TOKENS, threads=config.threads),
            ParallelConfig(config.tensor, config.pipeline),
            TransferConfig(backends=("simulated",) if simulated else ("tcp",), host="127.0.0.1"),
            executor="simulated" if simulated else "torch",
            secret="bench",
        )
        self._server = build_worker(worker, launcher=ProcessRanks(config.computes == "model"), cost=COST)
        self._numbers = itertools.count()

    async def start(self) -> None:
        self._worker: Worker = await self._server.open()
        self._reader = await OutputsReader.open(self._worker, SUBSCRIBER)

    async def close(self) -> None:
        await self._reader.close()
        await self._server.close()

    async def answer(self, task: list[str | int]) -> list[PlanTime]:
        match task:
            case ["plan", str(name), int(number)]:
                return await self._plan(name, number)
            case ["prompts", int(count), int(num_tokens)]:
                return await self._prompts(count, num_tokens)
            case ["answers", int(count), int(num_tokens), int(steps)]:
                return await self._answers(count, num_tokens, steps)
        raise ValueError(f"{task} is no task")

    async def _plan(self, name: str, number: int) -> list[PlanTime]:
        for _ in range(WARM_UP + number):
            await self._recorder.executor.execute(PLANS[name])
        return self._recorder.plans[-number:]

    async def _prompts(self, count: int, num_tokens: int) -> list[PlanTime]:
        first = len(self._recorder.plans)
        keys = [await self._submit(num_tokens, 1) for _ in range(count)]
        given: Counter[str] = Counter()
        while len(given) < len(keys):
            given.update(await self._tokens())
        return self._recorder.plans[first:]

    async def _answers(self, count: int, num_tokens: int, steps: int) -> list[PlanTime]:
        most = steps + 2 * UNTIMED_STEPS + 4 * count  # the first decode while the last are still prompts
        keys = [await self._submit(num_tokens, most) for _ in range(count)]
        given = Counter({key: 0 for key in keys})
        while min(given.values()) < UNTIMED_STEPS:
            given.update(await self._tokens())
        first, timed = len(self._recorder.plans), Counter({key: 0 for key in keys})
        while min(timed.values()) < steps:
            timed.update(await self._tokens())
        plans = self._recorder.plans[first - 1 :]
        for key in keys:
            await self._worker.cancel(key)
        while (await self._next()).stats.running:
            continue  # wait for running steps; a message has outputs or is a heartbeat
        return plans

    async def _submit(self, prompt_tokens: int, num_tokens: int) -> str:
        number = next(self._numbers)
        prompt = tuple(7919 * (number * prompt_tokens + index) % 997 + 1 for index in range(prompt_tokens))
        sampling = SamplingParams(temperature=0.0, seed=0, max_tokens=num_tokens, ignore_eos=True)
        request = Request(str(number), prompt, sampling, fresh=True, reply_to=SUBSCRIBER)
        await self._worker.generate(request)
        return request.key

    async def _tokens(self) -> Counter[str]:
        """How many tokens each sequence got, from the next message."""
        given: Counter[str] = Counter()
        for output in (await self._next()).outputs:
            assert not isinstance(output, FailedOut), output.reason
            if isinstance(output, TokensOut):
                given[output.key] += len(output.tokens)
        return given

    async def _next(self) -> EngineOutputs:
        return await self._reader.next()


async def serve(config: GangWorkerConfig) -> None:
    """Run tasks until the input ends. The event loop runs between them, because ranks expect heartbeats."""
    driver = Driver(config)
    await driver.start()
    try:
        print(f"\n{READY}", flush=True)
        while line := await asyncio.to_thread(sys.stdin.readline):
            plans = await driver.answer(json.loads(line))
            print(f"\n{MARK}{json.dumps([asdict(plan) for plan in plans])}", flush=True)
    finally:
        await driver.close()


def main() -> None:
    asyncio.run(serve(msgspec.json.decode(sys.argv[1], type=GangWorkerConfig)))


if __name__ == "__main__":
    main()
