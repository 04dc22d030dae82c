"""What JSON schemas cost: in decode steps, and for a stream beside them. `benchmarks.schemas` has their compilation."""

import asyncio
import contextlib
import itertools
import json
import random
import time
from typing import Any

import numpy as np

from benchmarks.figures import BenchmarkClaim, BenchmarkPart, Figure, Progress, ratios, spread
from benchmarks.hosted import MODEL, hosted, mixed_spec
from benchmarks.timed_request import random_prompt, send_request
from cluster.frontend.preprocessing import GRAMMAR_CPU_S
from diptych.client import AsyncClient
from diptych.errors import DiptychError
from kvtransfer.open import SharedMemory
from workers.config import EngineConfig, TransferConfig, WorkerConfig
from workers.executor.rank_loader import open_rank
from workers.model.grammar import has_grammars
from workers.model.store import resolve
from workers.request import EngineOutputs, Grammar, Request, SamplingParams, TokensOut
from workers.worker import Worker

ROUNDS = 5
STREAMS, PROMPT, ANSWER, QUICK_ANSWER = 16, 64, 96, 16
MOST_OF_STEP, MOST_MORE_S = 1.03, 0.005
TIMEOUT_S = 300.0
RECORD_STEPS = "Answers of a record's schema"
STEPS, BESIDE = f"Decode steps of {STREAMS} sequences", "A stream, while another client sends"
# An answer of this schema is longer than any that is measured.
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 8, "maxLength": 40},
        "kind": {"enum": ["small", "medium", "large"]},
        "values": {"type": "array", "items": {"type": "number"}, "minItems": 200},
    },
    "required": ["name", "kind", "values"],
    "additionalProperties": False,
}
# As applications ask for: most of its text is keys.
RECORD = {
    "type": "object",
    "properties": {
        "first_name": {"type": "string", "maxLength": 12},
        "last_name": {"type": "string", "maxLength": 12},
        "date_of_birth": {"type": "string", "format": "date"},
        "is_subscribed": {"type": "boolean"},
        "address": {
            "type": "object",
            "properties": {"street": {"type": "string", "maxLength": 16}, "postal_code": {"type": "integer"}},
            "required": ["street", "postal_code"],
            "additionalProperties": False,
        },
    },
    "required": ["first_name", "last_name", "date_of_birth", "is_subscribed", "address"],
    "additionalProperties": False,
}
RECORDS = 8
CLIENTS = 1  # that sends other requests beside a stream, one after another; the aim is for one
WRONG = "start: T\nT: /((/"  # refused at once
# Compiling it takes longer than any limit. Masks of the other one are the slowest that are known, up to 5 ms.
ENDLESS = "start: T\nT: " + " & ".join(f"/.*a.{{{number}}}b.*/" for number in range(3, 60))
AMBIGUOUS = "start: e\ne: e e | T\nT: /[a-z ]{4}/"
ANSWERED = {"max_tokens": 48, "min_tokens": 48, "temperature": 1.0}
# What the other clients send, and beside what the stream's gaps are then compared.
BASELINES = (
    ("endless grammars", "nothing"),
    ("endless grammars", "wrong grammars"),  # as many requests, without the compilation
    ("new schemas", "short requests"),
    ("slow grammars", "other answers"),
)
MORE = "p99 gap, more than beside "
KINDS = tuple(dict.fromkeys(kind for pair in BASELINES for kind in reversed(pair)))


def measure(rounds: int, quick: bool, progress: Progress) -> BenchmarkPart:
    """Skipped where llguidance is not installed. Raises `ModelError`."""
    if not has_grammars():
        return BenchmarkPart("structured", skipped="llguidance is not installed (the extra `structured`)")
    figures = asyncio.run(_steps(rounds, QUICK_ANSWER if quick else ANSWER, progress))
    share = next(each.spread.median for each in figures if each.column == "with a schema / without")
    figures += asyncio.run(_beside_in_cluster(rounds, QUICK_ANSWER if quick else ANSWER, progress))
    beside_s = max(each.spread.median for each in figures if each.column.startswith(MORE))
    claims = (
        BenchmarkClaim("a step with schemas, of one without", share, MOST_OF_STEP, "x"),
        BenchmarkClaim("a stream's p99 gap, more beside others' grammars than without", beside_s, MOST_MORE_S, "ms"),
    )
    return BenchmarkPart("structured", tuple(figures), claims)


# ---- steps -------------------------------------------------------------------------------------------------------


