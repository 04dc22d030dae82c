"""What a log line is about, beside its words: whose it is, which request, figures. Knows no handler and no format."""

from typing import Any


def about(component: str = "", key: str = "", **fields: object) -> dict[str, Any]:
    """For `extra` of a log call. `component` empty: the process's own; `key` is a request's id, or that of an attempt.

    Never a prompt, a text or a token: `cluster.logs` writes all of it.
    """
    return {"component": component, "request_id": key.partition("/")[0], "fields": fields}
