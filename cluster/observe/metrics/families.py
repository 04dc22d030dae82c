"""Counts and histograms of ours as families of `prometheus_client`. Knows no metric of either."""

from collections.abc import Iterable, Sequence
from itertools import accumulate

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.utils import floatToGoString

from cluster.policy.estimate.histograms import Histograms

Counts = Iterable[tuple[str, str, int]]
Rows = Iterable[tuple[tuple[str, ...], float]]  # the values of the labels, and what they have


def counter(name: str, text: str, labels: Sequence[str], rows: Rows) -> Metric:
    """`name` without `_total`, which is added."""
    return _filled(CounterMetricFamily(name, text, labels=labels), rows)


def gauge(name: str, text: str, labels: Sequence[str], rows: Rows) -> Metric:
    return _filled(GaugeMetricFamily(name, text, labels=labels), rows)


def histogram(name: str, text: str, labels: Sequence[str], first: tuple[str, ...], told: Histograms) -> Metric:
    """`first` are the values of the labels that all rows have."""
    family = HistogramMetricFamily(name, text, labels=labels)
    bounds = [*map(floatToGoString, told.bounds), "+Inf"]
    for row in told.rows:
        buckets = list(zip(bounds, accumulate(row.counts), strict=True))
        family.add_metric((*first, *row.labels), buckets, sum_value=row.total)
    return family


def _filled(family: CounterMetricFamily | GaugeMetricFamily, rows: Rows) -> Metric:
    for values, value in rows:
        family.add_metric(values, value)
    return family
