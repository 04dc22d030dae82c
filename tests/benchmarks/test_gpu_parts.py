"""The program for a GPU proves itself on a CPU: every part runs with small sizes, and a broken one costs no other."""

import json
import os
import subprocess
import sys
import tempfile
import textwrap
from pathlib import Path

import pytest

from benchmarks.gpu.__main__ import ROOT, run_part
from benchmarks.gpu.parts import PARTS, GPUPart

triton = pytest.importorskip("triton")


@pytest.mark.full
@pytest.mark.timeout(900)
def test_every_part_passes_on_a_cpu_and_is_recorded(tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "benchmarks.gpu",
        "--tiny",
        "--device",
        "cpu",
        "--jobs",
        "2",
        "--out",
        str(tmp_path),
    ]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=800)
    assert done.returncode == 0, done.stdout[-3000:]
    record = json.loads((tmp_path / "gpu.json").read_text())
    assert {part["name"] for part in record["parts"]} == {part.name for part in PARTS}
    assert all(part["figures"] and not part["error"] for part in record["parts"])
    text = (tmp_path / "gpu.md").read_text()
    assert all(f"## {part.name}: passed" in text for part in PARTS)


@pytest.mark.parametrize("body, error", [
    ("raise AssertionError('other tokens')", "other tokens"),
    ("import os; os._exit(9)", "ended with 9"),
    ("import time; time.sleep(60)", "not done within"),
])  # fmt: skip
@pytest.mark.full
def test_a_part_that_fails_dies_or_hangs_is_an_outcome(body: str, error: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with tempfile.TemporaryDirectory() as folder:
        package = Path(folder) / "sitecustomize.py"
        package.write_text(
            textwrap.dedent(f"""
                import sys, types
                part = types.ModuleType("benchmarks.gpu.parts.broken")
                def measure(device, *, tiny):
                    {body}
                part.measure = measure
                sys.modules["benchmarks.gpu.parts.broken"] = part
            """)
        )
        monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [folder, *sys.path])))
        outcome = run_part(GPUPart("broken", 60.0), "cpu", tiny=True, limit_s=5.0 if "sleep" in body else 60.0)
    assert error in outcome.error and not outcome.figures
    assert ("most recent call first" in outcome.log) == ("sleep" in body), outcome.log  # where it was cut off
