"""Responses of one gateway's servers by code, including refusals."""

from collections import Counter
from collections.abc import Iterator

from prometheus_client.metrics_core import Metric

from cluster.observe.metrics.families import Rows, counter

HTTP_CODES = (200, 400, 401, 403, 404, 408, 413, 429, 499, 500, 503, 504)
HTTP_METHODS = ("completions", "chat", "responses", "messages")
GRPC_CODES = (
    *("OK", "CANCELLED", "INVALID_ARGUMENT", "DEADLINE_EXCEEDED", "NOT_FOUND", "ALREADY_EXISTS", "PERMISSION_DENIED"),
    *("RESOURCE_EXHAUSTED", "INTERNAL", "UNAVAILABLE", "UNAUTHENTICATED"),
)
# Exported from the start: Prometheus would not see the first increase of a series that starts with it.
KNOWN = (
    *(("http", method, str(code)) for method in HTTP_METHODS for code in HTTP_CODES),
    *(("grpc", "Generate", code) for code in GRPC_CODES),
)


class Responses:
    """Counts responses. Owned by a gateway."""

    def __init__(self) -> None:
        self._counts = Counter(dict.fromkeys(KNOWN, 0))

    def count(self, server: str, method: str, code: str) -> None:
        """`method` and `code` must come from a bounded set, whatever clients send."""
        self._counts[server, method, code] += 1

    def rows(self) -> tuple[tuple[tuple[str, str, str], int], ...]:
        """(server, method, code), and the count."""
        return tuple(self._counts.items())


def response_families(gateway: str, responses: Rows) -> Iterator[Metric]:
    labels = ("gateway", "api", "method", "code")
    rows = (((gateway, *values), count) for values, count in responses)
    yield counter("diptych_responses", "Calls that the servers have answered, refusals too.", labels, rows)
