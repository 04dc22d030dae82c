"""A request for several answers as requests of one answer each, and their ends as one end again.

Pure but for the output collectors that it fills; knows no dispatcher and no server.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import replace

from cluster.events import Accepted, AnswerEnd, Completed, Delta, Event, Queued
from cluster.frontend.output_collector import RequestOutputCollector
from cluster.frontend.text import TextDelta, TextEnd, TextStream
from workers.request import FinishReason, Request, SamplingParams, TokenLogprobs

Logprobs = tuple[TokenLogprobs, ...]


def child_requests(request: Request) -> tuple[Request, ...]:
    """The requests of one answer each that make this one; a request for one answer is its own.

    Answer 0 has the request's own seed, so it is what a request for one answer gives.
    """
    sampling = request.sampling
    assert sampling.seed is not None, "the gateway has resolved the seed"
    if sampling.num_answers == 1:
        return (request,)
    alone = replace(sampling, n=1, best_of=None)
    if sampling.num_answers > sampling.n and sampling.logprobs is None:
        alone = replace(alone, logprobs=0)  # to rank by
    return tuple(
        replace(
            request,
            id=f"{request.id}#{index}",
            group=request.id,
            sampling=replace(
                alone,
                seed=answer_seed(sampling.seed, index),
                prompt_logprobs=None if index else sampling.prompt_logprobs,  # they are the same for all
            ),
        )
        for index in range(sampling.num_answers)
    )


def answer_seed(seed: int, index: int) -> int:
    """The seed of answer `index` to a request with this seed: a request for one answer with it gives the same."""
    if index == 0:
        return seed
    return int.from_bytes(hashlib.blake2b(f"{seed}/{index}".encode(), digest_size=8).digest(), "little")


class ChildRequest:
    """The request of one answer, and what became of it. Owned by the parent request's pump."""

    def __init__(
        self, index: int, request: Request, shown_id: str, text: TextStream, output: RequestOutputCollector
    ) -> None:
        self.request = request
        self.output = output
        self.end: Completed | None = None
        self.prompt_logprobs: Logprobs = ()
        self._index = index
        self._shown_id = shown_id
        self._text = text
        self._logprob = 0.0

    @property
    def stopped(self) -> bool:
        return self._text.stopped

    @property
    def mean_logprob(self) -> float:
        return self._logprob / max(1, self._text.num_tokens)

    def by_rank(self) -> tuple[float, int]:
        """Sorts the likeliest answer first; of equal ones, the first."""
        return -self.mean_logprob, self._index

    def take(self, event: Event) -> None:
        match event:
            case Accepted() | Queued():
                self.output.put(replace(event, request_id=self._shown_id, index=self._index))
            case Delta():
                delta = self._text.push(event)
                if delta is not None:
                    self._logprob += sum(each.chosen for each in delta.logprobs)
                    self.prompt_logprobs += delta.prompt_logprobs
                    self.output.put(delta)
            case Completed():
                rest = self._text.flush()
                if rest is not None:
                    self.output.put(rest)
                if self.stopped:  # the last tokens may have been on their way when `finish` was called
                    event = replace(event, finish=FinishReason.STOP, completion_tokens=self._text.num_tokens)
                self.end = event
                self.output.put(TextEnd(event.finish, self._index))


def give_out(
    best: Sequence[ChildRequest], prompt_logprobs: Logprobs, sampling: SamplingParams, output: RequestOutputCollector
) -> None:
    """What the best answers held back, under their rank."""
    if prompt_logprobs:
        output.put(TextDelta("", (), 0, prompt_logprobs=prompt_logprobs))
    for rank, answer in enumerate(best):
        for event in answer.output.clear():
            if isinstance(event, TextDelta):
                shown = event.logprobs if sampling.logprobs is not None else ()
                event = replace(event, index=rank, logprobs=shown, prompt_logprobs=())
            elif isinstance(event, Accepted | Queued | TextEnd):
                event = replace(event, index=rank)
            output.put(event)


def one_end(made: Sequence[ChildRequest], best: Sequence[ChildRequest], ranked: bool) -> Completed:
    """The end of the request, from the ends of all its answers."""
    ends = [answer.end for answer in made if answer.end is not None]
    assert len(ends) == len(made), "every answer of a request that did not fail has an end"
    if len(made) == 1:
        return ends[0]
    answers = tuple(
        AnswerEnd(each.finish, each.completion_tokens, each.attempts, each.ledger, mean, each.decode_workers)
        for each, mean in ((answer.end, answer.mean_logprob if ranked else None) for answer in best)
        if each is not None
    )
    last = max(ends, key=lambda end: end.ledger.total_ns)
    return Completed(
        finish=answers[0].finish,
        prompt_tokens=ends[0].prompt_tokens,
        completion_tokens=sum(each.completion_tokens for each in ends),
        cached_tokens=min(each.cached_tokens for each in ends),
        attempts=max(each.attempts for each in ends),
        ledger=last.ledger,
        transfers=tuple(report for each in ends for report in each.transfers),
        answers=answers,
        decode_workers=last.decode_workers,
    )
