"""The load of one gateway since its last report, for the elastic policy: arrivals, and the computed part of prompts.

Bounded. Knows no worker.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from cluster.events import ClusterError
from cluster.observe.request_observer import RequestEnd, RequestObserver
from cluster.policy.scaling.offered_load import LoadReport, Sample
from workers.request import SLO, Request

MAX_SAMPLES = 512  # the latest ones of a report


@dataclass(slots=True)
class _Running:
    """A running request."""

    prompt_tokens: int
    ttft_slo_s: float | None
    tpot_slo_s: float | None
    has_token: bool = False


class LoadReporter(RequestObserver):
    """Owned by the Dispatcher of this model. `default_slo`: of requests without one. `clock`: the dispatcher's, in
    seconds.
    """

    def __init__(self, gateway: str, default_slo: SLO, clock: Callable[[], float], model: str = "") -> None:
        self._gateway = gateway
        self._model = model
        self._default_slo = default_slo
        self._clock = clock
        self._reported_s = clock()
        self._running: dict[str, _Running] = {}
        self._groups: dict[str, int] = {}  # number of running requests
        self._arrived = 0
        self._arrived_tokens = 0
        self._expected_tokens = 0
        self._samples: deque[Sample] = deque(maxlen=MAX_SAMPLES)

    def on_arrived(self, request: Request, arrived_s: float, expected_tokens: int) -> None:
        """A prompt that several answers share counts once."""
        slo, prompt_tokens = request.slo, len(request.prompt)
        self._running[request.id] = _Running(
            prompt_tokens,
            self._default_slo.ttft_s if slo.ttft_s is None else slo.ttft_s,
            self._default_slo.tpot_s if slo.tpot_s is None else slo.tpot_s,
        )
        self._arrived += 1
        self._expected_tokens += expected_tokens
        if request.group not in self._groups:
            self._arrived_tokens += prompt_tokens
        if request.group:
            self._groups[request.group] = self._groups.get(request.group, 0) + 1

    def on_first_token(self, request: Request) -> None:
        self._running[request.id].has_token = True

    def on_end(self, end: RequestEnd) -> None:
        """A cancelled request leaves no sample."""
        request = end.request
        running = self._running.pop(request.id)
        if end.completed is not None:
            self._samples.append(_sample(running, running.prompt_tokens - end.completed.cached_tokens))
        if isinstance(end.error, ClusterError):
            self._samples.append(_sample(running, running.prompt_tokens if running.has_token else 0))
        if group := request.group:
            self._groups[group] -= 1
            if not self._groups[group]:
                del self._groups[group]

    def report(self) -> LoadReport:
        """The load since the last call."""
        now_s = self._clock()
        report = LoadReport(
            gateway=self._gateway,
            seconds=now_s - self._reported_s,
            arrived=self._arrived,
            arrived_tokens=self._arrived_tokens,
            expected_tokens=self._expected_tokens,
            samples=tuple(self._samples),
            model=self._model,
        )
        self._reported_s, self._arrived, self._arrived_tokens, self._expected_tokens = now_s, 0, 0, 0
        self._samples.clear()
        return report


def _sample(running: _Running, computed_tokens: int) -> Sample:
    return Sample(running.prompt_tokens, max(0, computed_tokens), running.ttft_slo_s, running.tpot_slo_s)
