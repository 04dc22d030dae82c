"""What JSON schemas cost: to check, for each token's mask, in decode steps, and for a stream beside them.

DIPTYCH_SCHEMAS names a folder of schemas, for example one of JSONSchemaBench's; without it only the steps are measured.
Answers are random tokens that the masks allow; ends of strings and lists are preferred, or few answers would end.
"""

import asyncio
import contextlib
import itertools
import json
import os
import random
import time
from collections import Counter
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.figures import BenchmarkClaim, BenchmarkPart, Figure, Progress, ratios, spread
from benchmarks.hosted import MODEL, hosted, mixed_spec
from benchmarks.timed_request import random_prompt, send_request
from cluster.events import Rejected
from cluster.frontend.preprocessing import PreprocessingPool
from cluster.frontend.servers import load_tokenizer
from diptych.client import AsyncClient
from diptych.errors import DiptychError
from kvtransfer.open import SharedMemory
from workers.config import EngineConfig, TransferConfig, WorkerConfig
from workers.errors import InvalidRequest
from workers.executor.grammar_masks import unpacked
from workers.executor.opening import open_rank
from workers.executor.solo import SoloExecutor
from workers.model.grammar import GrammarCompiler, grammar_compiler, has_grammars
from workers.model.store import resolve
from workers.model.tokenizer import ModelTokenizer
from workers.request import MOST_GRAMMAR_BYTES, Bundle, Grammar, Request, SamplingParams, TokensOut
from workers.worker import Worker

ROUNDS = 5
VARIABLE = "DIPTYCH_SCHEMAS"
STREAMS, PROMPT, ANSWER, QUICK_ANSWER = 16, 64, 96, 16
LONGEST_ANSWER = 600  # tokens of a random answer
END_PREFERRED = 0.7
MOST_SCHEMAS, QUICK_SCHEMAS = 1000, 20
MOST_OF_STEP, MOST_MORE_S = 1.03, 0.005
TIMEOUT_S = 300.0
RECORD_STEPS = "Answers of a record's schema"
SCHEMAS, STEPS, BESIDE = "Schemas", f"Decode steps of {STREAMS} sequences", "A stream, while another client sends"
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
HOSTILE = "(a{1,300}b{1,300}){1,300}"


def measure(rounds: int, quick: bool, progress: Progress) -> BenchmarkPart:
    """Skipped where llguidance is not installed. Raises `ModelError`."""
    if not has_grammars():
        return BenchmarkPart("structured", skipped="llguidance is not installed (the extra `structured`)")
    folder, notes = os.environ.get(VARIABLE), []
    figures = asyncio.run(_steps(rounds, QUICK_ANSWER if quick else ANSWER, progress))
    share = next(each.spread.median for each in figures if each.column == "with a schema / without")
    figures += asyncio.run(_beside_in_cluster(rounds, QUICK_ANSWER if quick else ANSWER, progress))
    if folder is None:
        notes.append(f"{VARIABLE} names no folder of schemas: none were checked")
    else:
        files = sorted(Path(folder).glob("**/*.json"))
        files = random.Random(1).sample(files, min(QUICK_SCHEMAS if quick else MOST_SCHEMAS, len(files)))
        figures += asyncio.run(_schemas(files, progress))
    beside_s = next(each.spread.median for each in figures if each.column == "p99 gap, more")
    claims = (
        BenchmarkClaim("a step with schemas, of one without", share, MOST_OF_STEP, "x"),
        BenchmarkClaim("a stream's p99 gap, more beside new grammars than beside others", beside_s, MOST_MORE_S, "ms"),
    )
    return BenchmarkPart("structured", tuple(figures), claims, tuple(notes))


# ---- steps -------------------------------------------------------------------------------------------------------


