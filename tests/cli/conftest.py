"""The gRPC server in another thread, shared with the frontend's tests; hides the servers that this user runs."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.frontend.grpc.conftest import endpoint as endpoint


@pytest.fixture(autouse=True)
def runtime_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where servers of this machine are announced: one for each test."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.delenv("DIPTYCH_ENDPOINT", raising=False)
    yield tmp_path
