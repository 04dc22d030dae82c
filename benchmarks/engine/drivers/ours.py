"""Drives Diptych: one whole worker in this process, from `generate` to its outputs.

A step includes everything but the gateway. The prefix cache makes the untimed prompts of a decode cheap; timed prompts
do not use it.
"""

import asyncio
import itertools
from collections import Counter
from dataclasses import fields
from typing import Any

from benchmarks.engine.drivers.protocol import EngineDriverConfig, PhaseTimer, Task, driver_config, serve
from benchmarks.outputs_reader import OutputsReader
from workers.build import build_worker
from workers.config import EngineConfig, TransferConfig, WorkerConfig
from workers.request import EngineOutputs, FailedOut, Request, SamplingParams, TokensOut
from workers.worker import Worker

SUBSCRIBER = "bench"
UNTIMED_STEPS = 2  # after all sequences decode


def worker_config(config: EngineDriverConfig, executor: str = "torch") -> WorkerConfig:
    """A worker whose step fits a whole timed prompt. Options are fields of `EngineConfig`."""
    defaults = {field.name: field.default for field in fields(EngineConfig)}
    options = {name: _read(value, defaults[name]) for name, value in config.options}
    engine = EngineConfig(**{"kv_blocks": 1024, "max_batch_tokens": 1024, "threads": config.threads} | options)
    backend = "tcp" if executor == "torch" else executor
    transfer = TransferConfig(backends=(backend,), host="127.0.0.1")
    return WorkerConfig("bench", "bench", config.model, engine, transfer=transfer, executor=executor, secret="bench")


def _read(value: str, default: object) -> Any:
    """Convert an option's text to the type of its field."""
    if isinstance(default, bool):
        return value == "true"
    return type(default)(value) if isinstance(default, int | float) else value


class DiptychWorker:
    """A started worker on an event loop that runs only during calls."""

    def __init__(self, config: WorkerConfig) -> None:
        self._runner = asyncio.Runner()
        self.worker: Worker = self._runner.run(build_worker(config).open())
        self._numbers = itertools.count()
        self._reader: OutputsReader = self._runner.run(OutputsReader.open(self.worker, SUBSCRIBER))

    def measure(self, task: Task) -> list[tuple[float, float]]:
        if not task.steps:
            return self._runner.run(self._prefill(task.prompts[0]))
        keys = self.begin(task)
        laps = self.steps(task)
        self.end(keys)
        return laps

    def begin(self, task: Task) -> list[str]:
        """Start the task's sequences; returns their keys after the untimed decode steps."""
        return self._runner.run(self._begin(task))

    def steps(self, task: Task) -> list[tuple[float, float]]:
        return self._runner.run(self._steps(task))

    def end(self, keys: list[str]) -> None:
        self._runner.run(self._end(keys))

    async def _prefill(self, prompt: tuple[int, ...]) -> list[tuple[float, float]]:
        watch = PhaseTimer()
        await self._submit(prompt, 1, fresh=True)
        await self._tokens()
        watch.lap()
        await self._idle()
        return watch.laps

    async def _begin(self, task: Task) -> list[str]:
        # The first sequences already decode while the last prompts are computed; allow for those steps.
        most = task.steps + UNTIMED_STEPS + 2 * len(task.prompts) + 8
        keys = [await self._submit(prompt, most) for prompt in task.prompts]
        given = Counter({key: 0 for key in keys})
        while min(given.values()) <= UNTIMED_STEPS:
            given.update(await self._tokens())
        return keys

    async def _steps(self, task: Task) -> list[tuple[float, float]]:
        watch = PhaseTimer()
        while len(watch.laps) < task.steps:
            given = await self._tokens()
            steps = set(given.values())
            assert len(given) == len(task.prompts) and len(steps) == 1, f"not all sequences decode: {given}"
            watch.lap(steps.pop())
        return watch.laps

    async def _end(self, keys: list[str]) -> None:
        for key in keys:
            await self.worker.cancel(key)
        await self._idle()

    async def _submit(self, prompt: tuple[int, ...], num_tokens: int, *, fresh: bool = False) -> str:
        sampling = SamplingParams(temperature=0.0, seed=0, max_tokens=num_tokens, ignore_eos=True)
        request = Request(str(next(self._numbers)), prompt, sampling, fresh=fresh, reply_to=SUBSCRIBER)
        await self.worker.generate(request)
        return request.key

    async def _tokens(self) -> Counter[str]:
        """How many tokens each sequence got, from the next message that has any."""
        while True:
            given: Counter[str] = Counter()
            for output in (await self._next()).outputs:
                assert not isinstance(output, FailedOut), output.reason
                if isinstance(output, TokensOut):
                    given[output.key] += len(output.tokens)
            if given:
                return given

    async def _idle(self) -> None:
        while (await self._next()).stats.running:
            continue  # wait for the running step; a message has outputs or is a heartbeat

    async def _next(self) -> EngineOutputs:
        return await self._reader.next()


if __name__ == "__main__":
    serve(DiptychWorker(worker_config(driver_config())).measure)
