"""The W3C trace headers of the current task's request; `cluster.observe.otlp` parses them."""

from collections.abc import Iterable, Mapping
from contextvars import ContextVar

HEADERS = ("traceparent", "tracestate")
MAX_CHARS = 4096  # longer headers are ignored

_headers: ContextVar[Mapping[str, str]] = ContextVar("trace_headers")


def set_trace_headers(headers: Iterable[tuple[str, str | bytes]]) -> None:
    """Set the headers for this task and the tasks that it starts. Names are lower-case."""
    found = {name: value for name, value in headers if name in HEADERS and isinstance(value, str)}
    _headers.set(found if sum(map(len, found.values())) <= MAX_CHARS else {})


def trace_headers() -> Mapping[str, str]:
    """The current request's trace headers."""
    return _headers.get({})
