"""What a gateway has counted of its requests, as metrics."""

from collections.abc import Iterator

from prometheus_client.metrics_core import Metric

from cluster.observe.metrics.families import counter, gauge, histogram
from cluster.policy.slo_attainment import GatewayAttainment
from diptych.view import ClusterView


def request_families(standing: GatewayAttainment, gateway: str, view: ClusterView, active: int) -> Iterator[Metric]:
    told, plain, first = standing.tally, ("gateway",), (gateway,)
    if view.model is not None:
        names = [((gateway, view.name, view.model.name), 1)]
        yield gauge("diptych_info", "1: the cluster, and its model.", ("gateway", "cluster", "model"), names)
    yield gauge("diptych_active_requests", "Answers under way.", plain, [(first, active)])
    text = "Requests that wait in the gateway for their turn."
    yield gauge("diptych_queued_requests", text, plain, [(first, standing.queued)])
    for name, text, tokens in (
        ("diptych_prompt_tokens", "Prompt tokens of answers that are complete.", told.prompt_tokens),
        ("diptych_cached_prompt_tokens", "Prompt tokens that a cache had.", told.cached_tokens),
        ("diptych_generated_tokens", "Tokens sent.", told.generated_tokens),
    ):
        yield counter(name, text, plain, [(first, tokens)])
    finishes = (((gateway, reason), count) for reason, count in told.finishes)
    yield counter("diptych_finished", "Answers that are complete, by what ended them.", ("gateway", "reason"), finishes)
    each, moved = ("class",), ("transport",)
    for name, text, more, histograms in (
        ("diptych_time_to_first_token_seconds", "From arrival to the first token.", each, told.ttft),
        ("diptych_time_per_output_token_seconds", "Of each answer, behind its first token.", each, told.tpot),
        ("diptych_inter_token_seconds", "Between two tokens of an answer.", each, told.gaps),
        ("diptych_request_seconds", "From arrival to the end.", (*each, "outcome"), told.requests),
        ("diptych_request_prompt_tokens", "Prompt tokens of each complete answer.", each, told.prompts),
        ("diptych_request_generated_tokens", "Tokens of each complete answer.", each, told.answers),
        ("diptych_ledger_seconds", "Each part of the ledger that an answer had.", ("part",), told.parts),
        ("diptych_transfer_seconds", "A hand-off of KV, to its release.", moved, told.transfer_seconds),
        ("diptych_transfer_bytes", "Bytes of a hand-off.", moved, told.transfer_bytes),
        ("diptych_transfer_descriptors", "Ranges that a hand-off read.", moved, told.transfer_ranges),
    ):
        yield histogram(name, text, ("gateway", *more), first, histograms)
