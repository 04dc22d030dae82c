"""What a request's answer is made of, in order: (Queued,) Accepted, TextDelta..., Completed. Pure."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum

from diptych.errors import DiptychError

PHASES = (
    "admission",  # decoding and checking the request in the gateway
    "route",  # the policy's choice, and waiting for a worker to choose, or for its turn
    "reserve",  # until the decode worker has reserved its blocks
    "prefill_queue",  # in the prefill worker, before the first step
    "prefill_compute",  # first step to first token
    "prefill_wire",  # the rest of the prefill call: calls, pickling, event loops
    "transfer_wait",  # what overlap did not hide: decode asked, KV still on its way
    "decode_queue",  # KV there, waiting for a step
    "decode_compute",  # first decode step to last token
    "decode_wire",  # the rest of the decode phase
    "recovery",  # a worker died or refused; waiting to try again
)


class FinishReason(Enum):
    EOS = "eos"
    STOP = "stop"
    LENGTH = "length"


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Natural logarithms of the probabilities before temperature and filters: the chosen token's and the best ones'."""

    chosen: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class LatencyLedger:
    """`first` parts sum to `ttft_ns`, `first` and `rest` together to `total_ns`. Every part is 0 or more."""

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
    """One finished pull. `busy_s` counts the time reads were in flight, `digest_s` the time spent on checking.

    `num_blocks` and `reused_blocks` are the reader's blocks; bytes, descriptors and digests are summed over all ranks.
    """

    lease: str
    transport: str
    path: str
    num_blocks: int
    num_bytes: int
    num_reads: int
    num_descriptors: int
    reused_blocks: int  # prefix blocks the reader already had
    digests_verified: int
    busy_s: float
    digest_s: float
    elapsed_s: float


@dataclass(frozen=True, slots=True)
class Queued:
    """No worker has room for it yet: it waits in the gateway, behind `position` others. Seconds are predictions.

    Its turn comes in `predicted_start_s`; its first token `predicted_ttft_s` after it arrived. Neither is guaranteed.
    """

    request_id: str
    position: int
    predicted_start_s: float
    predicted_ttft_s: float
    reason: str
    index: int = 0


@dataclass(frozen=True, slots=True)
class Accepted:
    """Workers are chosen and the decode worker has reserved its blocks. Sent again after a recovery (attempt > 0).

    The first token is predicted from the request's arrival; None: nothing is known yet. `index` tells several answers
    of one request apart.
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
    """New tokens of one answer and the text that became certain with them. `first_position` counts its tokens from 0.

    Text may trail the tokens; the last delta may be text alone. `index` tells several answers of one request apart.
    `prompt_logprobs`, when asked for, stand in the first delta of answer 0: of the prompt's second token and on.
    """

    text: str
    tokens: tuple[int, ...]
    first_position: int
    logprobs: tuple[TokenLogprobs, ...] = ()
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    index: int = 0

    @staticmethod
    def join(deltas: Iterable["TextDelta"]) -> "TextDelta":
        """Neighbouring deltas of one answer as one; of none, the empty one."""
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
        """One delta for each answer that has any, by index."""
        answers: dict[int, list[TextDelta]] = {}
        for delta in deltas:
            answers.setdefault(delta.index, []).append(delta)
        return [TextDelta.join(parts) for _, parts in sorted(answers.items())]


@dataclass(frozen=True, slots=True)
class AnswerEnd:
    """How one of several answers ended. `mean_logprob`, of its tokens, only where it decided over the answer."""

    finish: FinishReason
    completion_tokens: int
    attempts: int
    ledger: LatencyLedger
    mean_logprob: float | None = None
    decode_workers: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Completed:
    """The end. `transfers` has one report for each KV handoff (none when colocated, several after recoveries or moves);
    `decode_workers` are those of the last attempt: the one that was accepted, then those that it moved to.

    Of several answers, `answers` has each one's end, by index; the rest then speaks of all that were made: tokens are
    summed (the prompt's counted once), `finish` is the first answer's, `ledger` that of the one that ended last.
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
    """A whole answer, or several; `output` is the first, and `accepted` names the workers that finished that one.

    `queued`: it had to wait for its turn first.
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
    """All events of one request as its answer. Raises `DiptychError` when the last ones are missing."""
    accepted = [event for event in events if isinstance(event, Accepted) and event.index == 0]
    if not accepted or not isinstance(events[-1], Completed):
        raise DiptychError("DATA_LOSS", "the server's answer ended without its Completed message")
    outputs = TextDelta.join_each(event for event in events if isinstance(event, TextDelta))
    queued = next((event for event in events if isinstance(event, Queued) and event.index == 0), None)
    return Answer(tuple(outputs) or (TextDelta.join(()),), accepted[-1], events[-1], queued)
