"""Counts a gateway's requests for metrics: latencies, phases, tokens, transfers. Knows no metric's name.

The specification bounds the labels: classes, outcomes, parts of the ledger.
"""

from collections.abc import Iterable, Sequence

from cluster.events import Completed
from cluster.observe.ledger import PHASES, LatencyLedger
from cluster.observe.request_observer import OnTokens, RequestEnd, RequestObserver
from cluster.policy.estimate.histograms import (
    BYTES,
    RANGES,
    SECONDS,
    TOKEN_SECONDS,
    TOKENS,
    HistogramBuilder,
    RequestTotals,
)
from cluster.policy.slo_attainment import OTHER, Ended
from kvtransfer.ticket import TransferReport
from workers.request import FinishReason, Request

DEFAULT_CLASS = "default"  # of requests without a class
STAGES = ("queue", "prefill", "decode", "inference")
QUEUEING = ("admission", "route", "reserve", "prefill_queue")


class RequestMetrics(RequestObserver):
    """Owned by a Dispatcher. Requests of unknown classes count as `other`. Series of `classes` and `transports` start
    with zeros.
    """

    def __init__(self, classes: Iterable[str], transports: Iterable[str] = ()) -> None:
        named = dict.fromkeys((DEFAULT_CLASS, *classes))
        self._classes = {name: (name,) for name in named}
        by_class = [(name,) for name in named]
        self._prompt_tokens = self._cached_tokens = self._generated_tokens = 0
        self._finishes = dict.fromkeys((reason.value for reason in FinishReason), 0)
        self._ttft = HistogramBuilder(SECONDS, by_class)
        self._requests = HistogramBuilder(SECONDS, [(name, "completed") for name in named])
        self._tpot, self._gaps = HistogramBuilder(TOKEN_SECONDS, by_class), HistogramBuilder(TOKEN_SECONDS, by_class)
        self._prompts, self._answers = HistogramBuilder(TOKENS, by_class), HistogramBuilder(TOKENS, by_class)
        self._parts = HistogramBuilder(SECONDS, [(part,) for part in PHASES])
        self._stages = HistogramBuilder(SECONDS, [(stage,) for stage in STAGES])
        by_transport = [(name,) for name in transports]
        self._transfers = tuple(HistogramBuilder(bounds, by_transport) for bounds in (SECONDS, BYTES, RANGES))

    def token_observers(self, request: Request, worker: str) -> tuple[OnTokens]:
        label = self._label(request.slo.class_name)

        def count(num_tokens: int, gaps_s: Sequence[float]) -> None:
            self._generated_tokens += num_tokens
            self._gaps.add_all(label, gaps_s)

        return (count,)

    def on_end(self, end: RequestEnd) -> None:
        self.add(end.score, end.completed, end.transfers)

    def on_rejected(self, class_name: str, cause: str) -> None:
        self.add(Ended("refused", class_name, cause), None, ())

    def add(self, ended: Ended, completed: Completed | None, transfers: Iterable[TransferReport]) -> None:
        """Count a finished request, once."""
        label = self._label(ended.class_name)
        self._requests.add((*label, ended.outcome), ended.waited_s)
        if ended.ttft_s is not None:
            self._ttft.add(label, ended.ttft_s)
        if ended.tpot_s is not None:
            self._tpot.add(label, ended.tpot_s)
        for report in transfers:
            values = report.elapsed_s, report.num_bytes, report.num_descriptors
            for counting, value in zip(self._transfers, values, strict=True):
                counting.add((report.transport,), value)
        if completed is not None:
            self._completed(label, completed)

    def _completed(self, label: tuple[str, ...], completed: Completed) -> None:
        self._finishes[completed.finish.value] += 1
        self._prompt_tokens += completed.prompt_tokens
        self._cached_tokens += completed.cached_tokens
        self._prompts.add(label, completed.prompt_tokens)
        self._answers.add(label, completed.completion_tokens)
        for part, seconds in _parts(completed.ledger).items():
            self._parts.add((part,), seconds)
        for stage, seconds in stages(completed.ledger).items():
            self._stages.add((stage,), seconds)

    def snapshot(self) -> RequestTotals:
        seconds, num_bytes, ranges = (each.snapshot() for each in self._transfers)
        return RequestTotals(
            prompt_tokens=self._prompt_tokens,
            cached_tokens=self._cached_tokens,
            generated_tokens=self._generated_tokens,
            finishes=tuple(self._finishes.items()),
            ttft=self._ttft.snapshot(),
            tpot=self._tpot.snapshot(),
            gaps=self._gaps.snapshot(),
            requests=self._requests.snapshot(),
            prompts=self._prompts.snapshot(),
            answers=self._answers.snapshot(),
            parts=self._parts.snapshot(),
            stages=self._stages.snapshot(),
            transfer_seconds=seconds,
            transfer_bytes=num_bytes,
            transfer_ranges=ranges,
        )

    def _label(self, class_name: str) -> tuple[str, ...]:
        return self._classes.get(class_name, (OTHER,))


def _parts(ledger: LatencyLedger) -> dict[str, float]:
    parts: dict[str, float] = {}
    for part, ns in ledger.first + ledger.rest:
        parts[part] = parts.get(part, 0.0) + ns / 1e9
    return parts


def stages(ledger: LatencyLedger) -> dict[str, float]:
    """Seconds of a request by `STAGES`; `inference` is prefill and decode together."""
    queue_s = sum(ns for part, ns in ledger.first if part in QUEUEING) / 1e9
    prefill_s, decode_s = ledger.ttft_ns / 1e9 - queue_s, (ledger.total_ns - ledger.ttft_ns) / 1e9
    return dict(zip(STAGES, (queue_s, prefill_s, decode_s, prefill_s + decode_s), strict=True))
