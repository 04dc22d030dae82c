"""OpenTelemetry spans: one per request, with a child for each part of its ledger.

They are made when the request has ended, and sent by the library's thread through a bounded queue. If the collector is
slow or away, spans are dropped, and no request waits.
"""

import asyncio
import logging
import os
import time
from urllib.parse import urlsplit, urlunsplit

from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter
from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased
from opentelemetry.trace import Span, SpanKind, Status, StatusCode, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from opentelemetry.util.types import AttributeValue

from cluster.observe.ledger import is_visible, located_parts, now_ns, transfer_span
from cluster.observe.request_metrics import stages
from cluster.observe.request_observer import RequestEnd, RequestObserver
from cluster.observe.trace_context import trace_headers
from cluster.spec import ClusterSpec, TracingSpec
from diptych.history import RequestTrace
from workers.log_fields import log_fields
from workers.request import FinishReason, Request

logger = logging.getLogger(__name__)

EXPORT_S = 5.0  # for one batch, with retries
FLUSH_S = 2.0  # for all remaining spans, on close
REQUEST = "llm_request"
NO_ERRORS = ("completed", "cancelled")  # outcomes


class Spans(RequestObserver):
    """Owned by a gateway."""

    def __init__(self, spec: ClusterSpec, gateway: str) -> None:
        resource = {
            "service.name": os.environ.get("OTEL_SERVICE_NAME", "diptych"),
            "service.instance.id": gateway,
            "diptych.cluster": spec.name,
        }
        self._gateway = gateway
        self._model = spec.model
        self._exporter = exporter(spec.tracing)
        self._provider = TracerProvider(
            sampler=ParentBased(TraceIdRatioBased(spec.tracing.sample_ratio)),
            resource=Resource.create(resource),
            shutdown_on_exit=False,
        )
        self._provider.add_span_processor(BatchSpanProcessor(self._exporter))
        self._tracer = self._provider.get_tracer("diptych")

    def on_end(self, end: RequestEnd) -> None:
        self.send(end.trace(), end.request, end.completed.finish if end.completed else None)

    def send(self, trace: RequestTrace, request: Request, finish: FinishReason | None) -> None:
        """Send the spans of the current task's request. Never raises, because the request must still end."""
        try:
            self._write(trace, request, finish)
        except Exception:
            logger.exception("could not send spans of this request", extra=log_fields(self._gateway, trace.request_id))

    def _write(self, trace: RequestTrace, request: Request, finish: FinishReason | None) -> None:
        offset_ns = time.time_ns() - now_ns()
        span = self._tracer.start_span(
            REQUEST,
            context=TraceContextTextMapPropagator().extract(trace_headers()),
            kind=SpanKind.SERVER,
            start_time=trace.arrived_ns + offset_ns,
        )
        if not span.is_recording():
            return
        span.set_attributes(_attributes(trace, request, self._model, finish))
        for at_ns, worker in trace.moves:
            span.add_event("move", {"diptych.worker": worker}, at_ns + offset_ns)
        if trace.outcome not in NO_ERRORS:
            span.set_status(Status(StatusCode.ERROR, trace.detail))
            span.set_attribute("error.type", trace.outcome)
        self._parts(span, trace, offset_ns)
        span.end(trace.end_ns + offset_ns)

    def _parts(self, parent: Span, trace: RequestTrace, offset_ns: int) -> None:
        transfer = None if trace.moves else transfer_span(trace.ledger, trace.arrived_ns, trace.transfer_ns)
        spans = [*located_parts(trace, self._gateway), *([(trace.decode_worker, transfer)] if transfer else [])]
        within = set_span_in_context(parent)
        for place, each in spans:
            if is_visible(each):
                attributes = {"diptych.worker": place} if place != self._gateway else None
                begin_ns, end_ns = each.begin_ns + offset_ns, each.end_ns + offset_ns
                self._tracer.start_span(each.name, within, attributes=attributes, start_time=begin_ns).end(end_ns)

    async def close(self) -> None:
        """Send the remaining spans, for at most `FLUSH_S`."""
        flushing = asyncio.ensure_future(asyncio.to_thread(self._provider.force_flush))
        await asyncio.wait([flushing], timeout=FLUSH_S)
        if not flushing.done():
            self._exporter.shutdown()  # stop its retries
        await asyncio.to_thread(self._provider.shutdown)


def exporter(spec: TracingSpec) -> SpanExporter:
    """The exporter. Headers, certificates and compression come from OpenTelemetry's environment variables."""
    assert spec.otlp_endpoint is not None, "spans need a collector"
    if spec.otlp_protocol == "grpc":
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter as OverGrpc

        plain = spec.otlp_endpoint.startswith("http://")
        return OverGrpc(endpoint=spec.otlp_endpoint, insecure=plain, timeout=EXPORT_S)
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter as OverHttp

    url = urlsplit(spec.otlp_endpoint)
    path = url.path if url.path.strip("/") else "/v1/traces"
    return OverHttp(endpoint=urlunsplit(url._replace(path=path)), timeout=EXPORT_S)


def _attributes(
    trace: RequestTrace, request: Request, model: str, finish: FinishReason | None
) -> dict[str, AttributeValue]:
    """Attributes with the names of OpenTelemetry's conventions for generative AI, else of vLLM, else our own."""
    sampling, ledger = request.sampling, trace.ledger
    attributes: dict[str, AttributeValue] = {
        "gen_ai.request.id": trace.request_id,
        "gen_ai.request.model": model,
        "gen_ai.response.model": model,
        "gen_ai.request.temperature": sampling.temperature,
        "gen_ai.request.top_p": sampling.top_p,
        "gen_ai.usage.prompt_tokens": trace.prompt_tokens,
        "gen_ai.usage.completion_tokens": trace.output_tokens,
        "gen_ai.usage.input_tokens": trace.prompt_tokens,
        "gen_ai.usage.output_tokens": trace.output_tokens,
        "gen_ai.latency.e2e": (trace.end_ns - trace.arrived_ns) / 1e9,
        "diptych.outcome": trace.outcome,
        "diptych.slo_class": trace.class_name,
        "diptych.cached_tokens": trace.cached_tokens,
        **{f"diptych.cached_{source}_tokens": count for source, count in trace.cached_from},
        "diptych.attempts": trace.attempts,
        "diptych.prefill_worker": trace.prefill_worker,
        "diptych.decode_worker": trace.decode_worker,
        "diptych.transfer_bytes": trace.transfer_bytes,
    }
    if sampling.max_tokens is not None:
        attributes["gen_ai.request.max_tokens"] = sampling.max_tokens
    if finish is not None:
        attributes["gen_ai.response.finish_reasons"] = [finish.value]
    if trace.output_tokens:
        attributes["gen_ai.latency.time_to_first_token"] = ledger.ttft_ns / 1e9
    if trace.outcome == "completed":
        spent = stages(ledger)
        attributes["gen_ai.latency.time_in_queue"] = spent["queue"]
        for stage in ("prefill", "decode", "inference"):
            attributes[f"gen_ai.latency.time_in_model_{stage}"] = spent[stage]
    return attributes