class _Streams:
    """`STREAMS` requests on a worker in this process, and the times at which their tokens came."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self._left = 0
        self._num_tokens = 0
        self._ended = asyncio.Event()
        self._times: list[float] = []

    def take(self, bundle: Bundle) -> None:
        tokens = [each for each in bundle.outputs if isinstance(each, TokensOut)]
        assert len(tokens) == len(bundle.outputs), f"{bundle.outputs} instead of tokens"
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
    facts, rank = await open_rank(config, await asyncio.to_thread(resolve, MODEL), "bench-1", SharedMemory())
    worker = await Worker.open(config, "bench-1", SoloExecutor(facts, rank), heartbeat_s=0.25)
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
    """One worker; another client sends short requests one after another, plain or each with a grammar of its own."""
    gaps: dict[bool, list[float]] = {False: [], True: []}
    with hosted([mixed_spec("structured")]) as clusters:
        async with AsyncClient(clusters.endpoints["structured"]) as client:
            await client.wait_ready(60.0)
            for number in range(rounds):
                for has_grammars in (False, True) if number % 2 else (True, False):
                    other = asyncio.ensure_future(_requests(client, has_grammars, number))
                    times = (await send_request(client, random_prompt(random.Random(number), PROMPT), answer)).times
                    other.cancel()
                    await asyncio.wait([other])
                    each_s = [later - sooner for sooner, later in itertools.pairwise(times.token_s)]
                    gaps[has_grammars].append(float(np.quantile(each_s, 0.99)))
                progress(f"round {number + 1} of {rounds}: {1e3 * gaps[False][-1]:.0f}, {1e3 * gaps[True][-1]:.0f} ms")
    more = [one - other for one, other in zip(gaps[True], gaps[False], strict=True)]
    return [
        Figure(BESIDE, "plain requests", "p99 gap", "ms", spread(gaps[False])),
        Figure(BESIDE, "new grammars", "p99 gap", "ms", spread(gaps[True])),
        Figure(BESIDE, "new grammars", "p99 gap, more", "ms", spread(more)),
    ]


async def _requests(client: AsyncClient, has_grammars: bool, number: int) -> None:
    """Every fourth grammar is hostile: the gateway refuses it."""
    for index in itertools.count():
        options: dict[str, Any] = {"max_tokens": 2, "temperature": 0.0}
        if has_grammars and index % 4 == 3:
            options["regex"] = HOSTILE
        elif has_grammars:
            options["json_schema"] = json.dumps(SCHEMA | {"title": f"{number}-{index}"})
        with contextlib.suppress(DiptychError):
            async for _ in client.generate(random_prompt(random.Random(index), 16), **options):
                pass


# ---- schemas -----------------------------------------------------------------------------------------------------


async def _schemas(files: Sequence[Path], progress: Progress) -> list[Figure]:
    """Check each as a gateway does, and draw an answer for those that pass."""
    from jsonschema.validators import validator_for

    model = resolve(MODEL).path
    gateway = PreprocessingPool(partial(load_tokenizer, MODEL, 0))
    answers = RandomAnswers(grammar_compiler(model), ModelTokenizer(model))
    checks: list[float] = []
    results: Counter[str] = Counter()
    for number, file in enumerate(files):
        begun = time.perf_counter()
        try:
            text = file.read_text()
            if len(text) > MOST_GRAMMAR_BYTES:
                results["too large"] += 1
                continue
            await gateway.check_grammar(Grammar("json", text))
        except (InvalidRequest, Rejected) as error:
            progress(f"{file.name}: {error}")
            results["refused"] += 1
            continue
        finally:
            checks.append(time.perf_counter() - begun)
        results["accepted"] += 1
        answer = answers.draw(Grammar("json", text), random.Random(number))
        if answer is None:
            results["not ended"] += 1
            continue
        schema = json.loads(text)
        try:
            validator_for(schema)(schema).validate(json.loads(answer))
            results["valid"] += 1
        except Exception as error:
            progress(f"{file.name}: {type(error).__name__} {str(error)[:200]!r} in {answer[:200]!r}")
            results["not valid"] += 1
    await gateway.aclose()
    masks = np.array(answers.mask_s)
    row = f"of {len(files)}"
    return [
        *(Figure(SCHEMAS, row, name, "n", spread([count])) for name, count in results.items()),
        Figure(SCHEMAS, row, "check p50", "ms", spread([float(np.median(checks))])),
        Figure(SCHEMAS, row, "check p99", "ms", spread([float(np.quantile(checks, 0.99))])),
        Figure(SCHEMAS, row, "mask mean", "us", spread([float(masks.mean())])),
        Figure(SCHEMAS, row, "mask p99", "us", spread([float(np.quantile(masks, 0.99))])),
    ]


class RandomAnswers:
    """Draws tokens that masks allow; `mask_s` has the seconds of each mask."""

    def __init__(self, compiler: GrammarCompiler, tokenizer: ModelTokenizer) -> None:
        self.mask_s: list[float] = []
        self._compiler = compiler
        self._tokenizer = tokenizer
        ends = [tokenizer.encode(text) for text in ('"', "}", "]", '",', '"}', "},", "],", "0")]
        self._ends = {each[0] for each in ends if len(each) == 1}

    def draw(self, grammar: Grammar, source: random.Random) -> str | None:
        """An answer that has ended; None: it has not, at its longest."""
        matcher = self._compiler.matcher(grammar)
        tokens: list[int] = []
        while len(tokens) < LONGEST_ANSWER:
            begun = time.perf_counter()
            mask = np.frombuffer(matcher.compute_bitmask(), np.int32)
            self.mask_s.append(time.perf_counter() - begun)
            allowed = np.flatnonzero(unpacked(mask, 32 * len(mask))).tolist()
            ends = self._ends.intersection(allowed)
            token = source.choice(sorted(ends) if ends and source.random() < END_PREFERRED else allowed)
            if not matcher.consume_token(token):
                raise RuntimeError(f"a matcher refuses a token that its mask allows: {matcher.get_error()[:200]}")
            tokens.append(token)
            if matcher.is_stopped():
                return self._tokenizer.decode(tokens)
        return None
