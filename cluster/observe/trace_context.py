"""The trace headers of the current task's request (W3C Trace Context); `cluster.observe.otlp` parses them."""

from collections.abc import Iterable, Mapping
from contextvars import ContextVar

HEADERS = ("traceparent", "tracestate")
LONGEST = 4096  # longer ones are ignored

_headers: ContextVar[Mapping[str, str]] = ContextVar("trace_headers")


def set_trace_headers(headers: Iterable[tuple[str, str | bytes]]) -> None:
    """Set them for this task and those that it starts. Names are lower-case."""
    found = {name: value for name, value in headers if name in HEADERS and isinstance(value, str)}
    _headers.set(found if sum(map(len, found.values())) <= LONGEST else {})


def trace_headers() -> Mapping[str, str]:
    """The request's `HEADERS`."""
    return _headers.get({})
