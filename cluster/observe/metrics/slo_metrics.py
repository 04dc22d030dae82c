"""Metrics of a gateway's SLO attainment, and of the migrations and role changes that serve it."""

from collections.abc import Iterator
from itertools import accumulate, permutations, product

from prometheus_client.core import HistogramMetricFamily
from prometheus_client.metrics_core import Metric

from cluster.observe.metrics.families import Counts, Rows, counter, gauge
from cluster.policy.slo_attainment import ERROR_BOUNDS, ClassScore, GatewayAttainment, SLOCount
from cluster.spec import Role

Pairs = tuple[tuple[str, str], ...]
# Exported from the start: Prometheus would not see the first increase of a series that starts with it.
MOVES: Pairs = tuple(product(("drain", "role", "requeue"), ("moved", "stayed")))
CHANGES: Pairs = tuple(permutations((role.value for role in Role), 2))
DECISIONS: Pairs = tuple(product(("flip", "grow", "shrink"), ("done", "failed", "advised")))


def decision_families(gateway: str, decisions: Counts | None) -> Iterator[Metric]:
    if decisions is not None:
        text = "Decisions of the elastic policy, of the whole cluster."
        rows = _pairs(gateway, DECISIONS, decisions)
        yield counter("diptych_elastic_decisions", text, ("gateway", "kind", "outcome"), rows)


def slo_families(attainment: GatewayAttainment, gateway: str) -> Iterator[Metric]:
    def rows(counts: tuple[tuple[str, int], ...]) -> Rows:
        return (((gateway, value), count) for value, count in counts)

    outcomes, refused = rows(attainment.outcomes), rows(attainment.refused)
    yield counter("diptych_requests", "Requests that have ended.", ("gateway", "outcome"), outcomes)
    yield counter("diptych_refused", "Requests refused.", ("gateway", "reason"), refused)
    text = "SLOs of requests that have ended, by whether they were met."
    kinds = ("gateway", "class", "kind", "attained")
    yield counter("diptych_slo_requests", text, kinds, _slos(attainment, gateway))
    yield _errors(attainment, gateway)
    yield from _calibration(attainment, gateway)
    text = "Decodes migrated, and waiting prompts placed on other workers."
    labels = ("gateway", "reason", "outcome")
    yield counter("diptych_migrations", text, labels, _pairs(gateway, MOVES, attainment.moves))
    text = "Requests served by workers of another role, since none of this role was ready."
    yield counter("diptych_fallback_requests", text, ("gateway", "role"), rows(attainment.fallbacks))
    text = "Cached prefixes for which this gateway's prefix index had no room."
    yield counter("diptych_prefix_index_dropped", text, ("gateway", "tier"), rows(attainment.dropped_hashes))
    moved = [((gateway,), attainment.moved_bytes)]
    yield counter("diptych_migrated_bytes", "KV fetched for migrations of decodes.", ("gateway",), moved)
    labels = ("gateway", "from", "to")
    changes = _pairs(gateway, CHANGES, attainment.role_changes)
    yield counter("diptych_role_changes", "Role changes of workers.", labels, changes)


def _pairs(gateway: str, known: Pairs, counts: Counts) -> Rows:
    found = dict.fromkeys(known, 0) | {(one, other): count for one, other, count in counts}
    return (((gateway, *pair), count) for pair, count in found.items())


def _slos(attainment: GatewayAttainment, gateway: str) -> Rows:
    scored = {each.name for each in attainment.classes}
    known = (row.labels[0] for row in attainment.totals.ttft.rows)
    idle = (ClassScore(name, 0, SLOCount(), SLOCount(), SLOCount()) for name in known if name not in scored)
    for each in (*attainment.classes, *idle):
        for kind, score in (("ttft", each.ttft), ("tpot", each.tpot), ("both", each.both)):
            yield (gateway, each.name, kind, "yes"), score.kept
            yield (gateway, each.name, kind, "no"), score.settled - score.kept


def _errors(attainment: GatewayAttainment, gateway: str) -> Metric:
    text = "Measured over predicted latency, of predictions sent to clients; above 1 it took longer."
    family = HistogramMetricFamily("diptych_prediction_error_ratio", text, labels=("gateway", "kind"))
    bounds = [*(f"{1.0 + bound:g}" for bound in ERROR_BOUNDS), "+Inf"]  # histograms with negative values have no sum
    for each in attainment.errors:
        buckets = list(zip(bounds, accumulate(each.counts), strict=True))
        family.add_metric((gateway, each.kind), buckets, sum_value=sum(each.counts) + each.total)
    return family


def _calibration(attainment: GatewayAttainment, gateway: str) -> Iterator[Metric]:
    lengths = attainment.calibration
    shares = ("p50", lengths.within_p50), ("p90", lengths.within_p90)
    errors = ("learned", lengths.error_tokens), ("asked", lengths.asked_error_tokens)
    for name, text, label, values in (
        ("diptych_length_within_ratio", "Answers within their predicted length.", "prediction", shares),
        ("diptych_length_error_tokens", "Mean absolute error of predicted lengths.", "by", errors),
    ):
        yield gauge(name, text, ("gateway", label), (((gateway, value), number) for value, number in values))
