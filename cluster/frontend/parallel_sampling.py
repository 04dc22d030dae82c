"""Parallel sampling: splits a request for several answers into one request per answer, and merges their results.

Pure, except that it fills output collectors. Knows no dispatcher and no server.
"""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import replace

from cluster.events import Accepted, AnswerEnd, Completed, Delta, Event, Queued
from cluster.frontend.output_collector import RequestOutputCollector
from cluster.frontend.text import TextDelta, TextEnd, TextStream
from workers.request import FinishReason, Request, SamplingParams, TokenLogprobs

Logprobs = tuple[TokenLogprobs, ...]


def child_requests(request: Request) -> tuple[Request, ...]:
    """One request per answer; a request for one answer is returned as it is.

    Answer 0 has the request's own seed, so it equals the answer to a request for one.
    """
    sampling = request.sampling
    assert sampling.seed is not None, "the gateway has resolved the seed"
    if sampling.num_answers == 1:
        return (request,)
    alone = replace(sampling, n=1, best_of=None)
    if sampling.num_answers > sampling.n and sampling.logprobs is None:
        alone = replace(alone, logprobs=0)  # for the ranking
    return tuple(
        replace(
            request,
            id=f"{request.id}#{index}",
            group=request.id,
            sampling=replace(
                alone,
                seed=answer_seed(sampling.seed, index),
                prompt_logprobs=None if index else sampling.prompt_logprobs,  # the same for all answers
            ),
        )
        for index in range(sampling.num_answers)
    )


def answer_seed(seed: int, index: int) -> int:
    """The seed of answer `index` of a request with this seed. A request for one answer with it gives that answer."""
    if index == 0:
        return seed
    return int.from_bytes(hashlib.blake2b(f"{seed}/{index}".encode(), digest_size=8).digest(), "little")


class ChildRequest:
    """The request of one answer, and its results. Owned by the parent request's pump.

    `parent_id`: the id that clients see. `stop` ends the request at its workers; called when a stop string is found.
    """

    def __init__(
        self,
        index: int,
        request: Request,
        parent_id: str,
        text: TextStream,
        output: RequestOutputCollector,
        stop: Callable[[], None],
    ) -> None:
        self.request = request
        self.output = output
        self.end: Completed | None = None
        self.prompt_logprobs: Logprobs = ()
        self._index = index
        self._parent_id = parent_id
        self._text = text
        self._stop = stop
        self._logprob = 0.0

    @property
    def mean_logprob(self) -> float:
        return self._logprob / max(1, self._text.num_tokens)

    def by_rank(self) -> tuple[float, int]:
        """Sort key: the most likely answer first, then by index."""
        return -self.mean_logprob, self._index

    def take(self, event: Event) -> None:
        match event:
            case Delta():
                delta = self._text.push(event)
                if delta is None:
                    return
                if delta.logprobs:
                    self._logprob += sum(each.chosen for each in delta.logprobs)
                if delta.prompt_logprobs:
                    self.prompt_logprobs += delta.prompt_logprobs
                self.output.put(delta)
                if self._text.stopped:
                    self._stop()
            case Accepted() | Queued():
                self.output.put(replace(event, request_id=self._parent_id, index=self._index))
            case Completed():
                rest = self._text.flush()
                if rest is not None:
                    self.output.put(rest)
                if self._text.stopped:  # further tokens may have arrived after the call of `finish`
                    event = replace(event, finish=FinishReason.STOP, completion_tokens=self._text.num_tokens)
                self.end = event
                self.output.put(TextEnd(event.finish, self._index, self._text.stop))


def emit_ranked(
    best: Sequence[ChildRequest], prompt_logprobs: Logprobs, sampling: SamplingParams, output: RequestOutputCollector
) -> None:
    """Emit the buffered events of the best answers, with the rank as their index."""
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


def merged_end(children: Sequence[ChildRequest], best: Sequence[ChildRequest], ranked: bool) -> Completed:
    """The Completed event of the parent request. `best`: the answers that the client gets."""
    ends = [answer.end for answer in children if answer.end is not None]
    assert len(ends) == len(children), "every answer of a request that did not fail has an end"
    if len(children) == 1:
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
