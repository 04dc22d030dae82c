"""A gateway's history: finished requests, events of workers, and samples of worker load.

Bounded by count and by age. The traffic counters of each worker only grow, so that clients can compute rates. Has no
prompts and no tokens.
"""

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from heapq import merge
from operator import attrgetter
from typing import Any

from cluster.observe.request_observer import OnTokens, RequestEnd, RequestObserver
from diptych.history import ClusterEvent, Load, Recent, RequestTrace, Traffic, Window
from diptych.view import ClusterView
from kvtransfer.ticket import TransferReport
from workers.request import Request

MAX_EVENTS = 1024
MAX_LOADS = 65_536  # one for each worker and sample
RECENT_EVENTS = 32
MAX_TEXT_CHARS = 300
CHANGES = ("flip", "move", "lost", "back", "crash loop")  # events that show as a worker's latest change
END_NS, AT_NS = attrgetter("end_ns"), attrgetter("at_ns")


class History(RequestObserver):
    """Owned by a Dispatcher. Keeps up to `max_traces` finished requests of the last `age_s`; 0: no traces, no loads."""

    def __init__(self, max_traces: int, age_s: float, now_ns: Callable[[], int]) -> None:
        self._keeps_traces = max_traces > 0
        self._age_ns = round(age_s * 1e9)
        self._now_ns = now_ns
        self._began_ns = now_ns()
        self._whole_ns = self._began_ns  # time of the newest dropped entry
        self._traffic: dict[str, Traffic] = {}
        self._traces: deque[RequestTrace] = deque(maxlen=max_traces)
        self._events: deque[ClusterEvent] = deque(maxlen=MAX_EVENTS)
        self._refusals: deque[ClusterEvent] = deque(maxlen=MAX_EVENTS)  # separate, because there may be very many
        self._loads: deque[Load] = deque(maxlen=MAX_LOADS if max_traces else 0)

    def _traffic_of(self, worker: str) -> Traffic:
        return self._traffic.setdefault(worker, Traffic())

    # ---- events of requests ------------------------------------------------------------------------------------

    def on_prefilled(self, worker: str, prompt_tokens: int, cached_tokens: int) -> None:
        traffic = self._traffic_of(worker)
        traffic.prompts += 1
        traffic.prompt_tokens += prompt_tokens
        traffic.cached_tokens += cached_tokens

    def token_observers(self, request: Request, worker: str) -> tuple[OnTokens]:
        traffic = self._traffic_of(worker)

        def count(num_tokens: int, gaps_s: Sequence[float]) -> None:
            traffic.output_tokens += num_tokens

        return (count,)

    def on_transfer(self, reader: str, report: TransferReport) -> None:
        traffic = self._traffic_of(reader)
        traffic.transfers += 1
        traffic.transfer_bytes += report.num_bytes
        traffic.transfer_s += report.elapsed_s

    def on_moved(self, request: Request, source: str, target: str) -> None:
        self.add_event("move", target, f"from {source}", request.id)

    def on_replaced(self, request: Request, worker: str, reason: str) -> None:
        self.add_event("requeue", worker, reason, request.id)

    def on_end(self, end: RequestEnd) -> None:
        if end.score.outcome == "refused":
            self.add_event("refused", "", f"{end.score.refusal}: {end.error}", end.request.id)
        if self._keeps_traces:
            self.add_trace(end.trace())

    def on_rejected(self, class_name: str, cause: str) -> None:
        self.add_event("refused", "", cause)

    # ---- entries ------------------------------------------------------------------------------------------------

    def add_event(self, kind: str, worker: str, text: str, request_id: str = "") -> None:
        now_ns = self._now_ns()
        among = self._refusals if kind == "refused" else self._events
        self._append(among, ClusterEvent(now_ns, kind, worker, text[:MAX_TEXT_CHARS], request_id), AT_NS)
        if kind == "left":
            self._traffic.pop(worker, None)  # over time, the number of worker names is unbounded
        elif kind in CHANGES:
            known = self._traffic_of(worker)
            known.change, known.changed_ns = f"{kind} {text[:MAX_TEXT_CHARS]}", now_ns

    def add_trace(self, trace: RequestTrace) -> None:
        """Keep the trace of a finished request."""
        self._append(self._traces, trace, END_NS)
        self._drop_old()

    def sample(self, view: ClusterView) -> None:
        """Keep the current load of each worker."""
        now_ns = self._now_ns()
        for worker in view.workers:
            stats = worker.stats
            queue = stats.running, stats.waiting, stats.queued_tokens
            load = Load(now_ns, worker.name, *queue, stats.used_blocks)
            self._append(self._loads, load, AT_NS)
        self._drop_old()

    def recent(self, workers: Iterable[str]) -> Recent:
        """Traffic of these workers, and the latest events."""
        now_ns = self._now_ns()
        known = {name: self._traffic[name] for name in workers if name in self._traffic}
        traffic = (
            (name, replace(each, changed_ns=now_ns - each.changed_ns if each.change else 0))
            for name, each in known.items()
        )
        latest = _merged(list(self._events)[-RECENT_EVENTS:], list(self._refusals)[-RECENT_EVENTS:])
        events = tuple(((now_ns - each.at_ns) / 1e9, each) for each in latest)
        return Recent((now_ns - self._began_ns) / 1e9, tuple(traffic), events)

    def window(self, begin_ns: int, end_ns: int, running: Iterable[RequestTrace] = ()) -> Window:
        """Everything that overlaps with this time window, including running requests."""
        self._drop_old()
        traces = (*self._traces, *running)
        whole_ns = self._whole_ns if self._keeps_traces else self._now_ns()
        return Window(
            tuple(each for each in traces if each.end_ns >= begin_ns and each.arrived_ns <= end_ns),
            _merged(*([each for each in among if begin_ns <= each.at_ns <= end_ns] for among in self._both)),
            tuple(each for each in self._loads if begin_ns <= each.at_ns <= end_ns),
            whole_ns if whole_ns > begin_ns else 0,
        )

    def _drop_old(self) -> None:
        oldest_ns = self._now_ns() - self._age_ns
        self._drop_before(oldest_ns, self._traces, END_NS)
        for among in (self._loads, *self._both):
            self._drop_before(oldest_ns, among, AT_NS)

    def _drop_before(self, oldest_ns: int, among: deque[Any], when: Callable[[Any], int]) -> None:
        while among and (dropped_ns := when(among[0])) < oldest_ns:
            among.popleft()
            self._whole_ns = max(self._whole_ns, dropped_ns)

    def _append(self, among: deque[Any], new: object, when: Callable[[Any], int]) -> None:
        """Append to a deque, which drops its oldest entry if it is full."""
        if among and len(among) == among.maxlen:
            self._whole_ns = max(self._whole_ns, when(among[0]))
        among.append(new)

    @property
    def _both(self) -> tuple[deque[ClusterEvent], deque[ClusterEvent]]:
        return self._events, self._refusals


def _merged(one: Iterable[ClusterEvent], other: Iterable[ClusterEvent]) -> tuple[ClusterEvent, ...]:
    return tuple(merge(one, other, key=lambda each: each.at_ns))
