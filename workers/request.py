"""A request as workers see it: token ids, how to sample, and what comes back.

Knows no text (the gateway encodes and decodes), no device and no clock. All but `DeferredReader` crosses processes.
"""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Literal, Protocol

from msgspec import Struct

from diptych.events import FinishReason as FinishReason
from diptych.events import TokenLogprobs as TokenLogprobs
from diptych.options import SLO as SLO
from diptych.shapes import Shape
from diptych.view import Adapter as Adapter
from kvtransfer.ticket import TransferReport, TransferTicket
from workers.config import EngineConfig
from workers.errors import InvalidRequest
from workers.stats import WorkerStats

MAX_BIASES = 1024
MAX_ANSWERS = 64
MOST_REPEATS = 256  # repetitions of a timed step
LONGEST_SHOWN = 80  # characters of an invalid list in an error message
MAX_GRAMMAR_BYTES = 64 << 10  # of a grammar's text
MIXED_KV = "mixed"  # the `kv_dtype` of KV computed in several dtypes


@dataclass(frozen=True, slots=True)
class Grammar:
    """What the text of an answer must match. `workers.model.grammar` compiles it.

    `kind` and `text`: "json", a JSON schema; "regex", a regular expression; "choice", a JSON list of strings; "lark", a
    context-free grammar as llguidance has it; "grammar", either that or GBNF.
    """

    kind: Literal["json", "regex", "choice", "lark", "grammar"]
    text: str


@dataclass(frozen=True, slots=True)
class Bound:
    """The valid values of a number, and the same in words. `is_open`: `least` itself is not valid."""

    least: float
    most: float
    rule: str
    is_open: bool = False

    def holds(self, value: float) -> bool:
        """False for NaN."""
        return self.least <= value <= self.most and not (self.is_open and value == self.least)


