"""What gateways report of their load, and the load of the cluster: from reports and workers' statistics. Pure."""

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from msgspec import Struct

from cluster.policy.scaling.balance import SOON_S, Answers, Mix
from cluster.spec import ElasticSpec
from diptych.view import WorkerView
from workers.request import SLO
from workers.stats import WorkerStats

BACKLOG_S = 10.0  # a backlog counts as if it came within this time
RECENT_S = 5.0  # window of the prefill load
CHANCE = 2.0  # standard deviations; recent load that differs by less is not another load
MIN_REQUESTS = 5  # with fewer in the window there is no load to speak of
_MIN_RECENT_REQUESTS = 8


class Sample(Struct, frozen=True, gc=False):
    """One request that has ended. `computed_tokens` of its prompt were not cached. SLOs in seconds; None: no SLO."""

    prompt_tokens: int
    computed_tokens: int
    ttft_slo_s: float | None = None
    tpot_slo_s: float | None = None


class LoadReport(Struct, frozen=True, gc=False):
    """What one gateway has seen of one model's requests since its last report, `seconds` ago.

    `arrived` requests came, with `arrived_tokens` of prompt; their answers are expected to have `expected_tokens`.
    """

    gateway: str
    seconds: float
    arrived: int
    arrived_tokens: int
    expected_tokens: int = 0
    samples: tuple[Sample, ...] = ()
    model: str = ""


class OfferedLoad:
    """Keeps the load reports of the elastic window. Owned by `Elastic`.

    `slo`: the gateway's. `postpones_late`: late prompts delay no others (`engine.prompt_order: deadline`).
    """

    def __init__(self, elastic: ElasticSpec, slo: SLO, *, postpones_late: bool) -> None:
        self._window_s, self._period_s = elastic.window_s, elastic.period_s
        self._slo = slo
        self._postpones_late = postpones_late
        self._reports: deque[tuple[float, LoadReport]] = deque()
        self._begun_s: float | None = None

    @property
    def has_reports(self) -> bool:
        """Whether any gateway reported within the window of the last `mix` call."""
        return bool(self._reports)

    def on_report(self, report: LoadReport, now_s: float) -> None:
        if self._begun_s is None:
            self._begun_s = now_s - report.seconds
        self._reports.append((now_s, report))

    def mix(self, workers: Sequence[WorkerView], now_s: float) -> Mix | None:
        """The present load; None: hardly any.

        Prompts are those of the last `RECENT_S`, or of the window if the difference may be chance. Answers are those of
        either, whichever are more, since earlier answers continue to decode. Waiting prompts beyond the usual number
        are the backlog.
        """
        self._forget(now_s)
        reports = [report for _, report in self._reports]
        samples = [sample for report in reports for sample in report.samples]
        window, recent = _total(reports), _total(self._recent(now_s))
        if window.requests < MIN_REQUESTS or self._begun_s is None:
            return None
        window_s = max(self._period_s, min(self._window_s, now_s - self._begun_s))
        recent_s = max(self._period_s, min(recent.seconds, window_s))
        spread = _spread(samples)
        if _is_chance(window, window_s, recent, recent_s, spread):
            recent, recent_s = window, window_s
        prompt = recent.prompt_tokens / recent.requests
        sampled = sum(sample.prompt_tokens for sample in samples)
        computed = sum(sample.computed_tokens for sample in samples) / sampled if sampled else 1.0
        computed_tokens = max(1.0, prompt * (computed or 1.0))
        ttft_s = _median([sample.ttft_slo_s for sample in samples], self._slo.ttft_s)
        usual = recent.requests / recent_s * (ttft_s or 0.0) / 2.0  # waiting, if each waits for half of its TTFT SLO
        waiting = sum(worker.stats.queued_tokens for worker in workers) / computed_tokens
        backlog = max(0.0, waiting - usual)
        if ttft_s is not None and self._postpones_late:
            backlog = min(backlog, usual)  # the rest is late and delays no others
        running = sum(_num_decoding(worker.stats) for worker in workers)
        soon = running + recent.requests / recent_s * SOON_S
        answers = [
            _answers(total, seconds, running, soon) for total, seconds in ((window, window_s), (recent, recent_s))
        ]
        return Mix(
            rate=recent.requests / recent_s,
            prompt_tokens=prompt,
            computed_tokens=computed_tokens,
            output_tokens=max(1.0, recent.expected_tokens / recent.requests),
            ttft_s=ttft_s,
            tpot_s=_median([sample.tpot_slo_s for sample in samples], self._slo.tpot_s),
            spread=spread,
            backlog=backlog / BACKLOG_S,
            answers=max(answers, key=lambda each: each.rate * each.output_tokens),
            requests=recent.requests,
            is_known=len(samples) >= MIN_REQUESTS,
            seen_s=window_s,
        )

    def _recent(self, now_s: float) -> list[LoadReport]:
        """The reports of the last `RECENT_S`, or of longer if these have fewer than `_MIN_RECENT_REQUESTS`."""
        chosen: list[LoadReport] = []
        arrived = 0
        for reported_s, report in reversed(self._reports):
            if now_s - reported_s >= RECENT_S and arrived >= _MIN_RECENT_REQUESTS:
                break
            chosen.append(report)
            arrived += report.arrived
        return chosen

    def _forget(self, now_s: float) -> None:
        while self._reports and self._reports[0][0] < now_s - self._window_s:
            self._reports.popleft()


