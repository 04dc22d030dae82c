"""A collector of spans: OTLP as it is on the wire, over gRPC and over HTTP, kept in memory."""

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import grpc
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest as Export
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceResponse as Taken
from opentelemetry.proto.collector.trace.v1.trace_service_pb2_grpc import (
    TraceServiceServicer,
    add_TraceServiceServicer_to_server,
)
from opentelemetry.proto.common.v1.common_pb2 import AnyValue

WAIT_S = 30.0


@dataclass(frozen=True)
class Collected:
    """A span, its bytes as hexadecimal digits."""

    name: str
    trace: str
    id: str
    parent: str
    kind: int
    begin_ns: int
    end_ns: int
    code: int
    status: str
    attributes: dict[str, Any]
    events: tuple[tuple[str, int, dict[str, Any]], ...]
    resource: dict[str, Any]
    headers: dict[str, str]


class Collector(TraceServiceServicer):
    def __init__(self) -> None:
        self.endpoint = ""
        self._spans: list[Collected] = []
        self._came = threading.Condition()

    def Export(self, request: Export, context: grpc.ServicerContext) -> Taken:
        self.take(request, {str(key): str(value) for key, value in context.invocation_metadata()})
        return Taken()

    def take(self, export: Any, headers: dict[str, str]) -> None:
        found = []
        for group in export.resource_spans:
            resource = values(group.resource.attributes)
            for span in (span for scope in group.scope_spans for span in scope.spans):
                events = tuple((each.name, each.time_unix_nano, values(each.attributes)) for each in span.events)
                ids = span.trace_id.hex(), span.span_id.hex(), span.parent_span_id.hex()
                times = span.start_time_unix_nano, span.end_time_unix_nano
                status = span.status.code, span.status.message
                attributes = values(span.attributes)
                found.append(
                    Collected(span.name, *ids, span.kind, *times, *status, attributes, events, resource, headers)
                )
        with self._came:
            self._spans += found
            self._came.notify_all()

    def wait(self, wanted: Callable[[Collected], bool], count: int = 1) -> list[Collected]:
        """The first so many that are wanted, once they are there."""
        with self._came:
            found = self._came.wait_for(lambda: len(self.among(wanted)) >= count, WAIT_S)
            assert found, [(each.name, each.attributes) for each in self._spans]
            return self.among(wanted)

    def among(self, wanted: Callable[[Collected], bool]) -> list[Collected]:
        return [each for each in self._spans if wanted(each)]

    def request(self, request_id: str) -> Collected:
        """The span of this request."""
        return self.wait(lambda each: each.attributes.get("gen_ai.request.id") == request_id)[0]

    def children(self, parent: Collected) -> list[Collected]:
        """Those that came with it, by time."""
        found = self.among(lambda each: each.parent == parent.id and each.trace == parent.trace)
        return sorted(found, key=lambda each: (each.begin_ns, each.end_ns))


def values(pairs: Any) -> dict[str, Any]:
    return {pair.key: plain(pair.value) for pair in pairs}


def plain(value: AnyValue) -> Any:
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return [plain(each) for each in value.array_value.values]
    return getattr(value, str(kind))


@contextmanager
def over_grpc() -> Iterator[Collector]:
    collector = Collector()
    server = grpc.server(ThreadPoolExecutor(2))
    add_TraceServiceServicer_to_server(collector, server)
    collector.endpoint = f"http://127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    try:
        yield collector
    finally:
        server.stop(1.0).wait()


@contextmanager
def over_http() -> Iterator[Collector]:
    collector = Collector()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            assert self.path == "/v1/traces"
            collector.take(Export.FromString(body), {key.lower(): value for key, value in self.headers.items()})
            self.send_response(200)
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, format: str, *args: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    collector.endpoint = f"http://127.0.0.1:{server.server_port}"
    try:
        yield collector
    finally:
        server.shutdown()
        server.server_close()
