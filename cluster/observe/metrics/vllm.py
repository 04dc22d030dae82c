"""vLLM's metrics that public dashboards use, with vLLM's names and labels.

The label `engine` is the gateway for metrics of requests, and the worker for metrics of workers. Of several gateways
only the first in the view exports workers, so that sums over engines count each once.
"""

from collections.abc import Iterator

from prometheus_client.metrics_core import Metric

from cluster.observe.metrics.families import Family, counter, families, gauge, histogram
from cluster.observe.metrics.workers import live_workers
from cluster.policy.slo_attainment import GatewayAttainment
from diptych.view import ClusterView, WorkerView
from workers.request import FinishReason

LABELS = ("model_name", "engine")
REASONS = {FinishReason.EOS.value: "stop", FinishReason.STOP.value: "stop", FinishReason.LENGTH.value: "length"}

WAITING = "Waiting requests: in the gateway's queue, or at a worker for blocks or a slot."
WORKERS: tuple[Family[WorkerView], ...] = (
    (gauge, "num_requests_running", "Running sequences.", lambda each: each.stats.running),
    (
        gauge,
        "kv_cache_usage_perc",
        "Share of the KV blocks in use: 1 is all.",
        lambda each: 1.0 - each.stats.free_blocks / max(1, each.stats.total_blocks),
    ),
    (counter, "prefix_cache_queries", "Tokens looked up in the prefix cache.", lambda each: each.stats.sought_tokens),
    (counter, "prefix_cache_hits", "Tokens found in the prefix cache.", lambda each: each.stats.found_tokens),
    (counter, "num_preemptions", "Preempted sequences.", lambda each: each.stats.preemptions),
    (counter, "nixl_num_failed_transfers", "Fetches of KV that failed.", lambda each: each.stats.pulls.failed),
    (counter, "nixl_num_kv_expired_reqs", "Leases that expired.", lambda each: each.stats.expired_leases),
)


def vllm_families(attainment: GatewayAttainment, gateway: str, view: ClusterView) -> Iterator[Metric]:
    totals, model = attainment.totals, "" if view.model is None else view.model.name
    own = (model, gateway)
    for name, text, tokens in (
        ("prompt_tokens", "Prompt tokens.", totals.prompt_tokens),
        ("generation_tokens", "Tokens sent.", totals.generated_tokens),
    ):
        yield counter(f"vllm:{name}", text, LABELS, [(own, tokens)])
    finishes = dict.fromkeys(REASONS.values(), 0)
    for reason, count in totals.finishes:
        finishes[REASONS[reason]] += count
    ended = (((*own, reason), count) for reason, count in finishes.items())
    yield counter("vllm:request_success", "Complete answers.", (*LABELS, "finished_reason"), ended)
    for name, text, histograms in (
        ("time_to_first_token_seconds", "From arrival to the first token.", totals.ttft),
        ("inter_token_latency_seconds", "Between two tokens.", totals.gaps),
        ("time_per_output_token_seconds", "The older name of inter_token_latency_seconds.", totals.gaps),
        (
            "e2e_request_latency_seconds",
            "From arrival to the end of complete answers.",
            totals.requests.ending("completed"),
        ),
        ("request_queue_time_seconds", "From arrival to the first step of the prompt.", totals.stages.summed("queue")),
        (
            "request_prefill_time_seconds",
            "From the first step of the prompt to the first token.",
            totals.stages.summed("prefill"),
        ),
        ("request_decode_time_seconds", "From the first token to the last.", totals.stages.summed("decode")),
        (
            "request_inference_time_seconds",
            "From the first step of the prompt to the last token.",
            totals.stages.summed("inference"),
        ),
        ("request_prompt_tokens", "Prompt tokens of an answer.", totals.prompts),
        ("request_generation_tokens", "Tokens of an answer.", totals.answers),
        ("request_max_num_generation_tokens", "Tokens of an answer.", totals.answers),
        ("nixl_xfer_time_seconds", "A KV handoff.", totals.transfer_seconds),
        ("nixl_bytes_transferred", "Bytes of a KV handoff.", totals.transfer_bytes),
        ("nixl_num_descriptors", "Ranges of a KV handoff.", totals.transfer_ranges),
    ):
        yield histogram(f"vllm:{name}", text, LABELS, own, histograms.summed())
    workers = live_workers(view) if view.gateways[:1] in ((), (gateway,)) else ()
    live = [((model, worker.name), worker) for worker in workers]
    waiting = [(own, attainment.queued), *((values, worker.stats.waiting) for values, worker in live)]
    yield gauge("vllm:num_requests_waiting", WAITING, LABELS, waiting)
    yield from families("vllm:", LABELS, WORKERS, live)
