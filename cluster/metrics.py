"""A gateway's standing as Prometheus metrics. Knows the names of metrics; counts nothing itself, serves no port."""

from collections.abc import Iterable, Iterator
from itertools import accumulate

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric

from cluster.policy.promises import ERROR_BOUNDS, Standing
from cluster.view import WorkerView

Counts = Iterable[tuple[str, str, int]]


def exposition(
    standing: Standing, gateway: str, workers: Iterable[WorkerView] = (), decisions: Counts | None = None
) -> str:
    """The text that Prometheus reads. Every metric has the label `gateway`.

    `decisions` of the elastic policy: kind, outcome, and how many; None: there is no policy, or it cannot be asked.
    """
    registry = CollectorRegistry()
    registry.register(_Families(standing, gateway, tuple(workers), decisions))
    return generate_latest(registry).decode()


class _Families:
    """A collector of the one standing."""

    def __init__(
        self, standing: Standing, gateway: str, workers: tuple[WorkerView, ...], decisions: Counts | None
    ) -> None:
        self._standing = standing
        self._gateway = gateway
        self._workers = workers
        self._decisions = decisions

    def collect(self) -> Iterator[Metric]:
        yield self._counts("diptych_requests", "Requests that have ended.", "outcome", self._standing.outcomes)
        yield self._counts("diptych_refused", "Requests turned away.", "reason", self._standing.refused)
        yield self._promises()
        yield self._errors()
        yield from self._calibration()
        yield from self._changes()

    def _changes(self) -> Iterator[Metric]:
        told, gateway = self._standing, self._gateway
        text = "Decodes moved, and prompts placed anew."
        yield self._pairs("diptych_moves", text, ("reason", "outcome"), told.moves)
        moved = CounterMetricFamily("diptych_moved_bytes", "KV fetched for moves of decodes.", labels=("gateway",))
        moved.add_metric((gateway,), told.moved_bytes)
        yield moved
        yield self._pairs("diptych_role_changes", "Workers with another role.", ("from", "to"), told.role_changes)
        roles = GaugeMetricFamily("diptych_worker_role", "1: the worker's role.", labels=("gateway", "worker", "role"))
        for worker in self._workers:
            roles.add_metric((gateway, worker.name, worker.role.value), 1)
        yield roles
        if self._decisions is not None:
            text = "Decisions of the elastic policy, of the whole cluster."
            yield self._pairs("diptych_elastic_decisions", text, ("kind", "outcome"), self._decisions)

    def _pairs(self, name: str, text: str, labels: tuple[str, str], counts: Counts) -> Metric:
        family = CounterMetricFamily(name, text, labels=("gateway", *labels))
        for one, other, count in counts:
            family.add_metric((self._gateway, one, other), count)
        return family

    def _counts(self, name: str, text: str, label: str, counts: tuple[tuple[str, int], ...]) -> Metric:
        family = CounterMetricFamily(name, text, labels=("gateway", label))
        for value, count in counts:
            family.add_metric((self._gateway, value), count)
        return family

    def _promises(self) -> Metric:
        labels = ("gateway", "class", "kind", "kept")
        family = CounterMetricFamily("diptych_promises", "Promises that are settled.", labels=labels)
        for each in self._standing.classes:
            for kind, told in (("ttft", each.ttft), ("tpot", each.tpot), ("both", each.both)):
                family.add_metric((self._gateway, each.name, kind, "yes"), told.kept)
                family.add_metric((self._gateway, each.name, kind, "no"), told.settled - told.kept)
        return family

    def _errors(self) -> Metric:
        text = "Seen over predicted, of predictions that clients were told: 1 is right, above it took longer."
        family = HistogramMetricFamily("diptych_prediction_error_ratio", text, labels=("gateway", "kind"))
        bounds = [*(f"{1.0 + bound:g}" for bound in ERROR_BOUNDS), "+Inf"]  # below 0 a histogram has no sum
        for each in self._standing.errors:
            buckets = list(zip(bounds, accumulate(each.counts), strict=True))
            family.add_metric((self._gateway, each.kind), buckets, sum_value=sum(each.counts) + each.total)
        return family

    def _calibration(self) -> Iterator[Metric]:
        told = self._standing.calibration
        shares = GaugeMetricFamily(
            "diptych_length_within_ratio", "Answers within what was predicted.", labels=("gateway", "prediction")
        )
        for name, share in (("p50", told.within_p50), ("p90", told.within_p90), ("bucket", told.bucket_share)):
            shares.add_metric((self._gateway, name), share)
        yield shares
        errors = GaugeMetricFamily(
            "diptych_length_error_tokens", "Mean absolute error of predicted lengths.", labels=("gateway", "by")
        )
        errors.add_metric((self._gateway, "learned"), told.error_tokens)
        errors.add_metric((self._gateway, "asked"), told.asked_error_tokens)
        yield errors
