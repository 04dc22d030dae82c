"""Collects the events of one request as its client sees them, and makes a record of them. Pure: the clock is given."""

from array import array
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from cluster.events import Accepted, Completed, Delta, Queued
from cluster.offline.scoring.records import RequestOutcome, RequestRecord
from cluster.offline.workload.arrivals import Arrival
from workers.request import SLO


class _Tokens(Protocol):
    @property
    def tokens(self) -> tuple[int, ...]: ...


@dataclass(frozen=True, slots=True)
class TokenChunk:
    """A part of an answer; only its number of tokens is known."""

    count: int

    @property
    def tokens(self) -> tuple[int, ...]:
        return (-1,) * self.count


@dataclass(frozen=True, slots=True)
class CountedAnswer:
    """The end of an answer, with the server's token counts; None: not reported."""

    prompt_tokens: int | None = None
    output_tokens: int | None = None
    cached_tokens: int = 0


class RequestRecorder:
    """One request in flight; owned by its sender. `clock`: seconds on the workload's time, which is 0 at `zero_s` of
    the clock that tells tokens' own times.
    """

    def __init__(self, index: int, arrival: Arrival, clock: Callable[[], float], zero_s: float = 0.0) -> None:
        self._zero_s = zero_s
        self.index = index
        self.arrival = arrival
        self.outcome = RequestOutcome.UNFINISHED
        self.events = 0
        self.untimed = 0  # tokens that the server counted but no chunk reported
        self._clock = clock
        self._detail = ""
        self._token_s = array("d")
        self._accepted: Accepted | None = None
        self._completed: Completed | None = None
        self._counted: CountedAnswer | None = None
        self._reason = ""

    @property
    def where(self) -> str:
        """Progress, for error messages."""
        accepted = self._accepted
        return f"{len(self._token_s)} tokens, on {accepted.decode_worker}" if accepted else "not placed"

    @property
    def is_counted(self) -> bool:
        """Whether the server reported the number of output tokens."""
        return self._completed is not None or (self._counted is not None and self._counted.output_tokens is not None)

    def record(self, event: Queued | Accepted | Completed | CountedAnswer | _Tokens) -> None:
        self.events += 1
        if isinstance(event, Queued):
            return
        if isinstance(event, Accepted):
            self._accepted = event
        elif isinstance(event, Completed):
            self._completed = event
            self.outcome = RequestOutcome.FINISHED
        elif isinstance(event, CountedAnswer):
            self._settle(event)
        elif isinstance(event, Delta) and event.token_s:
            self._token_s.extend([at_s - self._zero_s for at_s in event.token_s])
        else:
            now_s = self._clock()
            for _ in event.tokens:
                self._token_s.append(now_s)

    def _settle(self, counted: CountedAnswer) -> None:
        """Correct the token times by the server's count: missing tokens get the time of the last chunk, and chunks
        beyond the count are dropped."""
        self._counted = counted
        have, wanted = len(self._token_s), counted.output_tokens
        if not have:
            self.end(RequestOutcome.FAILED, "the answer had no text and no tokens", "empty answer")
            return
        self.outcome = RequestOutcome.FINISHED
        if wanted is None or wanted < 1:
            return
        self.untimed = max(0, wanted - have)
        self._token_s.extend([self._token_s[-1]] * self.untimed)
        del self._token_s[wanted - 1 : -1]

    def can_meet(self, slo: SLO) -> bool:
        """Whether it met its SLO or still can."""
        done = self.outcome is not RequestOutcome.UNFINISHED
        so_far = self.served()
        now_s = self._clock()
        late_s = now_s - self.arrival.at_s if so_far.ttft_s is None else so_far.ttft_s
        if slo.ttft_s is not None and late_s > slo.ttft_s:
            return False
        if not done:
            min_s = (slo.ttft_s or 0.0) + (slo.tpot_s or 0.0) * (self.arrival.output_tokens - 1)
            bounded = slo.ttft_s is not None and slo.tpot_s is not None
            return not bounded or now_s - self.arrival.at_s <= min_s
        met = so_far.tpot_s is not None and (slo.tpot_s is None or so_far.tpot_s <= slo.tpot_s)
        return self.outcome is RequestOutcome.FINISHED and met

    def end(self, outcome: RequestOutcome, detail: str, reason: str = "") -> None:
        """It ended without finishing. `reason`: the category under which failures are counted."""
        self.outcome, self._detail, self._reason = outcome, detail, reason

    def served(self) -> RequestRecord:
        accepted, completed, counted = self._accepted, self._completed, self._counted
        cached = completed or counted
        transfers = completed.transfers if completed else ()
        return RequestRecord(
            index=self.index,
            arrival_s=self.arrival.at_s,
            prompt_tokens=(counted and counted.prompt_tokens) or self.arrival.prompt_tokens,
            output_tokens=self.arrival.output_tokens,
            token_s=self._token_s,
            outcome=self.outcome,
            detail=self._detail,
            prefill_worker=accepted.prefill_worker if accepted else "",
            decode_worker=accepted.decode_worker if accepted else "",
            cached_tokens=cached.cached_tokens if cached else 0,
            attempts=completed.attempts if completed else 1,
            transfer_bytes=sum(each.num_bytes for each in transfers),
            transfer_s=sum(each.elapsed_s for each in transfers),
            ledger=completed.ledger if completed else None,
            reason=self._reason,
        )
