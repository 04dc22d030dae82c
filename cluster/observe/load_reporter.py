"""One gateway's load since its last report: arrivals, requests that wait for a first token, how requests ended.

The controller's elastic policy reads it. Knows no worker; bounded.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from cluster.events import ClusterError, Completed
from cluster.observe.request_observer import RequestEnd, RequestObserver
from cluster.policy.scaling.evidence import Report, Sample
from workers.request import SLO, Request

MAX_SAMPLES = 512  # of one report: the latest


@dataclass(slots=True)
class _Running:
    """A running request."""

    arrived_s: float
    ttft_slo_s: float | None
    tpot_slo_s: float | None
    prompt_tokens: int
    first_s: float | None = None
    output_tokens: int = 0


class LoadReporter(RequestObserver):
    """Owned by a Dispatcher. `default_slo`: of requests without one. `clock`: the dispatcher's, in seconds."""

    def __init__(self, gateway: str, default_slo: SLO, clock: Callable[[], float]) -> None:
        self._gateway = gateway
        self._default_slo = default_slo
        self._clock = clock
        self._reported_s = clock()
        self._running: dict[str, _Running] = {}
        self._waiting: dict[str, _Running] = {}  # no token yet, in the order of arrival
        self._groups: dict[str, int] = {}  # running requests of each
        self._arrived = 0
        self._arrived_tokens = 0
        self._expected_tokens = 0
        self._samples: deque[Sample] = deque(maxlen=MAX_SAMPLES)

    def on_arrived(self, request: Request, arrived_s: float, expected_tokens: int) -> None:
        """Counts a prompt that several answers share once."""
        slo, prompt_tokens = request.slo, len(request.prompt)
        self._waiting[request.id] = self._running[request.id] = _Running(
            arrived_s,
            self._default_slo.ttft_s if slo.ttft_s is None else slo.ttft_s,
            self._default_slo.tpot_s if slo.tpot_s is None else slo.tpot_s,
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
        """A cancelled request leaves no sample."""
        request = end.request
        self._waiting.pop(request.id, None)
        running = self._running.pop(request.id)
        running.output_tokens = end.num_tokens
        if end.completed is not None:
            self._samples.append(_completed(running, end.completed))
        if isinstance(end.error, ClusterError):
            self._samples.append(_failed(running))
        self._leave(request.group)

    def _leave(self, group: str) -> None:
        if group:
            self._groups[group] -= 1
            if not self._groups[group]:
                del self._groups[group]

    def report(self) -> Report:
        """The load since the last call."""
        now_s = self._clock()
        waits = [(now_s - running.arrived_s, running.ttft_slo_s) for running in self._waiting.values()]
        report = Report(
            gateway=self._gateway,
            seconds=now_s - self._reported_s,
            arrived=self._arrived,
            arrived_tokens=self._arrived_tokens,
            waiting=len(waits),
            overdue=sum(slo_s is not None and waited_s > slo_s for waited_s, slo_s in waits),
            oldest_wait_s=max((waited_s for waited_s, _ in waits), default=0.0),
            expected_tokens=self._expected_tokens,
            samples=tuple(self._samples),
        )
        self._reported_s, self._arrived, self._arrived_tokens, self._expected_tokens = now_s, 0, 0, 0
        self._samples.clear()
        return report


def _completed(running: _Running, event: Completed) -> Sample:
    ttft_s = None if running.first_s is None else event.ledger.ttft_ns / 1e9
    gaps = running.output_tokens - 1
    return Sample(
        prompt_tokens=running.prompt_tokens,
        computed_tokens=max(0, running.prompt_tokens - event.cached_tokens),
        output_tokens=running.output_tokens,
        ttft_s=ttft_s,
        tpot_s=(event.ledger.total_ns - event.ledger.ttft_ns) / 1e9 / gaps if gaps > 0 else None,
        ttft_slo_s=running.ttft_slo_s,
        tpot_slo_s=running.tpot_slo_s,
    )


def _failed(running: _Running) -> Sample:
    """Of a refused or failed request: with the tokens and times that it got."""
    return Sample(
        prompt_tokens=running.prompt_tokens,
        computed_tokens=0 if running.first_s is None else running.prompt_tokens,
        output_tokens=running.output_tokens,
        ttft_s=None if running.first_s is None else running.first_s - running.arrived_s,
        ttft_slo_s=running.ttft_slo_s,
        tpot_slo_s=running.tpot_slo_s,
    )
