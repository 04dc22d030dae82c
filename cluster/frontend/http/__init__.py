"""The HTTP server: OpenAI's API on the same gateway as the gRPC server.

Needs the extra `http`. Importing this package alone imports none of its libraries.
"""

from importlib.util import find_spec

from cluster.runtime.runtime_errors import RuntimeUnavailable


def missing_packages() -> list[str]:
    """Packages of the extra that are not installed."""
    return [name for name in ("fastapi", "uvicorn") if find_spec(name) is None]


def check_extra() -> None:
    """Raises `RuntimeUnavailable` when packages of the extra are missing."""
    if missing := missing_packages():
        problem = f"gateway.http_port is set, but {' and '.join(missing)} cannot be imported"
        raise RuntimeUnavailable(f"{problem}; pip install 'diptych[http]', or leave http_port out")
