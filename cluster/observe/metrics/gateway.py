"""Metrics of a gateway: its requests, their SLOs, the responses of its servers, and the processes beside it."""

from collections import Counter
from collections.abc import Iterator
from itertools import accumulate, permutations, product

from prometheus_client.core import HistogramMetricFamily
from prometheus_client.metrics_core import Metric

from cluster.observe.metrics.families import Counts, Rows, counter, gauge, histogram
from cluster.policy.slo_attainment import ERROR_BOUNDS, ClassScore, GatewayAttainment, SLOCount
from cluster.spec import Role
from diptych.view import ClusterView, GatewayState

# Exported from the start: Prometheus would not see the first increase of a series that starts with it.
Pairs = tuple[tuple[str, str], ...]
MOVES: Pairs = tuple(product(("drain", "role", "requeue"), ("moved", "stayed")))
CHANGES: Pairs = tuple(permutations((role.value for role in Role), 2))
DECISIONS: Pairs = tuple(product(("flip", "grow", "shrink"), ("done", "failed", "advised")))
PROCESSES = ("server", "controller", "gateway")
HTTP_CODES = (200, 400, 401, 403, 404, 408, 413, 429, 499, 500, 503, 504)
HTTP_METHODS = ("completions", "chat", "responses", "messages")
GRPC_CODES = (
    *("OK", "CANCELLED", "INVALID_ARGUMENT", "DEADLINE_EXCEEDED", "NOT_FOUND", "ALREADY_EXISTS", "PERMISSION_DENIED"),
    *("RESOURCE_EXHAUSTED", "INTERNAL", "UNAVAILABLE", "UNAUTHENTICATED"),
)
KNOWN = (
    *(("http", method, str(code)) for method in HTTP_METHODS for code in HTTP_CODES),
    *(("grpc", "Generate", code) for code in GRPC_CODES),
)


def request_families(attainment: GatewayAttainment, gateway: str, view: ClusterView, active: int) -> Iterator[Metric]:
    totals, plain, first = attainment.totals, ("gateway",), (gateway,)
    if view.model is not None:
        names = [((gateway, view.name, view.model.name), 1)]
        yield gauge("diptych_info", "1: the cluster, and its model.", ("gateway", "cluster", "model"), names)
    yield gauge("diptych_active_requests", "Running answers.", plain, [(first, active)])
    text = "Requests in the gateway's admission queue."
    yield gauge("diptych_queued_requests", text, plain, [(first, attainment.queued)])
    for name, text, tokens in (
        ("diptych_prompt_tokens", "Prompt tokens of complete answers.", totals.prompt_tokens),
        ("diptych_cached_prompt_tokens", "Prompt tokens found in a cache.", totals.cached_tokens),
        ("diptych_generated_tokens", "Tokens sent.", totals.generated_tokens),
    ):
        yield counter(name, text, plain, [(first, tokens)])
    finishes = (((gateway, reason), count) for reason, count in totals.finishes)
    yield counter("diptych_finished", "Complete answers, by finish reason.", ("gateway", "reason"), finishes)
    each, moved = ("class",), ("transport",)
    for name, text, more, histograms in (
        ("diptych_time_to_first_token_seconds", "From arrival to the first token.", each, totals.ttft),
        ("diptych_time_per_output_token_seconds", "Of each answer, after its first token.", each, totals.tpot),
        ("diptych_inter_token_seconds", "Between two tokens of an answer.", each, totals.gaps),
        ("diptych_request_seconds", "From arrival to the end.", (*each, "outcome"), totals.requests),
        ("diptych_request_prompt_tokens", "Prompt tokens of each complete answer.", each, totals.prompts),
        ("diptych_request_generated_tokens", "Tokens of each complete answer.", each, totals.answers),
        ("diptych_ledger_seconds", "Each part of the ledger that an answer had.", ("part",), totals.parts),
        ("diptych_transfer_seconds", "A KV handoff, up to its release.", moved, totals.transfer_seconds),
        ("diptych_transfer_bytes", "Bytes of a KV handoff.", moved, totals.transfer_bytes),
        ("diptych_transfer_descriptors", "Ranges read by a KV handoff.", moved, totals.transfer_ranges),
    ):
        yield histogram(name, text, ("gateway", *more), first, histograms)


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


def supervision_families(gateway: str, view: ClusterView) -> Iterator[Metric]:
    first, served = (gateway,), view.served_gateways
    states = Counter(each.state for each in served)
    by_state = (((gateway, state.value), states[state]) for state in GatewayState)
    yield gauge("diptych_gateways", "Gateways that the server started, by state.", ("gateway", "state"), by_state)
    for name, text, count in (
        ("restarts", "How often gateways died or were replaced.", sum(each.restarts for each in served)),
        ("unresponsive", "How often gateways did not answer in time.", sum(each.silences for each in served)),
    ):
        yield counter(f"diptych_gateway_{name}", text, ("gateway",), [(first, count)])
    failed = Counter[str]()
    for each in view.failures:
        failed["gateway" if each.process == gateway else each.process] += each.count
    text = "Exceptions in background tasks; the tasks continue."
    failures = (((gateway, process), failed[process]) for process in PROCESSES)
    yield counter("diptych_background_failures", text, ("gateway", "process"), failures)


class Responses:
    """Counts responses. Owned by a gateway."""

    def __init__(self) -> None:
        self._counts = Counter(dict.fromkeys(KNOWN, 0))

    def count(self, server: str, method: str, code: str) -> None:
        """`method` and `code` must come from a bounded set, whatever clients send."""
        self._counts[server, method, code] += 1

    def rows(self) -> tuple[tuple[tuple[str, str, str], int], ...]:
        """(server, method, code), and the count."""
        return tuple(self._counts.items())


def response_families(gateway: str, responses: Rows) -> Iterator[Metric]:
    labels = ("gateway", "api", "method", "code")
    rows = (((gateway, *values), count) for values, count in responses)
    yield counter("diptych_responses", "Calls that the servers have answered, refusals too.", labels, rows)
