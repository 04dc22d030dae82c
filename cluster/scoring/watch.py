"""One request as its client sees it, event by event, until it is a record. Pure: its clock is given."""

from array import array
from collections.abc import Callable
from typing import Protocol

from cluster.events import Accepted, Completed, Queued
from cluster.scoring.records import Ending, Served
from cluster.workload.arrivals import Arrival
from workers.request import SLO


class _Tokens(Protocol):
    @property
    def tokens(self) -> tuple[int, ...]: ...


class Watch:
    """Owned by whoever sends the request. `clock`: seconds as the workload counts them."""

    def __init__(self, index: int, arrival: Arrival, clock: Callable[[], float]) -> None:
        self.index = index
        self.arrival = arrival
        self.ending = Ending.UNFINISHED
        self.events = 0
        self._clock = clock
        self._detail = ""
        self._token_s = array("d")
        self._accepted: Accepted | None = None
        self._completed: Completed | None = None

    @property
    def where(self) -> str:
        """How far it is, in words."""
        accepted = self._accepted
        return f"{len(self._token_s)} tokens, on {accepted.decode_worker}" if accepted else "not placed"

    def see(self, event: Queued | Accepted | Completed | _Tokens) -> None:
        self.events += 1
        if isinstance(event, Queued):
            return
        if isinstance(event, Accepted):
            self._accepted = event
        elif isinstance(event, Completed):
            self._completed = event
            self.ending = Ending.FINISHED
        else:
            now_s = self._clock()
            for _ in event.tokens:
                self._token_s.append(now_s)

    def can_keep(self, slo: SLO) -> bool:
        """Whether it kept both promises, or still may."""
        done = self.ending is not Ending.UNFINISHED
        so_far = self.served()
        now_s = self._clock()
        late_s = now_s - self.arrival.at_s if so_far.ttft_s is None else so_far.ttft_s
        if slo.ttft_s is not None and late_s > slo.ttft_s:
            return False
        if not done:
            least_s = (slo.ttft_s or 0.0) + (slo.tpot_s or 0.0) * (self.arrival.output_tokens - 1)
            bounded = slo.ttft_s is not None and slo.tpot_s is not None
            return not bounded or now_s - self.arrival.at_s <= least_s
        kept = so_far.tpot_s is not None and (slo.tpot_s is None or so_far.tpot_s <= slo.tpot_s)
        return self.ending is Ending.FINISHED and kept

    def end(self, ending: Ending, detail: str) -> None:
        """It ended without finishing."""
        self.ending, self._detail = ending, detail

    def served(self) -> Served:
        accepted, completed = self._accepted, self._completed
        transfers = completed.transfers if completed else ()
        return Served(
            index=self.index,
            arrival_s=self.arrival.at_s,
            prompt_tokens=self.arrival.prompt_tokens,
            output_tokens=self.arrival.output_tokens,
            token_s=self._token_s,
            ending=self.ending,
            detail=self._detail,
            prefill_worker=accepted.prefill_worker if accepted else "",
            decode_worker=accepted.decode_worker if accepted else "",
            cached_tokens=completed.cached_tokens if completed else 0,
            attempts=completed.attempts if completed else 1,
            transfer_bytes=sum(each.num_bytes for each in transfers),
            transfer_s=sum(each.elapsed_s for each in transfers),
            ledger=completed.ledger if completed else None,
        )
