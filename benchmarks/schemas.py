"""JSON schemas by set: which are accepted and why others are not, what compiling and masks take, and valid answers.

DIPTYCH_SCHEMAS (or --schemas) names a folder, such as `data` of a checkout of JSONSchemaBench; each folder in it that
has schemas is a set. The package `jsonschema` checks two answers to each: random tokens that the masks allow, and what
SmolLM2-135M answers over HTTP. Ends of strings and lists are preferred, or few would end; over HTTP that is a bias of
quotes, which end strings wherever they are, and against commas. An answer that has not ended at its longest says
nothing, and is counted apart.
"""

import asyncio
import json
import os
import random
import re
import time
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import aiohttp
import numpy as np

from benchmarks.figures import BenchmarkClaim, BenchmarkPart, Figure, Progress, spread
from benchmarks.frontend import served
from benchmarks.hosted import MODEL, mixed_spec
from cluster.events import Rejected
from cluster.frontend.preprocessing import PreprocessingPool
from cluster.frontend.servers import load_tokenizer
from cluster.spec import GatewaySpec
from workers.errors import InvalidRequest
from workers.executor.grammar_masks import unpacked
from workers.model.grammar import GrammarCompiler, grammar_compiler, has_grammars
from workers.model.store import resolve
from workers.model.tokenizer import ModelTokenizer
from workers.request import Grammar, SamplingParams

VARIABLE = "DIPTYCH_SCHEMAS"
MOST_OF_SET, QUICK_OF_SET = 1000, 5  # schemas
MAX_OVER_HTTP = 250
LONGEST_ANSWER = 600  # tokens of a random answer
END_PREFERRED, END_BIAS = 0.7, 10.0
MAX_TOKENS, STREAMS, TIMEOUT_S = 300, 12, 300.0  # of the answers over HTTP
PROMPT_CHARS = 500
RESULTS, REFUSED = "Schemas", "Refused schemas, by reason"


@dataclass(slots=True)
class SchemaSet:
    """The results of one set. `accepted`: texts by file name; `compiled`: as workers get them.
    `outcomes`: numbers by column.
    """

    files: Sequence[Path]
    accepted: dict[str, str] = field(default_factory=dict)
    compiled: dict[str, Grammar] = field(default_factory=dict)
    refused: Counter[str] = field(default_factory=Counter)
    checks_s: list[float] = field(default_factory=list)
    masks_s: Sequence[float] = ()
    outcomes: Counter[str] = field(default_factory=Counter)


def measure(rounds: int, quick: bool, progress: Progress) -> BenchmarkPart:
    """Skipped without schemas, and where llguidance is not installed. Raises `ModelError`."""
    folder = os.environ.get(VARIABLE)
    if folder is None or not has_grammars():
        why = "llguidance is not installed (the extra `structured`)" if folder else "--schemas names no folder"
        return BenchmarkPart("schemas", skipped=why)
    return asyncio.run(_measure(schema_sets(Path(folder), QUICK_OF_SET if quick else MOST_OF_SET), progress))


def schema_sets(folder: Path, most: int) -> dict[str, SchemaSet]:
    """The sets in a folder, by name; at most this many schemas of each, evenly over their names."""
    found: defaultdict[str, list[Path]] = defaultdict(list)
    for file in sorted(folder.glob("**/*.json")):
        found[file.parent.relative_to(folder).as_posix()].append(file)
    return {name: SchemaSet([files[at] for at in _evenly(len(files), most)]) for name, files in found.items()}


async def _measure(sets: Mapping[str, SchemaSet], progress: Progress) -> BenchmarkPart:
    model = resolve(MODEL).path
    compiler, tokenizer = grammar_compiler(model), ModelTokenizer(model)
    gateway = PreprocessingPool(partial(load_tokenizer, MODEL, 0))
    try:
        await gateway.check_grammar(Grammar("json", "{}"))  # starts its process
        for name, each in sets.items():
            await _check(each, gateway, progress)
            answers = RandomAnswers(compiler, tokenizer)
            for number, (file, text) in enumerate(each.accepted.items()):
                answer = answers.draw(each.compiled[file], random.Random(number))
                each.outcomes[f"random: {_outcome(text, answer, f'{name} {file}', progress)}"] += 1
            each.masks_s = answers.mask_s
    finally:
        await gateway.aclose()
    accepted = [(name, file) for name, each in sets.items() for file in each.accepted]
    chosen = [accepted[at] for at in _evenly(len(accepted), MAX_OVER_HTTP)]
    if chosen:
        with served(replace(mixed_spec("schemas"), gateway=GatewaySpec(grpc_port=0, http_port=0))) as server:
            await _over_http(server.addresses["HTTP"], sets, chosen, progress)
    wrong = sum(each.outcomes[f"{how}: not valid"] for each in sets.values() for how in ("random", "HTTP"))
    claims = (BenchmarkClaim("answers that ended and are not valid", wrong, 0, "n"),)
    return BenchmarkPart("schemas", tuple(_figures(sets)), claims)