class _Streams:
    """`STREAMS` requests on a worker in this process, and the times at which their tokens came."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self._left = 0
        self._num_tokens = 0
        self._ended = asyncio.Event()
        self._times: list[float] = []

    def take(self, message: EngineOutputs) -> None:
        tokens = [each for each in message.outputs if isinstance(each, TokensOut)]
        assert len(tokens) == len(message.outputs), f"{message.outputs} instead of tokens"
        self._times.append(time.perf_counter())
        self._num_tokens += sum(len(each.tokens) for each in tokens)
        self._left -= sum(each.finish is not None for each in tokens)
        if not self._left:
            self._ended.set()

    async def tokens_a_step(self, logprobs: int | None) -> float:
        """Of `RECORDS` answers, one after the other. With log probabilities no token is skipped."""
        steps, begun = self._worker.engine.stats().steps, self._num_tokens
        for index in range(RECORDS):
            self._left = 1
            self._ended.clear()
            grammar = Grammar("json", json.dumps(RECORD))
            sampling = SamplingParams(temperature=1.0, seed=index, max_tokens=200, grammar=grammar, logprobs=logprobs)
            prompt = random_prompt(random.Random(index), PROMPT)
            await self._worker.generate(Request(f"{index}-{logprobs}", prompt, sampling, reply_to="bench"))
            async with asyncio.timeout(TIMEOUT_S):
                await self._ended.wait()
        return (self._num_tokens - begun) / (self._worker.engine.stats().steps - steps)

    async def step_s(self, number: int, answer: int, grammar: Grammar | None) -> float:
        """The median step in which all decode."""
        self._left, self._times = STREAMS, []
        self._ended.clear()
        for index in range(STREAMS):
            prompt = random_prompt(random.Random(1000 * number + index), PROMPT)
            sampling = SamplingParams(temperature=1.0, seed=index, max_tokens=answer, ignore_eos=True, grammar=grammar)
            await self._worker.generate(
                Request(f"{number}-{grammar is None}-{index}", prompt, sampling, reply_to="bench")
            )
        async with asyncio.timeout(TIMEOUT_S):
            await self._ended.wait()
        decoding = self._times[-answer // 2 :]  # the last to start has decoded for as long
        return (decoding[-1] - decoding[0]) / (len(decoding) - 1)


async def _steps(rounds: int, answer: int, progress: Progress) -> list[Figure]:
    sizes = EngineConfig(kv_blocks=512, max_batch_tokens=512, threads=1)
    transfer = TransferConfig(backends=("memory",), host="127.0.0.1")
    config = WorkerConfig("bench", "mixed", MODEL, sizes, transfer=transfer, secret="bench")
    rank = await open_rank(config, await asyncio.to_thread(resolve, MODEL), "bench-1", SharedMemory())
    worker = await Worker.open(config, "bench-1", rank, heartbeat_s=0.25)
    streams, grammar = _Streams(worker), Grammar("json", json.dumps(SCHEMA))
    listening = asyncio.ensure_future(worker.subscribe("bench", streams.take))
    taken: dict[bool, list[float]] = {False: [], True: []}
    try:
        await asyncio.sleep(0)
        await streams.step_s(-1, QUICK_ANSWER, grammar)
        for number in range(rounds):
            for has_grammar in (False, True) if number % 2 else (True, False):
                taken[has_grammar].append(await streams.step_s(number, answer, grammar if has_grammar else None))
            progress(f"round {number + 1} of {rounds}: {1e3 * taken[False][-1]:.1f}, {1e3 * taken[True][-1]:.1f} ms")
        jumps = await streams.tokens_a_step(None) / await streams.tokens_a_step(0)
    finally:
        listening.cancel()
        await worker.close()
    return [
        Figure(RECORD_STEPS, MODEL, "tokens a step, of those without forced ones", "x", spread([jumps])),
        Figure(STEPS, MODEL, "without", "ms", spread(taken[False])),
        Figure(STEPS, MODEL, "with a schema", "ms", spread(taken[True])),
        Figure(STEPS, MODEL, "with a schema / without", "x", ratios(taken[True], taken[False])),
    ]


# ---- a stream beside them ----------------------------------------------------------------------------------------


async def _beside_in_cluster(rounds: int, answer: int, progress: Progress) -> list[Figure]:
    """One worker, which computes a stream; `CLIENTS` other clients send requests."""
    gaps: dict[str, list[float]] = {kind: [] for kind in KINDS}
    with hosted([mixed_spec("structured")]) as clusters:
        async with AsyncClient(clusters.endpoints["structured"]) as client:
            await client.wait_ready(60.0)
            await _answer(client, 0, _options("new schemas", "first"))  # starts the gateway's processes
            for number in range(rounds):
                for kind in KINDS[:: -1 if number % 2 else 1]:
                    others = [asyncio.ensure_future(_requests(client, kind, f"{number}-{at}")) for at in range(CLIENTS)]
                    times = (await send_request(client, random_prompt(random.Random(number), PROMPT), answer)).times
                    for each in others:
                        each.cancel()
                    await asyncio.wait(others)
                    each_s = [later - sooner for sooner, later in itertools.pairwise(times.token_s)]
                    gaps[kind].append(float(np.quantile(each_s, 0.99)))
                shown = ", ".join(f"{kind} {1e3 * each[-1]:.0f}" for kind, each in gaps.items())
                progress(f"round {number + 1} of {rounds}: {shown} ms")
    figures = [Figure(BESIDE, kind, "p99 gap", "ms", spread(each)) for kind, each in gaps.items()]
    for kind, baseline in BASELINES:
        more = [one - other for one, other in zip(gaps[kind], gaps[baseline], strict=True)]
        figures.append(Figure(BESIDE, kind, f"{MORE}{baseline}", "ms", spread(more)))
    return figures


def _options(kind: str, name: str) -> dict[str, Any]:
    """No two grammars are the same, or they would be known."""
    match kind:
        case "wrong grammars":
            return {"lark": f"{WRONG}\n// {name}"}
        case "endless grammars":
            return {"lark": f"{ENDLESS}\n// {name}"}
        case "new schemas":
            return {"json_schema": json.dumps(SCHEMA | {"title": name}), "max_tokens": 2}
        case "slow grammars":
            return {"lark": f"{AMBIGUOUS}\n// {name}", **ANSWERED}
        case "other answers":
            return ANSWERED
        case _:
            return {"max_tokens": 2}


async def _requests(client: AsyncClient, kind: str, name: str) -> None:
    for index in itertools.count() if kind != "nothing" else ():
        with contextlib.suppress(DiptychError):  # endless ones are refused, slow ones may reach a limit
            await _answer(client, index, _options(kind, f"{name}-{index}"))
        if kind == "wrong grammars":
            await asyncio.sleep(CLIENTS * GRAMMAR_CPU_S)  # as endless ones take, one after another


async def _answer(client: AsyncClient, index: int, options: dict[str, Any]) -> None:
    async for _ in client.generate(random_prompt(random.Random(index), 16), **options):
        pass
