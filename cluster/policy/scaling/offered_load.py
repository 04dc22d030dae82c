"""The load as gateways tell of it: what came in the last seconds, and what waits and runs on workers. Pure."""

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from cluster.policy.scaling.balance import Answers, Mix
from cluster.policy.scaling.evidence import Report, Sample
from cluster.spec import ElasticSpec
from diptych.view import WorkerView
from workers.request import SLO
from workers.stats import WorkerStats

BACKLOG_S = 10.0  # in which what waits now should be computed
LATELY_S = 5.0  # in which prompts of a new kind show
SOON_S = 5.0  # in which roles can follow: what will decode only later is no reason for a step
CHANCE = 2.0  # standard deviations: what differs less is no other load
LEAST_REQUESTS = 5  # that say anything about a load
_ENOUGH_REQUESTS = 8


class Offered:
    """Keeps reports for the elastic window. `slo`: the gateway's; `puts_off`: late prompts delay no others."""

    def __init__(self, elastic: ElasticSpec, slo: SLO, *, puts_off: bool) -> None:
        self._window_s, self._period_s = elastic.window_s, elastic.period_s
        self._slo = slo
        self._puts_off = puts_off
        self._reports: deque[tuple[float, Report]] = deque()
        self._begun_s: float | None = None

    @property
    def has_reports(self) -> bool:
        """Whether any gateway reported in the window for which `mix` was last asked."""
        return bool(self._reports)

    def on_report(self, report: Report, now_s: float) -> None:
        """What one gateway saw since its last report."""
        if self._begun_s is None:
            self._begun_s = now_s - report.seconds
        self._reports.append((now_s, report))

    def mix(self, workers: Sequence[WorkerView], now_s: float) -> Mix | None:
        """Recent prompts; recent answers, or those of the whole window where they are more.

        New kinds of prompts act at once, while earlier answers continue for a while. What waits now counts as
        if it came in the next `BACKLOG_S`. None: there is hardly any load.
        """
        self._forget(now_s)
        reports = [report for _, report in self._reports]
        samples = [sample for report in reports for sample in report.samples]
        whole, lately = _arrived(reports), _arrived(self._lately(now_s))
        if whole.requests < LEAST_REQUESTS or self._begun_s is None:
            return None
        span_s = max(self._period_s, min(self._window_s, now_s - self._begun_s))
        late_s = max(self._period_s, min(lately.seconds, span_s))
        spread = _spread(samples)
        if _is_chance(whole, span_s, lately, late_s, spread):
            lately, late_s = whole, span_s
        prompt = lately.prompt_tokens / lately.requests
        asked = sum(sample.prompt_tokens for sample in samples)
        computed = sum(sample.computed_tokens for sample in samples) / asked if asked else 1.0
        computed_tokens = max(1.0, prompt * (computed or 1.0))
        ttft_s = _promised([sample.ttft_slo_s for sample in samples], self._slo.ttft_s)
        usual = lately.requests / late_s * (ttft_s or 0.0) / 2.0  # wait where each waits for half of the TTFT SLO
        waiting = sum(worker.stats.queued_tokens for worker in workers) / computed_tokens
        backlog = max(0.0, waiting - usual)
        if ttft_s is not None and self._puts_off:
            backlog = min(backlog, usual)  # beyond that they are late, and delay no others
        running = sum(_decoding(worker.stats) for worker in workers)
        soon = running + lately.requests / late_s * SOON_S
        kinds = [_answers(seen, seconds, running, soon) for seen, seconds in ((whole, span_s), (lately, late_s))]
        return Mix(
            rate=lately.requests / late_s,
            prompt_tokens=prompt,
            computed_tokens=computed_tokens,
            output_tokens=max(1.0, lately.expected_tokens / lately.requests),
            ttft_s=ttft_s,
            tpot_s=_promised([sample.tpot_slo_s for sample in samples], self._slo.tpot_s),
            spread=spread,
            backlog=backlog / BACKLOG_S,
            answers=max(kinds, key=lambda each: each.rate * each.output_tokens),
            requests=lately.requests,
            is_known=len(samples) >= LEAST_REQUESTS,
        )

    def _lately(self, now_s: float) -> list[Report]:
        """The reports of the last `LATELY_S`, or of longer, until so many requests are among them as say anything."""
        chosen: list[Report] = []
        arrived = 0
        for reported_s, report in reversed(self._reports):
            if now_s - reported_s >= LATELY_S and arrived >= _ENOUGH_REQUESTS:
                break
            chosen.append(report)
            arrived += report.arrived
        return chosen

    def _forget(self, now_s: float) -> None:
        while self._reports and self._reports[0][0] < now_s - self._window_s:
            self._reports.popleft()


@dataclass(frozen=True, slots=True)
class _Arrived:
    requests: int
    prompt_tokens: int
    expected_tokens: int
    seconds: float


def _arrived(reports: Sequence[Report]) -> _Arrived:
    """All together, in the time that the gateway with the longest reports saw."""
    seconds: dict[str, float] = {}
    for report in reports:
        seconds[report.gateway] = seconds.get(report.gateway, 0.0) + report.seconds
    return _Arrived(
        sum(report.arrived for report in reports),
        sum(report.arrived_tokens for report in reports),
        sum(report.expected_tokens for report in reports),
        max(seconds.values(), default=0.0),
    )


def _is_chance(whole: _Arrived, span_s: float, lately: _Arrived, late_s: float, spread: float) -> bool:
    """Whether random arrivals at the whole window's rate would often bring this many requests, this long, in a part."""
    expected = whole.requests / span_s * late_s
    off = math.sqrt((1.0 + spread) / max(1.0, expected))
    pairs = ((whole.prompt_tokens, lately.prompt_tokens), (whole.expected_tokens, lately.expected_tokens))
    return all(abs(part / late_s - all_ / span_s) <= CHANCE * off * all_ / span_s for all_, part in pairs)


def _answers(arrived: _Arrived, seconds: float, running: int, soon: float) -> Answers:
    count = max(1, arrived.requests)
    return Answers(
        rate=arrived.requests / seconds,
        prompt_tokens=arrived.prompt_tokens / count,
        output_tokens=max(1.0, arrived.expected_tokens / count),
        running=running,
        soon=soon,
    )


def _decoding(stats: WorkerStats) -> int:
    """Sequences that decode; where there is more to compute than a token for each, one of them is a prompt still."""
    return max(0, stats.running - int(stats.queued_tokens > stats.running))


def _promised(promises: Sequence[float | None], default: float | None) -> float | None:
    """The median SLO of requests."""
    known = sorted(each for each in promises if each is not None)
    return known[len(known) // 2] if known else default


def _spread(samples: Sequence[Sample]) -> float:
    """The squared coefficient of variation of prompts' computed tokens; 1 while that is not known."""
    if len(samples) < 2:
        return 1.0
    mean = sum(sample.computed_tokens for sample in samples) / len(samples)
    if not mean:
        return 1.0
    return sum((sample.computed_tokens - mean) ** 2 for sample in samples) / len(samples) / mean**2
