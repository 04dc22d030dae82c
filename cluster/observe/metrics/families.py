"""Our counts and histograms as `prometheus_client` metric families. Knows no metric's name."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import accumulate
from typing import TypeVar

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.utils import floatToGoString

from cluster.policy.estimate.histograms import Histograms

Counts = Iterable[tuple[str, str, int]]
Rows = Iterable[tuple[tuple[str, ...], float]]  # label values, and the value
T = TypeVar("T")
Family = tuple[Callable[[str, str, Sequence[str], Rows], Metric], str, str, Callable[[T], float]]
"""`counter` or `gauge`, the name, the text, and the value of an object."""


def counter(name: str, text: str, labels: Sequence[str], rows: Rows) -> Metric:
    """`name` without `_total`, which `prometheus_client` adds."""
    return _filled(CounterMetricFamily(name, text, labels=labels), rows)


def gauge(name: str, text: str, labels: Sequence[str], rows: Rows) -> Metric:
    return _filled(GaugeMetricFamily(name, text, labels=labels), rows)


def families(
    prefix: str, labels: Sequence[str], table: Iterable[Family[T]], objects: Sequence[tuple[tuple[str, ...], T]]
) -> Iterator[Metric]:
    """A row for each object, with its label values."""
    for make, name, text, value in table:
        yield make(f"{prefix}{name}", text, labels, [(values, value(each)) for values, each in objects])


def histogram(name: str, text: str, labels: Sequence[str], first: tuple[str, ...], histograms: Histograms) -> Metric:
    """`first`: the values of the labels that all rows share."""
    family = HistogramMetricFamily(name, text, labels=labels)
    bounds = [*map(floatToGoString, histograms.bounds), "+Inf"]
    for row in histograms.rows:
        buckets = list(zip(bounds, accumulate(row.counts), strict=True))
        family.add_metric((*first, *row.labels), buckets, sum_value=row.total)
    return family


def _filled(family: CounterMetricFamily | GaugeMetricFamily, rows: Rows) -> Metric:
    for values, value in rows:
        family.add_metric(values, value)
    return family