# Of numbers of `SamplingParams` by themselves.
BOUNDS = {
    "temperature": Bound(0.0, 100.0, "between 0 (greedy) and 100"),
    "top_k": Bound(0, math.inf, "0 (off) or a positive number of tokens"),
    "top_p": Bound(0.0, 1.0, "above 0 and at most 1 (off)", is_open=True),
    "min_p": Bound(0.0, 1.0, "between 0 (off) and 1"),
    "repetition_penalty": Bound(0.0, 100.0, "above 0 and at most 100; 1 is off", is_open=True),
    "max_tokens": Bound(1, math.inf, "at least 1"),
    "min_tokens": Bound(0, math.inf, "0 or more"),
    "logprobs": Bound(0, 20, "between 0 and 20"),
    "prompt_logprobs": Bound(0, 20, "between 0 and 20"),
    "presence_penalty": Bound(-2.0, 2.0, "between -2 and 2; 0 is off"),
    "frequency_penalty": Bound(-2.0, 2.0, "between -2 and 2; 0 is off"),
    "n": Bound(1, MAX_ANSWERS, f"between 1 and {MAX_ANSWERS}"),
    "best_of": Bound(1, MAX_ANSWERS, f"between n and {MAX_ANSWERS}"),
}


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How tokens are sampled. Raises `InvalidRequest` naming the field.

    temperature 0 is greedy. top_k 0, top_p 1, min_p 0, repetition_penalty 1 and the other penalties 0 mean "off".
    `seed` None: the gateway chooses one. A sample depends on (seed, position) only, so a request that migrates or is
    recomputed continues with the same tokens. `logprobs`: None for none, 0 for the sampled token's, k for those of the
    k likeliest tokens too; `prompt_logprobs`: the same for the prompt's tokens. Presence and frequency penalties count
    tokens of the answer, the repetition penalty also those of the prompt. `logit_bias`: pairs (token, number to add to
    its logit). `grammar`: only tokens that continue a match are sampled, and end tokens only where it is complete, even
    before `min_tokens` if nothing else continues it.

    `pooling`: with the first token comes the last hidden state of the prompt, after the final norm, of its last token
    ("last") or summed over its tokens ("mean"); empty: neither.

    The gateway handles `stop`, `include_stop_in_output`, `skip_special_tokens`, `n` and `best_of` (generate `best_of`
    answers, return the best `n`); workers ignore them.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None
    max_tokens: int | None = None
    min_tokens: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    n: int = 1
    best_of: int | None = None
    include_stop_in_output: bool = False
    skip_special_tokens: bool = True
    grammar: Grammar | None = None
    pooling: Literal["", "last", "mean"] = ""

    def __post_init__(self) -> None:
        def need(ok: bool, name: str, rule: str) -> None:
            if not ok:
                raise InvalidRequest(f"sampling.{name}", f"is {_shown(getattr(self, name))}; it must be {rule}")

        # Comparisons are written so that NaN fails them.
        for name, bound in BOUNDS.items():
            if (value := getattr(self, name)) is not None and not bound.holds(value):
                need(False, name, bound.rule)
        need(self.seed is None or 0 <= self.seed < 2**64, "seed", "an unsigned 64-bit number")
        need(
            self.max_tokens is None or self.min_tokens <= self.max_tokens,
            "min_tokens",
            f"at most max_tokens ({self.max_tokens})",
        )
        need(len(self.stop) <= 16 and all(self.stop), "stop", "at most 16 strings, none of them empty")
        need(all(token >= 0 for token in self.stop_token_ids), "stop_token_ids", "token ids, 0 or more")
        biased = dict(self.logit_bias)
        if len(self.logit_bias) > MAX_BIASES or len(biased) < len(self.logit_bias):
            rule = f"at most {MAX_BIASES}, each token once"
            raise InvalidRequest("sampling.logit_bias", f"has {len(self.logit_bias)} entries; it must have {rule}")
        for token, bias in self.logit_bias:
            if token < 0 or not -100.0 <= bias <= 100.0:
                rule = "a token id is 0 or more, a bias lies between -100 and 100"
                raise InvalidRequest("sampling.logit_bias", f"has {token}: {bias}; {rule}")
        need(self.best_of is None or self.n <= self.best_of, "best_of", f"between n ({self.n}) and {MAX_ANSWERS}")
        if self.grammar is not None and len(self.grammar.text.encode(errors="replace")) > MAX_GRAMMAR_BYTES:
            raise InvalidRequest("sampling.grammar", f"has more than {MAX_GRAMMAR_BYTES >> 10} KiB of text; shorten it")

    @property
    def needs_whole_prompt(self) -> bool:
        """Whether one worker must compute the whole prompt."""
        return self.prompt_logprobs is not None or bool(self.pooling)

    @property
    def has_penalties(self) -> bool:
        """Whether the logits depend on the tokens so far."""
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0

    @property
    def num_answers(self) -> int:
        """Number of answers to generate, returned or not."""
        return self.best_of or self.n


def _shown(value: object) -> str:
    """The value as JSON for an error message: a list instead of a tuple, truncated."""
    if not isinstance(value, tuple):
        return repr(value)
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= LONGEST_SHOWN else f"{text[:LONGEST_SHOWN]}... ({len(value)} entries)"


