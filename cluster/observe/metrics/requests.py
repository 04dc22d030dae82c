"""Metrics of a gateway's requests."""

from collections.abc import Iterator

from prometheus_client.metrics_core import Metric

from cluster.observe.metrics.families import counter, gauge, histogram
from cluster.policy.slo_attainment import GatewayAttainment
from diptych.view import ClusterView


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
