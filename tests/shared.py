"""Public traces outside the repository, in the folder that DIPTYCH_SHARED names (default: ../shared)."""

import os
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


def shared(path: str) -> Path:
    """The file; skips the test if it is missing."""
    folder = Path(os.environ.get("DIPTYCH_SHARED", ROOT.parent / "shared"))
    if not (folder / path).exists():
        pytest.skip(f"the public data {path} is not here; put it under {folder}, or set DIPTYCH_SHARED")
    return folder / path
