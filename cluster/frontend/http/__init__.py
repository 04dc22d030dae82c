"""The HTTP door: OpenAI's requests and answers over the same gateway that the gRPC door has.

Needs the extra `http`. Importing this package alone loads nothing of it.
"""

from importlib.util import find_spec

from cluster.runtime.interface import RuntimeUnavailable


def check_extra() -> None:
    """Raises `RuntimeUnavailable` when the packages of the extra are not there."""
    missing = [name for name in ("fastapi", "uvicorn") if find_spec(name) is None]
    if missing:
        lacks = f"gateway.http_port is set, but {' and '.join(missing)} cannot be imported"
        raise RuntimeUnavailable(f"{lacks}; pip install 'diptych[http]', or leave http_port out")
