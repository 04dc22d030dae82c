"""Structured fields of a log line: component, request, figures. Knows no handler and no format."""

import logging
from typing import Any


def log_fields(component: str = "", key: str = "", **fields: object) -> dict[str, Any]:
    """For `extra` of a log call. An empty `component` is the process's own; `key` is a request's or an attempt's id.

    Never pass a prompt, a text or a token: `cluster.runtime.logs` writes all of it.
    """
    return {"component": component, "request_id": key.partition("/")[0], "fields": fields}


def log_request(logger: logging.Logger, component: str, key: str, message: str, *args: object) -> None:
    """Log what a component does for a request."""
    if logger.isEnabledFor(logging.INFO):
        fields = log_fields(component, key)
        logger.info(f"request %s: {message}", fields["request_id"], *args, extra=fields)
