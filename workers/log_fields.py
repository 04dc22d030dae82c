"""Structured fields of a log line: component, request, figures. Knows no handler and no format."""

from typing import Any


def log_fields(component: str = "", key: str = "", **fields: object) -> dict[str, Any]:
    """For `extra` of a log call. An empty `component` is the process's own; `key` is a request's or an attempt's id.

    Never pass a prompt, a text or a token: `cluster.runtime.logs` writes all of it.
    """
    return {"component": component, "request_id": key.partition("/")[0], "fields": fields}
