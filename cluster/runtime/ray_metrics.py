"""A worker's statistics as Ray metrics, on its node's metrics port. Updated when a gateway polls the worker."""

from collections.abc import Callable

from ray.util.metrics import Counter, Gauge, Histogram

from workers.stats import WorkerStats

UPDATE_S = 5.0  # Ray exports no faster
STEP_SECONDS = [0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0]
PREFIX, TAGS = "diptych_worker_", ("worker", "pool")

Value = Callable[[WorkerStats], float]
GAUGES: tuple[tuple[str, str, Value], ...] = (
    ("running_requests", "Running sequences.", lambda stats: stats.running),
    ("waiting_requests", "Sequences that wait for blocks or a slot.", lambda stats: stats.waiting),
    ("kv_used_ratio", "Share of the KV blocks in use.", lambda s: 1.0 - s.free_blocks / max(1, s.total_blocks)),
)
COUNTERS: tuple[tuple[str, str, Value], ...] = (
    ("transfers", "Fetches of KV that arrived.", lambda stats: stats.pulls.arrived),
    ("failed_transfers", "Fetches of KV that failed.", lambda stats: stats.pulls.failed),
    ("transfer_bytes", "Bytes fetched.", lambda stats: stats.pulls.num_bytes),
    ("transfer_seconds", "Time of the fetches that arrived, summed.", lambda stats: stats.pulls.seconds),
    ("expired_leases", "Leases that expired.", lambda stats: stats.expired_leases),
)


class WorkerMetrics:
    """Owned by a worker's actor. Ray adds `ray_` before names, and `_total` after counters."""

    def __init__(self, worker: str, pool: str) -> None:
        text = "Moving average of step times, sampled while there are steps."
        self._step = Histogram(f"{PREFIX}step_seconds", text, STEP_SECONDS, TAGS)
        self._gauges = [(Gauge(f"{PREFIX}{name}", text, TAGS), value) for name, text, value in GAUGES]
        self._counters = [(Counter(f"{PREFIX}{name}", text, TAGS), value) for name, text, value in COUNTERS]
        for metric in (self._step, *(gauge for gauge, _ in self._gauges), *(counter for counter, _ in self._counters)):
            metric.set_default_tags({"worker": worker, "pool": pool})
        self._last = WorkerStats()
        self._last_s = float("-inf")

    def update(self, stats: WorkerStats, now_s: float) -> None:
        """Export the current statistics, at most every `UPDATE_S`."""
        if now_s - self._last_s < UPDATE_S:
            return
        before, self._last, self._last_s = self._last, stats, now_s
        if stats.steps > before.steps:
            self._step.observe(stats.step_s)
        for gauge, value in self._gauges:
            gauge.set(value(stats))
        for counter, value in self._counters:
            if (more := value(stats) - value(before)) > 0:
                counter.inc(more)
