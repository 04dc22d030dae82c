"""What one gateway saw of the load since its last report: arrivals, who waits for a first token, how requests ended.

The controller's elastic policy reads it. Knows no worker; bounded.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from cluster.events import ClusterError, Completed
from cluster.observe.request_observer import RequestEnd, RequestObserver
from cluster.policy.scaling.evidence import Report, Sample
from workers.request import SLO, Request

MOST_SAMPLES = 512  # of one report; of more, the latest


@dataclass(slots=True)
class _Seen:
    """A request under way."""

    arrived_s: float
    ttft_slo_s: float | None
    tpot_slo_s: float | None
    prompt_tokens: int
    first_s: float | None = None
    output_tokens: int = 0


class LoadReporter(RequestObserver):
    """Owned by a Dispatcher. `promised`: to requests that ask for nothing. `clock`: seconds, of the dispatcher."""

    def __init__(self, gateway: str, promised: SLO, clock: Callable[[], float]) -> None:
        self._gateway = gateway
        self._promised = promised
        self._clock = clock
        self._told_s = clock()
        self._running: dict[str, _Seen] = {}
        self._waiting: dict[str, _Seen] = {}  # no token yet, in the order of arrival
        self._groups: dict[str, int] = {}  # live siblings of each
        self._arrived = 0
        self._arrived_tokens = 0
        self._expected_tokens = 0
        self._samples: deque[Sample] = deque(maxlen=MOST_SAMPLES)

    def on_arrived(self, request: Request, arrived_s: float, expected_tokens: int) -> None:
        """A prompt that several answers share is counted once."""
        asked, prompt_tokens = request.slo, len(request.prompt)
        self._waiting[request.id] = self._running[request.id] = _Seen(
            arrived_s,
            self._promised.ttft_s if asked.ttft_s is None else asked.ttft_s,
            self._promised.tpot_s if asked.tpot_s is None else asked.tpot_s,
            prompt_tokens,
        )
        self._arrived += 1
        self._expected_tokens += expected_tokens
        if request.group not in self._groups:
            self._arrived_tokens += prompt_tokens
        if request.group:
            self._groups[request.group] = self._groups.get(request.group, 0) + 1

    def on_first_token(self, request: Request) -> None:
        self._waiting.pop(request.id).first_s = self._clock()

    def on_end(self, end: RequestEnd) -> None:
        """One that its caller cancels leaves no sample."""
        request = end.request
        self._waiting.pop(request.id, None)
        seen = self._running.pop(request.id)
        seen.output_tokens = end.num_tokens
        if end.completed is not None:
            self._samples.append(_completed(seen, end.completed))
        if isinstance(end.error, ClusterError):
            self._samples.append(_broken(seen))
        self._leave(request.group)

    def _leave(self, group: str) -> None:
        if group:
            self._groups[group] -= 1
            if not self._groups[group]:
                del self._groups[group]

    def report(self) -> Report:
        """What was seen since the last call."""
        now_s = self._clock()
        waits = [(now_s - seen.arrived_s, seen.ttft_slo_s) for seen in self._waiting.values()]
        report = Report(
            gateway=self._gateway,
            seconds=now_s - self._told_s,
            arrived=self._arrived,
            arrived_tokens=self._arrived_tokens,
            waiting=len(waits),
            overdue=sum(promised_s is not None and waited_s > promised_s for waited_s, promised_s in waits),
            oldest_wait_s=max((waited_s for waited_s, _ in waits), default=0.0),
            expected_tokens=self._expected_tokens,
            samples=tuple(self._samples),
        )
        self._told_s, self._arrived, self._arrived_tokens, self._expected_tokens = now_s, 0, 0, 0
        self._samples.clear()
        return report


def _completed(seen: _Seen, event: Completed) -> Sample:
    ttft_s = None if seen.first_s is None else event.ledger.ttft_ns / 1e9
    gaps = seen.output_tokens - 1
    return Sample(
        prompt_tokens=seen.prompt_tokens,
        computed_tokens=max(0, seen.prompt_tokens - event.cached_tokens),
        output_tokens=seen.output_tokens,
        ttft_s=ttft_s,
        tpot_s=(event.ledger.total_ns - event.ledger.ttft_ns) / 1e9 / gaps if gaps > 0 else None,
        ttft_slo_s=seen.ttft_slo_s,
        tpot_slo_s=seen.tpot_slo_s,
    )


def _broken(seen: _Seen) -> Sample:
    """Of a request that was refused, or that failed on its way: then it says what it had."""
    return Sample(
        prompt_tokens=seen.prompt_tokens,
        computed_tokens=0 if seen.first_s is None else seen.prompt_tokens,
        output_tokens=seen.output_tokens,
        ttft_s=None if seen.first_s is None else seen.first_s - seen.arrived_s,
        ttft_slo_s=seen.ttft_slo_s,
        tpot_slo_s=seen.tpot_slo_s,
    )
