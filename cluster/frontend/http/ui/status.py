"""The data of the web page, from the same view as `diptych status`. Truncates long lists. Pure."""

from typing import Any

from cluster.frontend.served_models import ServedModels
from diptych.history import RequestTrace
from diptych.slo import ClassScore
from diptych.view import ClusterView, WorkerState, WorkerView

MAX_WORKERS, MAX_STREAMS, MAX_EVENTS, MAX_CLASSES = 256, 64, 16, 16


def status(models: ServedModels, now_ns: int) -> dict[str, Any]:
    """Times are in seconds; `used_blocks` of `total_blocks` hold KV. Counters count since the gateway started."""
    queries = models.context.queries
    view, attainment, recent = queries.view, queries.slo_attainment(), queries.recent()
    served = [each.model for each in models.context.models]
    return {
        "name": view.name,
        "models": [{"name": each.name, "context_length": each.context_length} for each in served],
        "revision": view.revision,
        "gateway": {
            "name": models.context.name,
            "active": models.active,
            "queued": attainment.queued,
            "max_requests": models.max_requests,
            "uptime_s": recent.uptime_s,
            "output_tokens": sum(traffic.output_tokens for _, traffic in recent.traffic),
        },
        "pools": [_pool(name, view) for name in dict.fromkeys([*(pool.name for pool in view.pools), *_pools(view)])],
        "workers": [_worker(each) for each in view.workers[:MAX_WORKERS]],
        "num_workers": len(view.workers),
        "streams": [_stream(each, now_ns) for each in queries.oldest_requests(MAX_STREAMS)],
        "classes": [_class(each) for each in attainment.classes[:MAX_CLASSES]],
        "events": [
            {"age_s": age_s, "kind": each.kind, "worker": each.worker, "text": each.text}
            for age_s, each in reversed(recent.events[-MAX_EVENTS:])
        ],
    }


def _pools(view: ClusterView) -> list[str]:
    return [worker.pool for worker in view.workers]


def _pool(name: str, view: ClusterView) -> dict[str, Any]:
    """Sums over the pool's workers."""
    workers = [worker for worker in view.workers if worker.pool == name]
    pool = next((pool for pool in view.pools if pool.name == name), None)
    return {
        "name": name,
        "model": "" if pool is None else pool.model,
        "role": "" if pool is None else pool.role.value,
        "wanted": len(workers) if pool is None else pool.wanted,
        "ready": sum(worker.state is WorkerState.READY for worker in workers),
        "running": sum(worker.stats.running for worker in workers),
        "waiting": sum(worker.stats.waiting for worker in workers),
        "used_blocks": sum(worker.stats.used_blocks for worker in workers),
        "total_blocks": sum(worker.stats.total_blocks for worker in workers),
    }


def _worker(worker: WorkerView) -> dict[str, Any]:
    return {
        "name": worker.name,
        "pool": worker.pool,
        "role": worker.role.value,
        "state": worker.state.value,
        "running": worker.stats.running,
        "waiting": worker.stats.waiting,
        "used_blocks": worker.stats.used_blocks,
        "total_blocks": worker.stats.total_blocks,
        "restarts": worker.restarts,
        "trouble": worker.trouble,
    }


def _stream(trace: RequestTrace, now_ns: int) -> dict[str, Any]:
    return {
        "id": trace.request_id,
        "class": trace.class_name,
        "phase": trace.phase,
        "age_s": max(0, now_ns - trace.arrived_ns) / 1e9,
        "prompt_tokens": trace.prompt_tokens,
        "output_tokens": trace.output_tokens,
        "prefill_worker": trace.prefill_worker,
        "decode_worker": trace.moves[-1][1] if trace.moves else trace.decode_worker,
    }


def _class(score: ClassScore) -> dict[str, Any]:
    """Attainment shares; null until a request of the class with such an SLO has ended."""
    shares = {"ttft": score.ttft.share, "tpot": score.tpot.share, "both": score.both.share}
    return {"name": score.name, "model": score.model, "requests": score.requests} | shares