async def _check(each: SchemaSet, gateway: PreprocessingPool, progress: Progress) -> None:
    """As a gateway does."""
    for file in each.files:
        text = file.read_text()
        begun = time.perf_counter()
        try:
            grammar = SamplingParams(grammar=Grammar("json", text)).grammar
            assert grammar is not None
            each.compiled[file.name] = await gateway.check_grammar(grammar)
            each.accepted[file.name] = text
        except (InvalidRequest, Rejected) as error:
            progress(f"{file}: {error}")
            each.refused[error.message if isinstance(error, InvalidRequest) else str(error)] += 1
        each.checks_s.append(time.perf_counter() - begun)


async def _over_http(
    url: str, sets: Mapping[str, SchemaSet], chosen: Sequence[tuple[str, str]], progress: Progress
) -> None:
    """One answer of each, `STREAMS` at a time."""
    slots = asyncio.Semaphore(STREAMS)
    limits = aiohttp.ClientTimeout(total=TIMEOUT_S)

    biases = short_answers(ModelTokenizer(resolve(MODEL).path))

    async def ask(name: str, file: str) -> None:
        text = sets[name].accepted[file]
        body = {
            "model": MODEL,
            "prompt": f"The schema {text[:PROMPT_CHARS]}\nA short document of this schema:\n",
            "max_tokens": MAX_TOKENS,
            "seed": len(text),
            "logit_bias": biases,
            "structured_outputs": {"json": json.loads(text)},
        }
        async with slots, session.post(f"{url}/v1/completions", json=body, timeout=limits) as reply:
            found = await reply.json()
        if reply.status != 200:
            raise RuntimeError(f"{name} {file}: {reply.status} {found}")
        choice = found["choices"][0]
        answer = choice["text"] if choice["finish_reason"] == "stop" else None
        if answer is None:
            progress(f"{name} {file}: not ended: {choice['text'][:200]!r}")
        sets[name].outcomes[f"HTTP: {_outcome(text, answer, f'{name} {file}', progress)}"] += 1

    async with aiohttp.ClientSession() as session, asyncio.TaskGroup() as group:
        for each in chosen:
            group.create_task(ask(*each))


def _outcome(text: str, answer: str | None, name: str, progress: Progress) -> str:
    from jsonschema.validators import validator_for

    if answer is None:
        return "not ended"
    schema = json.loads(text)
    try:
        validator_for(schema)(schema).validate(json.loads(answer))
    except Exception as error:
        progress(f"{name}: {type(error).__name__} {str(error)[:200]!r} in {answer[:200]!r}")
        return "not valid"
    return "valid"


def _figures(sets: Mapping[str, SchemaSet]) -> list[Figure]:
    figures = []
    for name, each in sets.items():
        counts = {"schemas": len(each.files), "accepted": len(each.accepted), **dict(sorted(each.outcomes.items()))}
        figures += [Figure(RESULTS, name, column, "n", spread([count])) for column, count in counts.items()]
        for column, taken, unit in (("check", each.checks_s, "ms"), ("mask", each.masks_s, "us")):
            if taken:
                figures.append(Figure(RESULTS, name, f"{column} mean", unit, spread([float(np.mean(taken))])))
                figures.append(Figure(RESULTS, name, f"{column} p99", unit, spread([float(np.quantile(taken, 0.99))])))
        for reason, count in each.refused.most_common():
            figures.append(Figure(REFUSED, reason[:100], name, "n", spread([count])))
    return figures


def end_tokens(tokenizer: ModelTokenizer) -> set[int]:
    """Tokens that end a string, a list or an object, and begin no further part."""
    ends = [tokenizer.encode(text) for text in ('"', "}", "]", '"}', '"]', "}}", "}]")]
    return {each[0] for each in ends if len(each) == 1}


def short_answers(tokenizer: ModelTokenizer) -> dict[str, float]:
    """A bias for strings, objects and arrays that end. Brackets have none: in a string they would end nothing."""
    texts = [(token, tokenizer.decode((token,))) for token in range(tokenizer.vocab_size)]
    ends = {str(token): END_BIAS for token, text in texts if re.fullmatch(r'"[\]}]*', text)}
    return ends | {str(token): -END_BIAS for token, text in texts if re.fullmatch(r'[\s"\]}]*,[\s"\[{]*', text)}


def _evenly(number: int, most: int) -> list[int]:
    """At most this many indexes."""
    return sorted({index * number // most for index in range(most)}) if number > most else list(range(number))


class RandomAnswers:
    """Draws tokens that masks allow; `mask_s` has the seconds of each mask."""

    def __init__(self, compiler: GrammarCompiler, tokenizer: ModelTokenizer) -> None:
        self.mask_s: list[float] = []
        self._compiler = compiler
        self._tokenizer = tokenizer
        self._ends = end_tokens(tokenizer)

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
