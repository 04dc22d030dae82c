"""NIXL is installed in the build for torch's CUDA, and `diptych doctor` says when it is not."""

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import torch

from kvtransfer.backends import nixl_build
from kvtransfer.backends.nixl_agent import MODULES
from kvtransfer.backends.nixl_build import mismatch, nixl_extra

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(
    ("cuda", "extra"),
    [(None, "nixl"), ("12.6", "nixl"), ("12.8", "nixl"), ("13.0", "nixl-cu13")],
)
def test_the_extra_is_that_of_torch_s_cuda(cuda: str | None, extra: str) -> None:
    assert nixl_extra(cuda) == extra
    assert extra in tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]


@pytest.mark.parametrize(
    ("module", "cuda", "words"),
    [
        ("nixl_cu12", "13.0", "CUDA 12 and torch for CUDA 13.0: pip install 'diptych[nixl-cu13]'"),
        ("nixl_cu13", "12.8", "CUDA 13 and torch for CUDA 12.8: pip install 'diptych[nixl]'"),
        ("nixl_cu13", "13.0", ""),
        ("nixl_cu12", None, ""),
        ("nixl", "13.0", ""),
        ("not usable", "13.0", ""),
    ],
)
def test_a_nixl_build_for_another_cuda_is_reported_with_its_fix(module: str, cuda: str | None, words: str) -> None:
    assert module in MODULES or module == "not usable"
    assert mismatch(module, cuda) == (f"{module} is built for {words}" if words else "")


def test_make_runs_it_with_torch_alone() -> None:
    made = subprocess.run([sys.executable, "-P", nixl_build.__file__], capture_output=True, text=True, timeout=120)
    assert (made.returncode, made.stdout.strip()) == (0, nixl_extra(torch.version.cuda)), made.stderr
    assert f"-P {Path(nixl_build.__file__).relative_to(ROOT)}" in (ROOT / "Makefile").read_text()
