"""Sends a workload to a server: requests at their arrival times (open loop), or N in flight at a time (closed loop).

TTFT counts from the workload's arrival time, even if the sender was late (no coordinated omission). With `concurrency`,
arrival times are ignored: a request is sent when another has ended, and counts from then. Knows no protocol.
"""

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace

from cluster.events import Accepted, ClusterError, Completed, Delta, Queued, Rejected
from cluster.frontend.text import TextDelta
from cluster.offline.scoring.records import RequestOutcome, RequestRecord, Run
from cluster.offline.scoring.request_recorder import CountedAnswer, RequestRecorder, TokenChunk
from cluster.offline.workload.arrivals import Workload
from cluster.offline.workload.prompts import request
from diptych.errors import DiptychError
from workers.request import SLO, Request

ResponseEvent = Queued | Accepted | Delta | TextDelta | TokenChunk | Completed | CountedAnswer
Ask = Callable[[Request], AsyncGenerator[ResponseEvent, None]]
Ended = Callable[[], object]  # called each time a request has ended

REJECTIONS = ("RESOURCE_EXHAUSTED", "UNAVAILABLE")  # gRPC codes of a refused request


def nothing() -> None:
    """An `Ended` that does nothing."""


class RequestFailed(Exception):
    """One request failed. `reason`: the category under which failures are counted."""

    def __init__(self, reason: str, message: str, *, refused: bool = False) -> None:
        super().__init__(message)
        self.reason = reason
        self.refused = refused


@dataclass(frozen=True, slots=True)
class LoadOptions:
    """How a workload is sent. The client rejects requests beyond `max_in_flight` and cancels one after `deadline_s`.

    `seed` is the sampling seed. `concurrency`: keep this many in flight and ignore arrival times.
    """

    vocab_size: int
    deadline_s: float = 300.0
    max_in_flight: int = 256
    seed: int = 0
    slo: SLO = field(default_factory=SLO)
    system: str = ""
    concurrency: int | None = None

    def __post_init__(self) -> None:
        if not self.deadline_s > 0.0 or self.max_in_flight < 1:
            raise ValueError(f"deadline_s is {self.deadline_s} and max_in_flight {self.max_in_flight}; both above 0")
        if self.concurrency is not None and self.concurrency < 1:
            raise ValueError(f"concurrency is {self.concurrency}; it is at least 1")


async def drive(ask: Ask, workload: Workload, load: LoadOptions, ended: Ended = nothing) -> Run:
    """Send all requests and wait for the last answer; cancelling cancels every request. Unexpected errors are raised.

    The run has one GPU and no workers; the caller replaces them if it knows better.
    """
    sender = _Sender(ask, workload, load, ended)
    try:
        await (sender.run() if load.concurrency is None else sender.run_closed(load.concurrency))
    except ExceptionGroup as errors:
        raise errors.exceptions[0] from None
    return sender.result()


def _record(answers: Sequence[RequestRecorder], event: ResponseEvent) -> None:
    """Give each answer of a request its own events."""
    if len(answers) == 1:
        answers[0].record(event)
    elif isinstance(event, Completed):
        for recorder, each in zip(answers, event.answers, strict=True):
            recorder.record(replace(event, attempts=each.attempts, ledger=each.ledger, answers=()))
    else:
        assert isinstance(event, Queued | Accepted | TextDelta), f"{type(event).__name__} does not say of which answer"
        answers[event.index].record(event)