@dataclass(frozen=True, slots=True)
class _Total:
    requests: int
    prompt_tokens: int
    expected_tokens: int
    seconds: float


def _total(reports: Sequence[LoadReport]) -> _Total:
    """The sums of all reports; `seconds` are those of the gateway whose reports cover the most."""
    seconds: dict[str, float] = {}
    for report in reports:
        seconds[report.gateway] = seconds.get(report.gateway, 0.0) + report.seconds
    return _Total(
        sum(report.arrived for report in reports),
        sum(report.arrived_tokens for report in reports),
        sum(report.expected_tokens for report in reports),
        max(seconds.values(), default=0.0),
    )


def _is_chance(window: _Total, window_s: float, recent: _Total, recent_s: float, spread: float) -> bool:
    """Whether random arrivals at the window's rate explain the recent tokens, within `CHANCE` standard deviations."""
    expected = window.requests / window_s * recent_s
    relative_error = math.sqrt((1.0 + spread) / max(1.0, expected))
    pairs = (window.prompt_tokens, recent.prompt_tokens), (window.expected_tokens, recent.expected_tokens)
    return all(
        abs(part / recent_s - whole / window_s) <= CHANCE * relative_error * whole / window_s for whole, part in pairs
    )


def _answers(total: _Total, seconds: float, running: int, soon: float) -> Answers:
    count = max(1, total.requests)
    return Answers(
        rate=total.requests / seconds,
        prompt_tokens=total.prompt_tokens / count,
        output_tokens=max(1.0, total.expected_tokens / count),
        running=running,
        soon=soon,
    )


def _num_decoding(stats: WorkerStats) -> int:
    """Sequences that decode. More queued tokens than running sequences: one of these is still in prefill."""
    return max(0, stats.running - int(stats.queued_tokens > stats.running))


def _median(slos: Sequence[float | None], default: float | None) -> float | None:
    known = sorted(each for each in slos if each is not None)
    return known[len(known) // 2] if known else default


def _spread(samples: Sequence[Sample]) -> float:
    """The squared coefficient of variation of computed prompt tokens; 1 without samples."""
    if len(samples) < 2:
        return 1.0
    mean = sum(sample.computed_tokens for sample in samples) / len(samples)
    if not mean:
        return 1.0
    return sum((sample.computed_tokens - mean) ** 2 for sample in samples) / len(samples) / mean**2
