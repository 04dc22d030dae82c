"""The trace that a request belongs to, as its client names it (W3C Trace Context). Goes with the task that serves it.

Knows names of headers; what they hold is read by whoever writes spans (`cluster.observe.otlp`).
"""

from collections.abc import Iterable, Mapping
from contextvars import ContextVar

HEADERS = ("traceparent", "tracestate")
LONGEST = 4096  # longer ones are ignored

_headers: ContextVar[Mapping[str, str]] = ContextVar("trace_headers")


def set_trace_headers(headers: Iterable[tuple[str, str | bytes]]) -> None:
    """This task, and those that it starts from now on, serve a request with these headers; names are lower-case."""
    found = {name: value for name, value in headers if name in HEADERS and isinstance(value, str)}
    _headers.set(found if sum(map(len, found.values())) <= LONGEST else {})


def trace_headers() -> Mapping[str, str]:
    """Those of `HEADERS` that the request had."""
    return _headers.get({})
