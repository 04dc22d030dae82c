"""Public traces that the project does not carry: found beside the repository, or where DIPTYCH_SHARED says."""

import os
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


def shared(path: str) -> Path:
    """The file, or a skip that says what is missing."""
    folder = Path(os.environ.get("DIPTYCH_SHARED", ROOT.parent / "shared"))
    if not (folder / path).exists():
        pytest.skip(f"the public data {path} is not here; put it under {folder}, or set DIPTYCH_SHARED")
    return folder / path
