"""An impossible parallel setting is refused by `diptych serve` itself, in one line and with exit code 1."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.model.tiny import write_tiny_llama
from tests.ray.served import ROOT, laptop

pytestmark = [pytest.mark.ray, pytest.mark.timeout(300)]


@pytest.mark.grid
@pytest.mark.parametrize(
    ("parallel", "words"),
    [
        ({"pipeline": 3}, "parallel.pipeline is 3, but the model has 2 layers; set it to 2 or less"),
        (
            {"tensor": 2, "placement": "strict_spread"},
            "no room for prefill-0: it needs {CPU: 1} on each of 2 nodes; the only node, if empty, would hold",
        ),
    ],
    ids=["stages", "placement"],
)
def test_an_impossible_setting_is_refused_at_start(tmp_path: Path, parallel: dict[str, Any], words: str) -> None:
    document = laptop(model=str(write_tiny_llama(tmp_path / "tiny")), health={"place_timeout_s": 3.0})
    document["pools"][0]["parallel"] = parallel
    path = tmp_path / "cluster.yaml"
    path.write_text(yaml.safe_dump(document))
    ended = subprocess.run(
        [sys.executable, "-m", "cluster.cli", "serve", "-f", str(path)],
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=200,
        check=False,
    )
    assert ended.returncode == 1, ended.stdout + ended.stderr
    errors = [line for line in ended.stderr.splitlines() if line.startswith("Error: ")]
    assert len(errors) == 1 and words in errors[0], ended.stdout + ended.stderr
    assert "Traceback" not in ended.stdout + ended.stderr


def test_too_few_open_files_are_refused_before_ray_starts(tmp_path: Path) -> None:
    path = tmp_path / "cluster.yaml"
    path.write_text(yaml.safe_dump(laptop(executor="simulated")))
    ended = subprocess.run(
        ["sh", "-c", 'ulimit -n 100 && exec "$@"', "sh", sys.executable, "-m", "cluster.cli", "serve", "-f", str(path)],
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=60,
        check=False,
    )
    said = "Error: a process may have 100 files open here, and Ray needs 256; raise the hard limit of open files"
    assert ended.returncode == 1 and said in ended.stderr, ended.stdout + ended.stderr
    assert "starting Ray" not in ended.stdout
