"""How a gateway kept its promises, and what it changed to keep them, as metrics."""

from collections.abc import Iterator
from itertools import accumulate, permutations, product

from prometheus_client.core import HistogramMetricFamily
from prometheus_client.metrics_core import Metric

from cluster.observe.metrics.families import Counts, Rows, counter, gauge
from cluster.policy.slo_attainment import ERROR_BOUNDS, ClassScore, GatewayAttainment, Kept
from cluster.spec import Role

Pairs = tuple[tuple[str, str], ...]
# Told from the start: of a series that begins with its first event, Prometheus sees no increase.
MOVES: Pairs = tuple(product(("drain", "role", "relief", "anew"), ("moved", "stayed")))
CHANGES: Pairs = tuple(permutations((role.value for role in Role), 2))
DECISIONS: Pairs = tuple(product(("flip", "grow", "shrink"), ("done", "failed", "advised")))


def standing_families(standing: GatewayAttainment, gateway: str, decisions: Counts | None) -> Iterator[Metric]:
    def each(counts: tuple[tuple[str, int], ...]) -> Rows:
        return (((gateway, value), count) for value, count in counts)

    def pairs(known: Pairs, counts: Counts) -> Rows:
        found = dict.fromkeys(known, 0) | {(one, other): count for one, other, count in counts}
        return (((gateway, *pair), count) for pair, count in found.items())

    ended, away = each(standing.outcomes), each(standing.refused)
    yield counter("diptych_requests", "Requests that have ended.", ("gateway", "outcome"), ended)
    yield counter("diptych_refused", "Requests turned away.", ("gateway", "reason"), away)
    kinds = ("gateway", "class", "kind", "kept")
    yield counter("diptych_promises", "Promises that are settled.", kinds, _promises(standing, gateway))
    yield _errors(standing, gateway)
    yield from _calibration(standing, gateway)
    labels = ("gateway", "reason", "outcome")
    yield counter("diptych_moves", "Decodes moved, and prompts placed anew.", labels, pairs(MOVES, standing.moves))
    text = "Requests that others served, since no worker of this role was ready."
    yield counter("diptych_uncovered_requests", text, ("gateway", "role"), each(standing.uncovered))
    moved = [((gateway,), standing.moved_bytes)]
    yield counter("diptych_moved_bytes", "KV fetched for moves of decodes.", ("gateway",), moved)
    labels = ("gateway", "from", "to")
    yield counter("diptych_role_changes", "Workers with another role.", labels, pairs(CHANGES, standing.role_changes))
    if decisions is not None:
        text = "Decisions of the elastic policy, of the whole cluster."
        yield counter("diptych_elastic_decisions", text, ("gateway", "kind", "outcome"), pairs(DECISIONS, decisions))


def _promises(standing: GatewayAttainment, gateway: str) -> Rows:
    asked = {each.name for each in standing.classes}
    known = (row.labels[0] for row in standing.tally.ttft.rows)
    idle = (ClassScore(name, 0, Kept(), Kept(), Kept()) for name in known if name not in asked)
    for each in (*standing.classes, *idle):
        for kind, told in (("ttft", each.ttft), ("tpot", each.tpot), ("both", each.both)):
            yield (gateway, each.name, kind, "yes"), told.kept
            yield (gateway, each.name, kind, "no"), told.settled - told.kept


def _errors(standing: GatewayAttainment, gateway: str) -> Metric:
    text = "Seen over predicted, of predictions that clients were told: 1 is right, above it took longer."
    family = HistogramMetricFamily("diptych_prediction_error_ratio", text, labels=("gateway", "kind"))
    bounds = [*(f"{1.0 + bound:g}" for bound in ERROR_BOUNDS), "+Inf"]  # below 0 a histogram has no sum
    for each in standing.errors:
        buckets = list(zip(bounds, accumulate(each.counts), strict=True))
        family.add_metric((gateway, each.kind), buckets, sum_value=sum(each.counts) + each.total)
    return family


def _calibration(standing: GatewayAttainment, gateway: str) -> Iterator[Metric]:
    told = standing.calibration
    shares = ("p50", told.within_p50), ("p90", told.within_p90)
    errors = ("learned", told.error_tokens), ("asked", told.asked_error_tokens)
    for name, text, label, values in (
        ("diptych_length_within_ratio", "Answers within what was predicted.", "prediction", shares),
        ("diptych_length_error_tokens", "Mean absolute error of predicted lengths.", "by", errors),
    ):
        yield gauge(name, text, ("gateway", label), (((gateway, value), number) for value, number in values))
