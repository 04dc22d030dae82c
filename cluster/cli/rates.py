"""Rates between two snapshots of a cluster. Pure: the time is an argument.

Counters restart at 0 with the gateway or the worker's incarnation. A rate across a restart is None, never negative.
"""

from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from cluster.policy.slo_attainment import ClassScore, SLOCount
from diptych.history import Traffic

if TYPE_CHECKING:
    from diptych.client import ClusterStatus

WINDOW_S = 60.0


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A status and when it was received, in seconds of a monotonic clock."""

    at_s: float
    status: "ClusterStatus"


@dataclass(frozen=True, slots=True)
class WorkerRates:
    """Per second. `hit_share`: share of recent prompt tokens found in the prefix cache."""

    steps_s: float | None = None
    tokens_s: float | None = None  # computed prompt tokens and output tokens
    bytes_s: float | None = None
    hit_share: float | None = None


@dataclass(frozen=True, slots=True)
class Rates:
    """Between the last two snapshots. `kept`: SLO attainment over the last `kept_s` seconds (None: since the start)."""

    requests_s: float | None = None
    tokens_s: float | None = None
    refused_s: float | None = None
    kept_s: float | None = None
    kept: tuple[ClassScore, ...] = ()
    workers: Mapping[str, WorkerRates] = field(default_factory=dict)


class StatusWindow:
    """The snapshots of the last minute; cleared when the gateway restarts."""

    def __init__(self) -> None:
        self._snapshots: deque[Snapshot] = deque()

    def add(self, snapshot: Snapshot) -> None:
        if self._snapshots and not _continues(self._snapshots[-1], snapshot):
            self._snapshots.clear()
        self._snapshots.append(snapshot)
        while snapshot.at_s - self._snapshots[0].at_s > WINDOW_S:
            self._snapshots.popleft()

    @property
    def latest(self) -> Snapshot:
        return self._snapshots[-1]

    def rates(self, *, since_beginning: bool = False) -> Rates:
        """`since_beginning`: SLO attainment since the gateway started."""
        before = self._snapshots[-2] if len(self._snapshots) > 1 else None
        oldest = None if since_beginning or before is None else self._snapshots[0]
        return rates(before, self.latest, oldest)


def rates(before: Snapshot | None, now: Snapshot, oldest: Snapshot | None = None) -> Rates:
    """`before`: the previous snapshot. `oldest`: the start of the window, for SLO attainment and cache hits."""
    status = now.status
    then = before.status if before is not None and _continues(before, now) and now.at_s > before.at_s else None
    first = oldest.status if oldest is not None and _continues(oldest, now) else None
    if before is None or then is None:
        return Rates(kept=status.slo_attainment.classes, workers=_workers(None, None, status, 0.0))
    seconds = now.at_s - before.at_s
    outcomes = _rate(_sum(then.slo_attainment.outcomes), _sum(status.slo_attainment.outcomes), seconds)
    previous = dict(then.recent.traffic)
    tokens = sum(
        traffic.output_tokens - previous.get(name, Traffic()).output_tokens for name, traffic in status.recent.traffic
    )
    return Rates(
        requests_s=outcomes,
        tokens_s=_rate(0, tokens, seconds),
        refused_s=_rate(_sum(then.slo_attainment.refused), _sum(status.slo_attainment.refused), seconds),
        kept_s=None if first is None or oldest is None else now.at_s - oldest.at_s,
        kept=status.slo_attainment.classes if first is None else tuple(_since(first, status)),
        workers=_workers(then, first, status, seconds),
    )


def _continues(before: Snapshot, now: Snapshot) -> bool:
    """Whether both are of the same gateway, without a restart between them."""
    one, other = before.status, now.status
    return one.gateway == other.gateway and one.recent.uptime_s <= other.recent.uptime_s


def _workers(
    then: "ClusterStatus | None", first: "ClusterStatus | None", now: "ClusterStatus", seconds: float
) -> dict[str, WorkerRates]:
    before = {} if then is None else {worker.name: worker for worker in then.view.workers}
    traffic_then = {} if then is None else dict(then.recent.traffic)
    traffic_first = {} if first is None else dict(first.recent.traffic)
    traffic_now = dict(now.recent.traffic)
    found = {}
    for worker in now.view.workers:
        traffic = traffic_now.get(worker.name, Traffic())
        was = traffic_then.get(worker.name, Traffic())
        steps = tokens = moved = None
        if (same := before.get(worker.name)) is not None and same.incarnation == worker.incarnation:
            steps = _rate(same.stats.steps, worker.stats.steps, seconds)
        if then is not None:
            tokens = _rate(_computed(was), _computed(traffic), seconds)
            moved = _rate(was.transfer_bytes, traffic.transfer_bytes, seconds)
        hits = _hits(traffic_first.get(worker.name, Traffic()), traffic)
        found[worker.name] = WorkerRates(steps, tokens, moved, hits)
    return found


def _computed(traffic: Traffic) -> int:
    return traffic.prompt_tokens - traffic.cached_tokens + traffic.output_tokens


def _hits(first: Traffic, now: Traffic) -> float | None:
    """The share since `first`; since the gateway's start if there was no prompt since `first`."""
    prompts = now.prompt_tokens - first.prompt_tokens
    if prompts > 0:
        return max(0, now.cached_tokens - first.cached_tokens) / prompts
    return now.cached_tokens / now.prompt_tokens if now.prompt_tokens else None


def _since(first: "ClusterStatus", now: "ClusterStatus") -> Iterator[ClassScore]:
    """The scores of each class since `first`, without classes that had no request."""
    before = {(score.name, score.model): score for score in first.slo_attainment.classes}
    for score in now.slo_attainment.classes:
        was = before.get((score.name, score.model), ClassScore(score.name, 0, SLOCount(), SLOCount(), SLOCount()))
        if score.requests > was.requests:
            ttft, tpot, both = (
                SLOCount(one.settled - other.settled, one.kept - other.kept)
                for one, other in ((score.ttft, was.ttft), (score.tpot, was.tpot), (score.both, was.both))
            )
            yield ClassScore(score.name, score.requests - was.requests, ttft, tpot, both, model=score.model)


def _sum(counts: tuple[tuple[str, int], ...]) -> int:
    return sum(count for _, count in counts)


def _rate(before: int, now: int, seconds: float) -> float | None:
    return (now - before) / seconds if now >= before else None
