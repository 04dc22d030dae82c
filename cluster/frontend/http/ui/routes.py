"""The routes of the web page. Its files have no data and need no key; `/ui/status` needs one if keys are configured."""

import asyncio
import json
from collections.abc import Callable, Coroutine, Iterable
from functools import partial
from importlib.resources import files
from typing import Any

from fastapi import FastAPI
from starlette.responses import Response

from cluster.frontend.http.failures import JSON
from cluster.frontend.http.openapi import route_options
from cluster.frontend.served_models import ServedModels
from cluster.observe.ledger import now_ns
from diptych.history import RequestTrace
from diptych.slo import ClassScore
from diptych.view import ClusterView, WorkerState, WorkerView

STATUS = "/ui/status"
FILES = {
    "/ui": ("page.html", "text/html; charset=utf-8"),
    "/ui/page.js": ("page.js", "text/javascript; charset=utf-8"),
    "/ui/page.css": ("page.css", "text/css; charset=utf-8"),
}
# Only the page's own files, nothing inline, no framing. `data:` is the empty icon.
POLICY = "default-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
HEADERS = {
    "content-security-policy": POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",
}
FRESH_S = 0.5  # shortest time between two builds of the status, however many pages poll
LOAD = ("running", "waiting", "used_blocks", "total_blocks")  # of `WorkerStats`
MAX_WORKERS, MAX_STREAMS, MAX_EVENTS, MAX_CLASSES = 256, 64, 16, 16


def add_ui(app: FastAPI, models: ServedModels) -> None:
    for path, (name, kind) in FILES.items():
        content = files(__package__).joinpath(name).read_bytes()
        app.add_api_route(path, _sender(content, kind), include_in_schema=False)
    app.add_api_route(STATUS, Snapshots(partial(status, models)).answer, **route_options(STATUS, "GET"))


def _sender(content: bytes, kind: str) -> Callable[[], Coroutine[Any, Any, Response]]:
    async def send() -> Response:
        return Response(content, media_type=kind, headers=HEADERS)

    return send


class Snapshots:
    """The latest status, rebuilt on request if it is older than `FRESH_S`."""

    def __init__(self, build: Callable[[int], dict[str, Any]]) -> None:
        self._build = build
        self._content = b""
        self._until_s = 0.0

    async def answer(self) -> Response:
        now_s = asyncio.get_running_loop().time()
        if now_s >= self._until_s:
            self._content = json.dumps(self._build(now_ns()), ensure_ascii=False).encode()
            self._until_s = now_s + FRESH_S
        return Response(self._content, media_type=JSON, headers={"cache-control": "no-store"})


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
        "pools": [_pool(name, view) for name in _pool_names(view)],
        "workers": [_worker(each) for each in view.workers[:MAX_WORKERS]],
        "num_workers": len(view.workers),
        "streams": [_stream(each, now_ns) for each in queries.oldest_requests(MAX_STREAMS)],
        "classes": [_class(each) for each in attainment.classes[:MAX_CLASSES]],
        "events": [
            {"age_s": age_s, "kind": each.kind, "worker": each.worker, "text": each.text}
            for age_s, each in reversed(recent.events[-MAX_EVENTS:])
        ],
    }


def _pool_names(view: ClusterView) -> Iterable[str]:
    return dict.fromkeys([*(pool.name for pool in view.pools), *(worker.pool for worker in view.workers)])


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
        **{name: sum(getattr(worker.stats, name) for worker in workers) for name in LOAD},
    }


def _worker(worker: WorkerView) -> dict[str, Any]:
    return {
        "name": worker.name,
        "pool": worker.pool,
        "role": worker.role.value,
        "state": worker.state.value,
        **{name: getattr(worker.stats, name) for name in LOAD},
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