@dataclass(frozen=True, slots=True)
class Request:
    """One attempt at one request.

    `generated`: tokens from earlier attempts, which the client already has. `fresh`: do not use cached KV of this
    prompt, because an earlier attempt found it corrupt. `reply_to`: the subscriber (see `Worker.subscribe`) that gets
    the outputs. `group`: common to the siblings of a request for several answers; they compute their prompt once.
    `tenant`: tenants share capacity by their weights, and cached KV only with `shares_prefixes`. `waited_s`: seconds
    between its arrival at the gateway and the call to a worker. `num_moves`: earlier migrations of this attempt.
    `kv_dtype`: dtype of the KV that another worker computes for this one, or `MIXED_KV`; empty: this worker's own.
    `origin`: the gateway process and its request counter; clients choose `id`, so `id` is not unique.
    `adapter`: changes the model for this request; None: the model as it is.
    """

    id: str
    prompt: tuple[int, ...]
    sampling: SamplingParams = field(default_factory=SamplingParams)
    slo: SLO = field(default_factory=SLO)
    generated: tuple[int, ...] = ()
    attempt: int = 0
    fresh: bool = False
    reply_to: str = ""
    session: str = ""
    group: str = ""
    tenant: str = ""
    waited_s: float = 0.0
    num_moves: int = 0
    shares_prefixes: bool = False
    kv_dtype: str = ""
    origin: str = ""
    adapter: Adapter | None = None

    @property
    def key(self) -> str:
        """The sequence's name on workers, unique for each gateway process, request, attempt and migration.

        Late outputs of an earlier attempt, of the source of a migration, or of another request with this id are
        therefore ignored.
        """
        move = f".{self.num_moves}" if self.num_moves else ""
        origin = f"@{self.origin}" if self.origin else ""
        return f"{self.id}/{self.attempt}{move}{origin}"

    @property
    def cache_salt(self) -> str:
        """Part of the block hashes: requests with different salts never share cached KV. No tenant has a newline."""
        tenant = "" if self.shares_prefixes else self.tenant
        return tenant if self.adapter is None else f"{tenant}\nadapter {self.adapter.id}"

    @property
    def num_tokens(self) -> int:
        return len(self.prompt) + len(self.generated)

    def is_sibling(self, other: "Request") -> bool:
        """Whether both have the same group and the same prompt."""
        return self.group == other.group != "" and self.prompt == other.prompt and self.cache_salt == other.cache_salt

    def retry(self, generated: tuple[int, ...], *, fresh: bool) -> "Request":
        """The next attempt, which continues after `generated`."""
        return replace(self, generated=generated, attempt=self.attempt + 1, fresh=self.fresh or fresh)


class SequenceTiming(Struct, frozen=True, gc=False):
    """Consecutive durations of one sequence up to now, on its worker's clock.

    First token of a prompt computed here: `queue_s` from arrival to the first step, `compute_s` from there to the
    token. Later tokens of that sequence: `compute_s` since the first token. Prefilled elsewhere: `wait_s` from the
    decode call to the KV's arrival, `queue_s` from there to the first step, `compute_s` from there to the newest token.
    """

    wait_s: float
    queue_s: float
    compute_s: float


class TokensOut(Struct, frozen=True, gc=False, tag=True):
    """New tokens of one sequence. `first_position` counts output tokens from 0, over all attempts.

    `prefilled`: this is the first token of a prompt computed here, and `timing` is that of the prefill.
    """

    key: str
    first_position: int
    tokens: tuple[int, ...]
    timing: SequenceTiming
    logprobs: tuple[TokenLogprobs, ...] = ()
    finish: FinishReason | None = None
    prefilled: bool = False
    cached_tokens: int = 0
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()  # of the prompt's second token on; with the first output token
    cached_from: tuple[tuple[str, int], ...] = ()  # (source, tokens); with the first output token
    token_s: tuple[float, ...] = ()  # when each was sampled, on the reader's clock; only of outputs told late
    pooled: tuple[bytes, ...] = ()  # parts of a sum, [hidden] float32 each; with the first output token


class TicketOut(Struct, frozen=True, gc=False, tag=True):
    """A held prompt has its blocks and its first chunk is scheduled, so a reader may start."""

    key: str
    ticket: TransferTicket


class HeadOut(Struct, frozen=True, gc=False, tag=True):
    """The beginning of a cut prompt is computed and held for its reader; `timing` as for a first token."""

    key: str
    timing: SequenceTiming
    cached_tokens: int = 0
    cached_from: tuple[tuple[str, int], ...] = ()  # (source, tokens)


class FetchedOut(Struct, frozen=True, gc=False, tag=True):
    """All KV of the ticket is in this worker's pool, verified."""

    key: str
    report: TransferReport


