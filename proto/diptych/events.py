"""The events of a request, in order: (Queued,) Accepted, TextDelta..., Completed. Pure."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum

from diptych.errors import DiptychError

PHASES = (
    "admission",  # decoding and checking the request in the gateway
    "route",  # choosing workers, including the wait for a worker or in the admission queue
    "reserve",  # until the decode worker has reserved its blocks
    "prefill_queue",  # in the prefill worker, before the first step
    "prefill_compute",  # first step to first token
    "prefill_wire",  # the rest of the prefill phase: calls, pickling, event loops
    "transfer_wait",  # the part of the KV transfer that does not overlap with other work
    "decode_queue",  # the KV has arrived; waiting for a step
    "decode_compute",  # first decode step to last token
    "decode_wire",  # the rest of the decode phase
    "recovery",  # after a failure, until the next attempt
)


class FinishReason(Enum):
    EOS = "eos"
    STOP = "stop"
    LENGTH = "length"


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Natural logarithms of probabilities before temperature and filters: of the chosen token, and of the best ones."""

    chosen: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class LatencyLedger:
    """The parts of `first` sum to `ttft_ns`, those of `first` and `rest` to `total_ns`. No part is negative."""

    first: tuple[tuple[str, int], ...]
    rest: tuple[tuple[str, int], ...]
    ttft_ns: int
    total_ns: int

    def check(self) -> None:
        """Raise AssertionError unless the ledger balances."""
        assert all(name in PHASES and ns >= 0 for name, ns in self.first + self.rest)
        assert sum(ns for _, ns in self.first) == self.ttft_ns
        assert self.ttft_ns + sum(ns for _, ns in self.rest) == self.total_ns


@dataclass(frozen=True, slots=True)
class TransferReport:
    """One finished pull. `busy_s`: time with reads in flight. `digest_s`: time spent on checking digests.

    `num_blocks` and `reused_blocks` count the reader's blocks; bytes, descriptors and digests are summed over ranks.
    """

    lease: str
    transport: str
    path: str
    num_blocks: int
    num_bytes: int
    num_reads: int
    num_descriptors: int
    reused_blocks: int  # prefix blocks that the reader had cached
    digests_verified: int
    busy_s: float
    digest_s: float
    elapsed_s: float


@dataclass(frozen=True, slots=True)
class Queued:
    """No worker has room for the request yet: it waits in the gateway, behind `position` others.

    It is predicted to start in `predicted_start_s`, with a TTFT of `predicted_ttft_s`. Neither is guaranteed.
    """

    request_id: str
    position: int
    predicted_start_s: float
    predicted_ttft_s: float
    reason: str
    index: int = 0


@dataclass(frozen=True, slots=True)
class Accepted:
    """Workers are chosen, and the decode worker has reserved its blocks. Sent again after a failure (attempt > 0).

    `predicted_ttft_s` counts from the request's arrival; None: no prediction yet. `index`: of the answer.
    """

    request_id: str
    attempt: int
    prompt_tokens: int
    prefill_worker: str
    decode_worker: str
    reason: str
    predicted_ttft_s: float | None = None
    predicted_tpot_s: float | None = None
    index: int = 0


@dataclass(frozen=True, slots=True)
class TextDelta:
    """New tokens of one answer, and the text that they complete. `first_position` counts its tokens from 0.

    Text may lag behind the tokens; the last delta may have text alone. `index`: of the answer. The first delta of
    answer 0 has `prompt_logprobs`, if requested: from the prompt's second token on.
    """

    text: str
    tokens: tuple[int, ...]
    first_position: int
    logprobs: tuple[TokenLogprobs, ...] = ()
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    index: int = 0

    @staticmethod
    def join(deltas: Iterable["TextDelta"]) -> "TextDelta":
        """Consecutive deltas of one answer as one; an empty delta for none."""
        parts = list(deltas)
        return TextDelta(
            "".join(part.text for part in parts),
            tuple(token for part in parts for token in part.tokens),
            parts[0].first_position if parts else 0,
            tuple(logprob for part in parts for logprob in part.logprobs),
            tuple(logprob for part in parts for logprob in part.prompt_logprobs),
            parts[0].index if parts else 0,
        )

    @staticmethod
    def join_each(deltas: Iterable["TextDelta"]) -> "list[TextDelta]":
        """The joined deltas of each answer, by index."""
        answers: dict[int, list[TextDelta]] = {}
        for delta in deltas:
            answers.setdefault(delta.index, []).append(delta)
        return [TextDelta.join(parts) for _, parts in sorted(answers.items())]


@dataclass(frozen=True, slots=True)
class AnswerEnd:
    """The end of one of several answers. `mean_logprob`: of its tokens; only if answers were ranked by it."""

    finish: FinishReason
    completion_tokens: int
    attempts: int
    ledger: LatencyLedger
    mean_logprob: float | None = None
    decode_workers: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Completed:
    """The end of a request. `transfers`: one report per KV handoff (none if colocated, several after failures or
    migrations). `decode_workers`: of the last attempt, in order of its migrations.

    For several answers, `answers` has the end of each, by index. Token counts are then sums (the prompt counts once),
    `finish` is that of answer 0, and `ledger` that of the answer that ended last.
    """

    finish: FinishReason
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    attempts: int
    ledger: LatencyLedger
    transfers: tuple[TransferReport, ...]
    answers: tuple[AnswerEnd, ...] = ()
    decode_workers: tuple[str, ...] = ()


TextEvent = Queued | Accepted | TextDelta | Completed


@dataclass(frozen=True, slots=True)
class Answer:
    """One or several whole answers. `output` is the first, and `accepted` names the workers of its last attempt.

    `queued`: the request waited in the admission queue.
    """

    outputs: tuple[TextDelta, ...]
    accepted: Accepted
    completed: Completed
    queued: Queued | None = None

    @property
    def output(self) -> TextDelta:
        return self.outputs[0]

    @property
    def text(self) -> str:
        return self.output.text


def answer_of(events: Sequence[TextEvent]) -> Answer:
    """The answer from all events of one request. Raises `DiptychError` if the last ones are missing."""
    accepted = [event for event in events if isinstance(event, Accepted) and event.index == 0]
    if not accepted or not isinstance(events[-1], Completed):
        raise DiptychError("DATA_LOSS", "the server's answer ended without its Completed message")
    outputs = TextDelta.join_each(event for event in events if isinstance(event, TextDelta))
    queued = next((event for event in events if isinstance(event, Queued) and event.index == 0), None)
    return Answer(tuple(outputs) or (TextDelta.join(()),), accepted[-1], events[-1], queued)