class _Sender:
    def __init__(self, ask: Ask, workload: Workload, load: LoadOptions, ended: Ended) -> None:
        self._ask = ask
        self._workload = workload
        self._load = load
        self._ended = ended
        self._begin_s = asyncio.get_running_loop().time() - workload.arrivals[0].at_s
        self._recorders = [
            RequestRecorder(index, arrival, self._now_s) for index, arrival in enumerate(workload.arrivals)
        ]
        self._in_flight = 0
        self._late_s = 0.0

    def _now_s(self) -> float:
        return asyncio.get_running_loop().time() - self._begin_s

    async def run(self) -> None:
        """Open loop: each request at its arrival time."""
        async with asyncio.TaskGroup() as group:
            for answers in self._requests():
                made, at_s = self._request(answers), answers[0].arrival.at_s
                await asyncio.sleep(at_s - self._now_s())
                self._late_s = max(self._late_s, self._now_s() - at_s)
                if self._in_flight >= self._load.max_in_flight:
                    detail = f"{self._in_flight} requests were in flight already"
                    for recorder in answers:
                        recorder.end(RequestOutcome.REJECTED, detail, "not sent: too many in flight")
                        self._ended()
                    continue
                self._in_flight += 1
                group.create_task(self._one(answers, made))

    async def run_closed(self, concurrency: int) -> None:
        """Closed loop: a request starts when another has ended."""
        waiting = self._requests()

        async def one_after_another() -> None:
            for answers in waiting:
                made, at_s = self._request(answers), self._now_s()
                for recorder in answers:
                    recorder.arrival = replace(recorder.arrival, at_s=at_s)
                self._in_flight += 1
                await self._one(answers, made)

        async with asyncio.TaskGroup() as group:
            for _ in range(min(concurrency, len(self._recorders))):
                group.create_task(one_after_another())

    def _requests(self) -> Iterator[list[RequestRecorder]]:
        """The recorders of each request: one for each of its answers."""
        begin = 0
        while begin < len(self._recorders):
            end = begin + self._workload.num_answers(begin)
            yield self._recorders[begin:end]
            begin = end

    def _request(self, answers: Sequence[RequestRecorder]) -> Request:
        load = self._load
        made = request(self._workload, answers[0].index, load.vocab_size, slo=load.slo, seed=load.seed)
        return replace(made, sampling=replace(made.sampling, n=len(answers)), group="")

    async def _one(self, answers: Sequence[RequestRecorder], made: Request) -> None:
        def end(outcome: RequestOutcome, detail: str, reason: str) -> None:
            for recorder in answers:
                recorder.end(outcome, detail, reason)

        try:
            async with asyncio.timeout(self._load.deadline_s), aclosing(self._ask(made)) as events:
                async for event in events:
                    _record(answers, event)
        except RequestFailed as error:
            end(RequestOutcome.REJECTED if error.refused else RequestOutcome.FAILED, str(error), error.reason)
        except Rejected as error:
            end(RequestOutcome.REJECTED, str(error), "rejected")
        except DiptychError as error:
            end(RequestOutcome.REJECTED if error.code in REJECTIONS else RequestOutcome.FAILED, str(error), error.code)
        except ClusterError as error:
            end(RequestOutcome.FAILED, f"{type(error).__name__}: {error}", type(error).__name__)
        except TimeoutError:
            end(RequestOutcome.FAILED, f"no end within {self._load.deadline_s:g} s", "deadline")
        finally:
            self._in_flight -= 1
            for _ in answers:
                self._ended()

    def result(self) -> Run:
        wall_s = self._now_s() - self._workload.arrivals[0].at_s
        served = tuple(recorder.served() for recorder in self._recorders)
        ends = [each.token_s[-1] for each in served if len(each.token_s)]
        concurrency = self._load.concurrency
        sent = f"load generator lag: max {self._late_s * 1e3:.1f} ms"
        if concurrency is not None:
            sent = f"{concurrency} in flight: each request is sent when another has finished"
        return Run(
            system=self._load.system,
            workload=self._workload.name + ("" if concurrency is None else f", {concurrency} in flight"),
            clock="real",
            seed=self._load.seed,
            gpus=1,
            seconds=max(ends, default=0.0) - served[0].arrival_s,
            wall_s=wall_s,
            served=served,
            notes=(*self._workload.notes, sent, *self._counting(served)),
        )

    def _counting(self, served: tuple[RequestRecord, ...]) -> tuple[str, ...]:
        """Notes about token counts and times that are not exact."""
        finished = [recorder for recorder in self._recorders if recorder.outcome is RequestOutcome.FINISHED]
        untimed = sum(recorder.untimed for recorder in finished)
        uncounted = sum(not recorder.is_counted for recorder in finished)
        asked = sum(recorder.arrival.prompt_tokens for recorder in finished)
        counted = sum(served[recorder.index].prompt_tokens for recorder in finished)
        notes = []
        if untimed:
            notes.append(
                f"{untimed} tokens came in chunks without a token count; they are timed with their answer's last "
                "chunk, so gaps between tokens are gaps between chunks"
            )
        if uncounted:
            notes.append(f"{uncounted} answers came without usage: each chunk counts as one token")
        if counted != asked:
            notes.append(f"the server counted {counted} prompt tokens where {asked} were requested")
        return tuple(notes)