class FailedOut(Struct, frozen=True, gc=False, tag=True):
    """The sequence failed; another attempt may succeed unless `final`. `corrupt`: a digest did not match. `unlinked`:
    this worker could not connect to the owner of the KV. `no_memory`: no other worker lends it blocks now.
    """

    key: str
    reason: str
    corrupt: bool = False
    final: bool = False
    unlinked: bool = False
    no_memory: bool = False


Output = TokensOut | TicketOut | HeadOut | FetchedOut | FailedOut


class EngineOutputs(Struct, frozen=True, gc=False):
    """The outputs of one worker for one subscriber since the last message; without outputs, a heartbeat."""

    outputs: tuple[Output, ...]
    stats: WorkerStats


class DeferredSource(Protocol):
    """A worker in the same process that has not reported everything to its readers yet."""

    def catch_up(self, with_tokens: bool) -> None:
        """Tell the statistics, and perhaps the tokens, up to now."""
        ...

    def report(self, key: str) -> None:
        """Tell the tokens of this sequence up to now."""
        ...

    def num_unreported(self, key: str) -> int:
        """How many tokens of this sequence were sampled by now and not reported."""
        ...


class DeferredReader(Protocol):
    """A subscriber that takes outputs late, in the order of their times.

    `reads_cache`: a step that changes the KV event log must be told in time.
    """

    reads_cache: bool

    def attach(self, source: DeferredSource | None) -> None:
        """From now on there may be something to tell; None: no longer."""
        ...

    def on_deferred_stats(self, stats: WorkerStats, at_s: float) -> None:
        """Statistics that were true at `at_s`, when a step ended."""
        ...

    def on_deferred_tokens(self, outputs: Sequence[TokensOut]) -> None: ...

    def on_deferred_heartbeat(self) -> None:
        """The worker lives. What it has to tell waits until it is asked."""
        ...


@dataclass(frozen=True, slots=True)
class Reservation:
    """Blocks on a decode worker for the whole prompt. The first `cached_tokens` tokens need no transfer."""

    key: str
    num_blocks: int
    cached_tokens: int


@lru_cache(maxsize=16)
def _token_range(prompt: tuple[int, ...]) -> tuple[int, int]:
    """The least and the greatest token: each worker in this process checks them."""
    return min(prompt), max(prompt)


def check_prompt(request: Request, max_length: int, vocab_size: int) -> None:
    """Raise `InvalidRequest` unless the prompt fits in `max_length` tokens and its tokens are in the vocabulary."""
    if not request.prompt:
        raise InvalidRequest("prompt", "is empty; give at least one token")
    if request.num_tokens >= max_length:
        raise InvalidRequest(
            "prompt",
            f"has {request.num_tokens} tokens; with one token of answer it must fit {max_length} "
            f"(context length and KV pool of this worker)",
        )
    least, most = _token_range(request.prompt)
    if not 0 <= least <= most < vocab_size:
        raise InvalidRequest("prompt", f"holds a token id outside the vocabulary (0..{vocab_size - 1})")


def check_shape(engine: EngineConfig, shape: Shape, repeats: int) -> None:
    """Check a step to be timed against the configuration. Raises `InvalidRequest`."""
    refuse_outside("repeats", repeats, 1, MOST_REPEATS)
    refuse_outside("the number of decodes", shape.batch, 0, engine.max_running)
    refuse_outside("the number of chunks", len(shape.chunks), 0, engine.max_batch_tokens)
    refuse_outside("the number of tokens in the step", shape.step_tokens, 1, engine.max_batch_tokens)
    for tokens, _ in shape.chunks:
        refuse_outside("the tokens of a chunk", tokens, 1, engine.max_batch_tokens)


def refuse_outside(what: str, value: int, least: int, most: int) -> None:
    if not least <= value <= most:
        raise InvalidRequest("shape", f"{what} is {value}; here it must lie between {least} and {most}")
