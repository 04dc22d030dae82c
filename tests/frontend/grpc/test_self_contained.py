"""The client of a built wheel, in a project that has packages named like ours."""

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.test_packaging import ALONE, libraries

ROOT = Path(__file__).resolve().parents[3]
ASK = """
from diptych.client import AsyncClient, Client, DiptychError, TextDelta
import cluster, diptych, kvtransfer, workers
assert {each.OWNER for each in (cluster, kvtransfer, workers)} == {"the project"}
print(diptych.__file__)
with Client(sys.argv[1]) as client:
    client.wait_ready(timeout_s=10)
    print(client.complete("across the sea", max_tokens=64).text)
    print("".join(e.text for e in client.generate("across the sea", max_tokens=64) if isinstance(e, TextDelta)))
    print(*(worker.state.value for worker in client.status().view.workers))
    print(client.metrics().count("# TYPE") > 0)
    try:
        client.complete("", max_tokens=1)
    except DiptychError as error:
        print(error.code, error.field)
print([name for name in sys.modules if name.partition(".")[0] in ("torch", "ray")])
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built of our `pyproject.toml` from the folder `proto` alone."""
    folder = tmp_path_factory.mktemp("wheel")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, folder)
    shutil.copytree(ROOT / "proto", folder / "proto", ignore=shutil.ignore_patterns("__pycache__"))
    build = "import sys; from setuptools.build_meta import build_wheel; build_wheel(sys.argv[1])"
    done = subprocess.run(
        [sys.executable, "-c", build, "dist"], cwd=folder, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    (made,) = (folder / "dist").glob("*.whl")
    return made


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A folder with packages of our names; each has one line of its own."""
    for name in ("workers", "cluster", "kvtransfer"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("OWNER = 'the project'\n")
    return tmp_path


def test_the_wheel_has_the_client_its_types_and_the_generated_code(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    sources = {f"diptych/{path.relative_to(ROOT / 'proto/diptych')}" for path in (ROOT / "proto/diptych").rglob("*.py")}
    assert {*sources, "diptych/py.typed"} <= names
    assert "diptych/client.py" in sources and "diptych/v1/inference_pb2_grpc.py" in sources


def test_the_client_works_beside_packages_with_the_same_names(wheel: Path, project: Path, endpoint: str) -> None:
    site = project / "site"
    zipfile.ZipFile(wheel).extractall(site)
    environment = {**os.environ, "PYTHONPATH": f"{project}{os.pathsep}{site}"}
    command = [sys.executable, "-c", ALONE + ASK, ",".join(sorted(libraries())), endpoint]
    done = subprocess.run(command, cwd=project, env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    found, whole, streamed, states, has_metrics, refused, heavy = done.stdout.splitlines()
    assert whole == streamed == "ROSS THE SEA"
    assert "ready" in states and has_metrics == "True"
    assert Path(found).is_relative_to(site)
    assert refused == "INVALID_ARGUMENT prompt.text" and heavy == "[]"


def test_the_generated_code_needs_no_other_package(project: Path, endpoint: str) -> None:
    asking = """
import sys, grpc
from diptych.v1 import inference_pb2, inference_pb2_grpc
with grpc.insecure_channel(sys.argv[1], options=[("grpc.enable_http_proxy", 0)]) as channel:
    request = inference_pb2.GenerateRequest(text="across the sea", sampling={"max_tokens": 64})
    answers = inference_pb2_grpc.InferenceServiceStub(channel).Generate(request)
    print("".join(answer.delta.text for answer in answers))
"""
    environment = {**os.environ, "PYTHONPATH": f"{project}{os.pathsep}{ROOT / 'proto'}"}
    command = [sys.executable, "-c", asking, endpoint]
    done = subprocess.run(command, cwd=project, env=environment, capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "ROSS THE SEA", done.stderr
